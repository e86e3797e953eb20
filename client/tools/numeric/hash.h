/// \file
/// A hash, which tells if two processes have the same bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "client/tools/numeric/random_matrix.h"

namespace mk::tools {

/// `hash`: of what came before.
inline std::uint64_t hash_of(std::span<const std::byte> bytes, std::uint64_t hash = 0) {
  hash = mix64(hash ^ bytes.size());
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof(word), bytes.size() - at));
    hash = mix64(hash ^ word);
  }
  return hash;
}

}  // namespace mk::tools
