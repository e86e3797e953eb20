/// \file
/// What daemons keep of a job's secret, a digest from which nobody gets the secret back; and how
/// they prove to each other that they have it, without telling it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "daemon/control/peer_transport.h"

namespace mk::daemon {

inline constexpr std::size_t kDigestBytes = 32;

/// SHA-256 (FIPS 180-4) of `message`, 32 bytes.
Bytes sha256(std::span<const std::byte> message);

/// SHA-256 over the job's name and secret, the name's end marked; empty when `secret` is.
Bytes job_secret_digest(std::string_view job, std::string_view secret);

/// HMAC (RFC 2104) of `message` with SHA-256, 32 bytes.
Bytes hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);

inline constexpr std::size_t kNonceBytes = 32;

/// One of the two who have a part of a job.
struct ProofParty {
  NodeId node = 0;
  std::uint32_t uid = 0;
  std::uint64_t part_id = 0;
  std::span<const std::byte> nonce;
};

/// What `from` shows `to`: only one that knows `digest` can make it. It is worth nothing to, or
/// from, any other node, part or run. Without a secret (an empty digest) it proves nothing, and is
/// made all the same.
Bytes job_proof(std::span<const std::byte> digest, std::string_view job, const ProofParty& from,
                const ProofParty& to);

/// Equal, in a time that does not tell where they differ.
bool same_proof(std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace mk::daemon
