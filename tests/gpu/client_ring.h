/// \file
/// A rank's part of Ring Attention in the tests of libmkclient on GPUs: what RankMatrices is for
/// the products.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <vector>

#include "mkernel/mkernel.h"
#include "tests/gpu/attention_reference.h"
#include "tests/gpu/client_ranks.h"

namespace mk {

/// One rank's rows of Q, K, V, O and LSE; and those of all ranks, which it draws itself to deal out
/// and to judge by. Work::op "ring": causal, two sequences, [B,S,H,D]; "ring-open": no mask,
/// [B,H,S,D]; "ring-f16": the same of f16; "ring-engines": as "ring", by copy engines;
/// "ring-packed": causal, sequences of different lengths
/// (`lengths`), whose starts are written on the stream right before a launch. Work::m is the
/// longest sequence; of packed ones all their rows.
class RankSequences {
 public:
  RankSequences(const Work& work, const AttachOptions& at);

  /// One row for each part.
  std::uint32_t least() const { return at_.world * (shape_.causal ? 2 : 1); }
  const RingAttention::Shape& shape() const { return shape_; }
  Transport transport() const {
    return work_.op == "ring-engines" ? Transport::kEngines : Transport::kAuto;
  }
  /// Fresh inputs of all ranks, and NaN into the output.
  void draw(std::uint64_t launch, cudaStream_t stream);
  /// Deals out this rank's rows of a sequence of `seq`, on the stream, and launches behind that.
  Status launch(RingAttention& op, cudaStream_t stream, std::uint32_t seq) const;
  /// Elements of this rank's O and LSE of a launch with `seq` that are wrong.
  std::int64_t bad(std::uint32_t seq, cudaStream_t stream) const;

 private:
  /// A sequence of the launch, and the rank's rows of it, all among those of all sequences.
  struct Part {
    RowRange sequence;
    RowRange rows;
  };
  bool packed() const { return shape_.sequences_max != 0; }
  /// The sequences of a launch with `seq` rows: where each begins, and where the last one ends.
  std::vector<std::uint32_t> starts(std::uint32_t seq) const;
  std::vector<Part> parts(std::uint32_t seq) const;
  std::uint64_t count(std::uint32_t seq) const;  ///< of the rank's rows
  kernels::cuda::AttentionTensor own(const test::DeviceMemory& memory, std::uint32_t heads,
                                     std::uint64_t rows) const;
  kernels::cuda::AttentionTensor whole(const test::DeviceMemory& memory, std::uint32_t heads) const;
  void deal_out(const test::DeviceMemory& from, const test::DeviceMemory& to, std::uint32_t heads,
                std::uint32_t seq, cudaStream_t stream) const;
  std::size_t bytes(std::uint64_t rows, std::uint32_t heads) const {
    return std::size_t{shape_.batch} * rows * heads * shape_.head_dim * 2;
  }

  const Work work_;
  const AttachOptions at_;
  const RingAttention::Shape shape_;
  const bool heads_first_;
  const std::uint64_t rows_max_;
  test::DeviceMemory all_q_, all_k_, all_v_;  ///< [B,S,H,D]
  test::DeviceMemory q_, k_, v_, o_, lse_, starts_;
  mutable std::vector<std::uint32_t> begins_;  ///< of the last launch
};

/// Collective.
Result<RingAttention> create_ring(Session& session, const RankSequences& sequences,
                                  std::chrono::seconds wait_timeout = std::chrono::seconds(8));

}  // namespace mk
