/// \file
/// Stable error codes: the header's error word, the socket protocol, the C ABI and the Admin
/// service use the same numbers. A number is never reused.
#pragma once

#include <cstdint>

namespace mk {

enum class ErrorCode : std::uint32_t {
  kOk = 0,
  kInvalidArgument = 1,  ///< the caller's argument is wrong; the message says what is allowed
  kAbiMismatch = 2,      ///< client and daemon speak different ABI versions
  kProtocol = 3,         ///< a malformed or unexpected message on a socket
  kNotFound = 4,         ///< no such job, handle, peer or file
  kAlreadyExists = 5,    ///< duplicate rank, job name in use, socket held by another daemon
  kLimitExceeded = 6,    ///< a limit of limits.h or of the configuration
  kPermission = 7,       ///< the peer's credentials do not allow it
  kUnavailable = 8,      ///< the daemon, a peer daemon or a device cannot be reached now
  kTimeout = 9,          ///< a deadline passed; the message names who was waited for
  kAborted = 10,         ///< another member of the job failed
  kBadCommand = 11,      ///< a ring held a command that failed validation
  kLinkDown = 12,        ///< the link to a peer is in error
  kDaemonLost = 13,      ///< the daemon died, restarted, or its heartbeat stopped
  kPeerLost = 14,        ///< another rank of the job died or detached
  kShapeMismatch = 15,   ///< ranks disagree about an operator's shape
  kSystem = 16,          ///< the operating system refused something; errno is in the message
  kUnsupported = 17,     ///< this build or machine cannot do it; the message says why
  kDraining = 18,        ///< the daemon is shutting down
  kInternal = 19,        ///< a bug of ours
};

/// The code's stable name, e.g. "timeout".
constexpr const char* error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "ok";
    case ErrorCode::kInvalidArgument:
      return "invalid-argument";
    case ErrorCode::kAbiMismatch:
      return "abi-mismatch";
    case ErrorCode::kProtocol:
      return "protocol";
    case ErrorCode::kNotFound:
      return "not-found";
    case ErrorCode::kAlreadyExists:
      return "already-exists";
    case ErrorCode::kLimitExceeded:
      return "limit-exceeded";
    case ErrorCode::kPermission:
      return "permission";
    case ErrorCode::kUnavailable:
      return "unavailable";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kAborted:
      return "aborted";
    case ErrorCode::kBadCommand:
      return "bad-command";
    case ErrorCode::kLinkDown:
      return "link-down";
    case ErrorCode::kDaemonLost:
      return "daemon-lost";
    case ErrorCode::kPeerLost:
      return "peer-lost";
    case ErrorCode::kShapeMismatch:
      return "shape-mismatch";
    case ErrorCode::kSystem:
      return "system";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kDraining:
      return "draining";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "unknown";
}

}  // namespace mk
