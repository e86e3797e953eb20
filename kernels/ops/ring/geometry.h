/// \file
/// The numbers that all ranks of a Ring Attention agree on for the operator's lifetime. spec.h
/// makes them; per launch: schedule.h. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/comm/types.h"
#include "kernels/gather/geometry.h"

namespace mk::kernels {

/// Passes over the remote keys, at most.
inline constexpr std::uint32_t kRemotePassesMax = 8;

/// In which order a rank's keys and values lie in its packed rows, and so arrive.
enum class KeyPacking : std::uint8_t {
  /// Row by row: a row of the gather is a row of the sequence, K of all key heads, then V. Its
  /// batches follow each other. For executors that take all heads of a tile of keys before the next
  /// tile (passes).
  kRows = 0,
  /// Head by head: a row of the gather is one head's, of one row of the sequence. K of the first
  /// head, all its rows, then its V, then the next head's, then the next batch's. A head is
  /// complete as soon as its own bytes are there. For executors that take one head over all its
  /// keys. Several heads of a batch may be together (heads_together): K of all of them row by row,
  /// then their V.
  kHeads = 1,
};

/// Key heads of one batch, or all those of some batches.
struct HeadWindow {
  std::uint32_t batch = 0;  ///< the first
  std::uint32_t batches = 1;
  std::uint32_t key_head = 0;  ///< the first, of each
  std::uint32_t key_heads = 1;
};

struct RingAttentionGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t batch = 1;    ///< sequences of one length
  std::uint32_t seq_max = 0;  ///< the longest sequence, over all ranks; packed: rows in all
  std::uint32_t sequences_max =
      0;  ///< packed.h: of different lengths, in one launch; 0: one length
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
  /// Pairs of K and V (head_pairs) that the workspace has room for, at most.
  std::uint32_t window_pairs = 0;
  KeyPacking packing = KeyPacking::kRows;
  /// kHeads: key heads of a batch whose rows lie side by side, a power of two that divides
  /// key_heads. Copy engines bring them by fewer copies.
  std::uint32_t heads_together = 1;
  /// Copy engines may bring keys within the node (RingAttentionLaunch::by_dma).
  bool engines = false;
  GatherGeometry gather;

  /// Query heads that share a key head.
  MK_HOST_DEVICE constexpr std::uint32_t group() const { return query_heads / key_heads; }
  /// Pairs of K and V of one head: the key heads of all batches.
  MK_HOST_DEVICE constexpr std::uint32_t head_pairs() const { return batch * key_heads; }
  /// Units of heads that are together, which come one after the other.
  MK_HOST_DEVICE constexpr std::uint32_t head_units() const {
    return head_pairs() / heads_together;
  }

  // --- Windows of heads --- A launch goes through its heads window by window, each of which is a
  // launch of the protocol by itself. Banks and releases are the credits that let a rank write the
  // next one's keys.

  MK_HOST_DEVICE constexpr std::uint32_t windows() const {
    return window_pairs < key_heads ? batch * div_up(key_heads, window_pairs)
                                    : div_up(batch, window_pairs / key_heads);
  }
  MK_HOST_DEVICE constexpr HeadWindow window(std::uint32_t index) const {
    if (window_pairs >= key_heads) {
      const std::uint32_t most = window_pairs / key_heads;
      const std::uint32_t left = batch - index * most;
      return {index * most, left < most ? left : most, 0, key_heads};
    }
    const std::uint32_t of_batch = div_up(key_heads, window_pairs);
    const std::uint32_t first = index % of_batch * window_pairs;
    const std::uint32_t left = key_heads - first;
    return {index / of_batch, 1, first, left < window_pairs ? left : window_pairs};
  }
  /// As if there were no other heads.
  MK_HOST_DEVICE constexpr RingAttentionGeometry of_window(const HeadWindow& heads) const {
    RingAttentionGeometry its = *this;
    its.batch = heads.batches;
    its.query_heads = heads.key_heads * group();
    its.key_heads = heads.key_heads;
    its.window_pairs = its.head_pairs();
    return its;
  }

  /// Bytes of one head's row.
  MK_HOST_DEVICE constexpr std::uint32_t head_bytes() const { return head_dim * kElementBytes; }
  /// Rows of the gather of a rank with `sequence` rows of the sequence, and bytes of one.
  MK_HOST_DEVICE constexpr std::uint32_t gathered_rows(std::uint32_t sequence) const {
    return sequence * (packing == KeyPacking::kRows ? batch : 2 * head_pairs());
  }
  MK_HOST_DEVICE constexpr std::uint32_t gathered_row_bytes() const {
    return packing == KeyPacking::kRows ? 2 * key_heads * head_bytes() : head_bytes();
  }
  /// Rows of the sequence of one rank, at most.
  MK_HOST_DEVICE constexpr std::uint32_t rows_max() const {
    if (sequences_max != 0) return packed_rows_max(seq_max, sequences_max);
    return shard_rows_max(seq_max, parts()) * parts_per_rank();
  }
  /// Of so many packed sequences of `seq` rows in all, whatever their lengths.
  MK_HOST_DEVICE constexpr std::uint32_t packed_rows_max(std::uint32_t seq,
                                                         std::uint32_t sequences) const {
    // Each of a rank's parts has less than a row more than its share.
    const std::uint64_t most = seq / (nodes * locals) + std::uint64_t{sequences} * parts_per_rank();
    return most < seq ? static_cast<std::uint32_t>(most) : seq;
  }
  /// Parts the sequence is cut into, and how many of them a rank holds.
  MK_HOST_DEVICE constexpr std::uint32_t parts() const { return nodes * locals * parts_per_rank(); }
  MK_HOST_DEVICE constexpr std::uint32_t parts_per_rank() const { return causal ? 2 : 1; }
};

}  // namespace mk::kernels
