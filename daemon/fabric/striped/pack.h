/// \file
/// Several blobs as one: the stripes' addresses, or their keys of one region. Blobs are structs
/// whose last part is mostly zero; those bytes are left away.
#pragma once

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "daemon/fabric/fabric.h"

namespace mk::fabric {

inline constexpr std::uint32_t kStripesMax = 8;

struct PackHead {
  static constexpr std::uint32_t kMagic = 0x31'73'6b'6d;  // "mks1"
  std::uint32_t magic = kMagic;
  std::uint16_t count = 0;
  std::uint16_t reserved = 0;
};
struct PackEntry {
  std::uint16_t bytes = 0;   ///< of the blob
  std::uint16_t stored = 0;  ///< of those, what follows; the rest is zero
};

inline Bytes pack(const std::vector<Bytes>& blobs) {
  Bytes packed(sizeof(PackHead));
  const PackHead head{PackHead::kMagic, static_cast<std::uint16_t>(blobs.size()), 0};
  std::memcpy(packed.data(), &head, sizeof head);
  for (const Bytes& blob : blobs) {
    std::size_t stored = blob.size();
    while (stored > 0 && blob[stored - 1] == std::byte{0}) --stored;
    const PackEntry entry{static_cast<std::uint16_t>(blob.size()),
                          static_cast<std::uint16_t>(stored)};
    const std::size_t at = packed.size();
    packed.resize(at + sizeof entry + stored);
    std::memcpy(packed.data() + at, &entry, sizeof entry);
    if (stored > 0) std::memcpy(packed.data() + at + sizeof entry, blob.data(), stored);
  }
  return packed;
}

/// The blobs back; nullopt when the bytes are no pack of `count`.
inline std::optional<std::vector<Bytes>> unpack(std::span<const std::byte> packed,
                                                std::size_t count) {
  constexpr std::size_t kBlobBytesMax = 4096;
  PackHead head;
  if (packed.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, packed.data(), sizeof head);
  if (head.magic != PackHead::kMagic || head.count != count || head.reserved != 0)
    return std::nullopt;
  packed = packed.subspan(sizeof head);
  std::vector<Bytes> blobs;
  for (std::size_t i = 0; i < count; ++i) {
    PackEntry entry;
    if (packed.size() < sizeof entry) return std::nullopt;
    std::memcpy(&entry, packed.data(), sizeof entry);
    packed = packed.subspan(sizeof entry);
    if (entry.stored > entry.bytes || entry.bytes > kBlobBytesMax || entry.stored > packed.size())
      return std::nullopt;
    Bytes& blob = blobs.emplace_back(entry.bytes);
    if (entry.stored > 0) std::memcpy(blob.data(), packed.data(), entry.stored);
    packed = packed.subspan(entry.stored);
  }
  if (!packed.empty()) return std::nullopt;
  return blobs;
}

}  // namespace mk::fabric
