/// \file
/// The numbers that all ranks of a Ring Attention agree on for the operator's lifetime. plan.h
/// makes them; per launch: schedule.h. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/types.h"
#include "kernels/gather/geometry.h"

namespace mk::kernels {

/// Passes over the remote keys, at most.
inline constexpr std::uint32_t kRemotePassesMax = 8;

struct RingAttentionGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t seq_max = 0;  ///< the longest sequence, over all ranks
  std::uint32_t query_heads = 0;
  std::uint32_t key_heads = 0;  ///< of K and of V
  std::uint32_t head_dim = 0;   ///< 64 or 128
  bool causal = false;
  DType dtype = DType::kBf16;
  std::uint32_t tile_q = 0;         ///< sequence rows of a tile of queries, at most
  std::uint32_t tile_k = 0;         ///< keys of a tile, at most
  std::uint32_t remote_passes = 1;  ///< see schedule.h
  std::uint32_t banks = 2;
  std::uint64_t workspace_bytes = 0;
  /// One row: K of all key heads, then V of all key heads.
  GatherGeometry gather;

  /// Query heads that share a key head.
  MK_HOST_DEVICE constexpr std::uint32_t group() const { return query_heads / key_heads; }
  /// Bytes of a sequence row of K, or of V.
  MK_HOST_DEVICE constexpr std::uint32_t key_row_bytes() const {
    return key_heads * head_dim * kElementBytes;
  }
  /// Parts the sequence is cut into, and how many of them a rank holds.
  MK_HOST_DEVICE constexpr std::uint32_t parts() const { return nodes * locals * parts_per_rank(); }
  MK_HOST_DEVICE constexpr std::uint32_t parts_per_rank() const { return causal ? 2 : 1; }
};

}  // namespace mk::kernels
