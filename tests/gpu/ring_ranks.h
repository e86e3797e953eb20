/// \file
/// All ranks of a Ring Attention in one process. They are on one GPU, each with a stream and a
/// share of the SMs, or spread over GPUs with peer access. They are one node, or several that a
/// HostProxy joins.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops/ring/sm90.h"
#include "tests/gpu/attention_reference.h"
#include "tests/gpu/host_proxy.h"
#include "tests/gpu/summed_reference.h"

namespace mk::test {

/// How a rank's tensors lie: [batch, row, head, dim] or [batch, head, row, dim].
enum class HeadLayout : std::uint8_t { kRowsFirst, kHeadsFirst };

struct RingSetup {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  int devices = 1;  ///< ranks are dealt out to so many
  kernels::RingAttentionShape shape;
  std::uint32_t chunk_bytes = 0;   ///< 0: the plan's
  std::uint32_t banks = 0;         ///< likewise
  std::uint32_t window_pairs = 0;  ///< likewise
  /// Copy engines bring keys within a node, with so many heads together; 0: groups do. The options'
  /// `dma` says so of each rank.
  std::uint32_t engines_together = 0;
  HeadLayout layout = HeadLayout::kRowsFirst;
  std::uint32_t gap = 0;  ///< elements (a multiple of 8) between the rows of kRowsFirst
  kernels::CudaOptions options;
  const std::uint32_t* abort = nullptr;  ///< every rank's session abort word
  JoinNodes join;                        ///< JobSetup::join

  std::uint32_t world() const { return nodes * locals; }
};

/// What the inputs are like. All else is standard normal.
struct RingInputs {
  std::uint64_t seed = 0;
  float scale = 0;           ///< of the scores
  bool equal_keys = false;   ///< all keys of a head are the same: so are a row's scores
  std::uint32_t from = ~0u;  ///< keys and values of this row of the sequence
  std::uint32_t to = 0;      ///< up to this one
  std::uint16_t value = 0;   ///< are all of these bits,
  bool keys_too = false;     ///< or only the values
};

/// Ends the process on anything unexpected but a failed launch.
class RingRanks {
 public:
  explicit RingRanks(const RingSetup& setup);
  ~RingRanks();
  RingRanks(const RingRanks&) = delete;
  RingRanks& operator=(const RingRanks&) = delete;

  const RingSetup& setup() const { return setup_; }
  const kernels::RingAttentionPlan& plan() const { return plan_; }
  std::uint32_t world() const { return setup_.world(); }
  kernels::RingAttentionCuda& op(std::uint32_t rank) { return *ranks_[rank].op; }
  cudaStream_t stream(std::uint32_t rank) const { return ranks_[rank].stream; }
  int device(std::uint32_t rank) const { return ranks_[rank].device; }
  void make_current(std::uint32_t rank) const;
  HostProxy* proxy() { return proxy_.get(); }

  /// Fresh inputs for a launch of `seq` rows, and poisoned outputs, on all ranks; waits. Of a shape
  /// with sequences_max: for sequences of these lengths, which are at the same place each time.
  void fill(std::uint32_t seq, const RingInputs& inputs);
  void fill_packed(const std::vector<std::uint32_t>& lengths, const RingInputs& inputs);
  /// Puts other starts of sequences, of any kind, where the rank's next launch reads them.
  void set_starts(std::uint32_t rank, const std::vector<std::uint32_t>& starts);
  /// Of the rank's tensors of packed sequences, for its next launch; 0: as many as there may be.
  void set_room(std::uint32_t rows) { room_ = rows; }
  Status launch(std::uint32_t rank, kernels::Mode mode = kernels::Mode::kFused);
  /// The same with another length than the inputs were made for.
  Status launch_of(std::uint32_t rank, std::uint32_t seq, kernels::Mode mode);
  /// The last launch's error, or none; waits.
  Status finish(std::uint32_t rank);

  /// Every element of O and LSE of all ranks.
  AttentionVerdict judge();
  /// The outputs of all ranks, in the order of the sequence.
  void collect();
  const void* outputs() const { return o_->data(); }
  std::int64_t output_elements() const;

 private:
  struct Rank {
    int device = 0;
    cudaStream_t stream = nullptr;
    std::unique_ptr<DeviceMemory> workspace, q, k, v, o, lse, starts;
    std::unique_ptr<kernels::RingAttentionCuda> op;
  };
  bool packed() const { return plan_.sequences_max != 0; }
  /// Of its tensors. (Packed ones have room for all that may come.)
  std::uint32_t rows(std::uint32_t rank) const {
    return packed() ? plan_.rows_max() : ranks_[rank].op->rows(seq_);
  }
  void fill_rows(std::uint32_t seq, const RingInputs& inputs);
  AttentionVerdict judge_sequence(std::uint32_t begin, std::uint32_t end);
  /// Calls `take(row of the rank, first row of the sequence, rows)`.
  template <class Take>
  void for_parts(std::uint32_t rank, Take&& take) const;
  kernels::cuda::AttentionTensor tensor(void* data, std::uint32_t rows, std::uint32_t heads,
                                        HeadLayout layout, std::uint32_t gap) const;
  kernels::RingAttentionDeviceTensors tensors(std::uint32_t rank) const;
  void deal_out(const DeviceMemory& whole, std::uint32_t heads,
                std::unique_ptr<DeviceMemory> Rank::*part);

  RingSetup setup_;
  kernels::RingAttentionPlan plan_;
  std::vector<Rank> ranks_;
  std::unique_ptr<HostProxy> proxy_;
  std::unique_ptr<DeviceMemory> q_, k_, v_, o_, lse_;  ///< of the whole sequence, on device 0
  std::uint32_t seq_ = 0;
  std::vector<std::uint32_t> starts_;  ///< of the launch's sequences, and the last one's end
  std::uint32_t room_ = 0;
  RingInputs inputs_;
};

}  // namespace mk::test
