/// \file
/// One launch's tensors as a caller gives them, on CPUs and GPUs alike. Host only.
#pragma once

#include <cstdint>

#include "kernels/ops/ring/geometry.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// Elements from one row, head or batch of a tensor to the next; 0: as [batch][row][head] without
/// gaps.
struct RingStrides {
  std::uint64_t row = 0;
  std::uint64_t head = 0;
  std::uint64_t batch = 0;
};

/// One rank's: its rows of each sequence (RingAttentionSchedule: without a mask one part; causal
/// two parts, one after the other), of [heads][head_dim] elements each, the last dimension
/// contiguous. Nothing may overlap what is written, or lie in the workspace.
struct RingAttentionTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;   ///< like q; undefined after an error
  float* lse = nullptr;  ///< of each query: ln of the sum of exp(scores); or null
  RingStrides q_strides;
  RingStrides k_strides;
  RingStrides v_strides;
  RingStrides out_strides;
  RingStrides lse_strides;  ///< a head has one element
  double scale = 0;         ///< of the scores q k; 0: 1 / sqrt(head_dim)
  /// Of a plan with sequences_max: the first row of each sequence over all ranks, and the number of
  /// rows in all, for `sequences` of them.
  const std::uint32_t* starts = nullptr;
  std::uint32_t sequences = 0;
  std::uint64_t room = 0;  ///< rows that the tensors have room for; 0: enough
};

/// With strides and scale filled in where they were left open, for a rank with `rows` rows of each
/// sequence. With none, nothing is looked at. kInvalidArgument: a tensor is missing, or its rows,
/// heads or batches overlap.
Result<RingAttentionTensors> checked_tensors(const RingAttentionGeometry& plan,
                                             RingAttentionTensors tensors, std::uint32_t rows);

/// A window's part of checked tensors; `its`: RingAttentionGeometry::of_window.
RingAttentionTensors of_window(const RingAttentionGeometry& its, RingAttentionTensors tensors,
                               const HeadWindow& heads);

}  // namespace mk::kernels
