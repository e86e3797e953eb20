/// \file
/// All ranks of a Ring Attention in one process (placed_ranks.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops/ring/sm90.h"
#include "tests/gpu/attention_reference.h"
#include "tests/gpu/placed_ranks.h"
#include "tests/gpu/summed_reference.h"

namespace mk::test {

/// How a rank's tensors lie: [batch, row, head, dim] or [batch, head, row, dim].
enum class HeadLayout : std::uint8_t { kRowsFirst, kHeadsFirst };

struct RingSetup : PlacedSetup {
  kernels::RingAttentionShape shape;
  std::uint32_t chunk_bytes = 0;   ///< 0: the plan's
  std::uint32_t banks = 0;         ///< likewise
  std::uint32_t window_pairs = 0;  ///< likewise
  /// Copy engines bring keys within a node, with so many heads together; 0: groups do. The options'
  /// `dma` says so of each rank.
  std::uint32_t engines_together = 0;
  HeadLayout layout = HeadLayout::kRowsFirst;
  std::uint32_t gap = 0;  ///< elements (a multiple of 8) between the rows of kRowsFirst
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

struct RingRank : PlacedRank<kernels::RingAttentionCuda> {
  std::unique_ptr<DeviceMemory> q, k, v, o, lse, starts;
};

class RingRanks : public PlacedRanks<RingRank> {
 public:
  explicit RingRanks(const RingSetup& setup);

  const RingSetup& setup() const { return setup_; }
  const kernels::RingAttentionPlan& plan() const { return plan_; }

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

  /// Every element of O and LSE of all ranks.
  AttentionVerdict judge();
  /// The outputs of all ranks, in the order of the sequence.
  void collect();
  const void* outputs() const { return o_->data(); }
  std::int64_t output_elements() const;

 private:
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
                std::unique_ptr<DeviceMemory> RingRank::*part);

  RingSetup setup_;
  kernels::RingAttentionPlan plan_;
  std::unique_ptr<DeviceMemory> q_, k_, v_, o_, lse_;  ///< of the whole sequence, on device 0
  std::uint32_t seq_ = 0;
  std::vector<std::uint32_t> starts_;  ///< of the launch's sequences, and the last one's end
  std::uint32_t room_ = 0;
  RingInputs inputs_;
};

}  // namespace mk::test
