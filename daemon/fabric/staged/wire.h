/// \file
/// What staging endpoints tell each other: the key of a GPU buffer, the record of a write, and the
/// 32 bits that come with each half of it.
#pragma once

#include "daemon/fabric/blob.h"
#include "shm/limits.h"

namespace mk::fabric::staged {

/// GPU buffers one endpoint has registered at once.
inline constexpr std::uint32_t kRegionsMax = 128;

/// The front of a GPU buffer's key. The second endpoint's address follows, then the key that the
/// buffer's host memory has there, then, where its NIC reaches the buffer by itself, the buffer's
/// own; packed.
struct KeyHead {
  static constexpr std::uint64_t kMagic = 0x32'79'65'6b'74'73'6b'6d;  // "mkstkey2"
  std::uint64_t magic = kMagic;
  std::uint64_t bytes = 0;
  std::uint64_t region = 0;  ///< its number at its owner
  std::uint64_t direct = 0;  ///< 1: data goes to the buffer itself, not to an image of it
};

/// What a write says of itself, at its flag's place among the records of the buffer it goes to.
struct Record {
  std::uint64_t flags = 0;  ///< the digest of the key that the flags' memory has
  std::uint64_t offset = 0;
  std::uint32_t bytes = 0;
  std::uint32_t flag_index = 0;
  std::uint32_t epoch = 0;
  std::uint32_t immediate = 0;
};
static_assert(sizeof(Record) == 32);

/// A buffer's host memory: a record for each flag, then, where it is staged, an image of the buffer
/// itself.
inline constexpr std::uint64_t kImageOffset = std::uint64_t{shm::kFlagsMax} * sizeof(Record);

/// Which half of which write arrived. The halves of one write have the same nonce, so that one that
/// a broken link left alone does not meet another write's.
struct Half {
  bool record = false;
  std::uint32_t region = 0;
  std::uint32_t flag_index = 0;
  std::uint8_t nonce = 0;

  std::uint32_t pack() const {
    return (record ? 1u << 31 : 0) | region << 24 | flag_index << 8 | nonce;
  }
  static Half unpack(std::uint32_t word) {
    return {word >> 31 != 0, word >> 24 & (kRegionsMax - 1), word >> 8 & 0xffff,
            static_cast<std::uint8_t>(word)};
  }
};
static_assert(kRegionsMax == 1u << 7 && shm::kFlagsMax == 1u << 16);

/// FNV-1a; keys have random tokens in them.
inline std::uint64_t digest_of(std::span<const std::byte> key) {
  std::uint64_t digest = 14695981039346656037ull;
  for (const std::byte byte : key)
    digest = (digest ^ std::to_integer<std::uint64_t>(byte)) * 1099511628211ull;
  return digest == 0 ? 1 : digest;
}

}  // namespace mk::fabric::staged
