/// \file
/// Whose TLS handshakes with this daemon's port have failed, and why: for its log and `status`. Of
/// peers that it knows, the watch of certificates knows more (tls/peer_watch.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/service/log.h"

namespace mk::daemon {

struct TlsRefusal {
  std::string remote;  ///< HOST:PORT of the last one; several when it may have been any of them
  std::string cause;   ///< of the last one: a clause with what to do
  std::uint64_t count = 0;
  std::uint64_t ago_ns = 0;
};

/// What to mend when a handshake with a caller ends with that error of OpenSSL.
std::string handshake_cause(std::string_view openssl_error);

/// Thread-safe.
class TlsRefusals {
 public:
  static constexpr std::size_t kHosts = 8;
  static constexpr std::chrono::hours kKept{1};
  /// Peers try ten times a second: what a host repeats has one line for so long.
  static constexpr std::chrono::minutes kLoggedEvery{1};

  explicit TlsRefusals(Logger& logger) : logger_(logger) {}

  /// `remotes`: who it may have been, HOST:PORT each; one at least.
  void note(const std::vector<std::string>& remotes, std::string_view openssl_error);
  /// Those of the last hour by host, the newest first; kHosts at most.
  std::vector<TlsRefusal> list() const;

 private:
  struct Entry {
    std::string hosts;  ///< whose they are
    TlsRefusal refusal;
    std::chrono::steady_clock::time_point last, logged;
    std::uint64_t unlogged = 0;  ///< since then
  };

  Logger& logger_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;  ///< the newest first
};

}  // namespace mk::daemon
