/// \file
/// Ring Attention on GPUs: O = softmax(scale Q K^T) V over sequences that are spread over all
/// ranks, as one persistent kernel per rank. Each rank brings its rows of Q, K and V and gets its
/// rows of O. K and V of the others arrive head by head while it computes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/core/attention_types.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/host/operator_frame.h"
#include "kernels/cuda/host/row_engines.h"
#include "kernels/cuda/skeleton/launch_accounts.h"
#include "kernels/ops/ring/sm90_arguments.h"
#include "kernels/ops/ring/sm90_trace.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/ops/ring/tensors.h"
#include "kernels/plan/accounted.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// One launch's tensors, of one rank, in device memory: its rows of each sequence
/// (RingAttentionSchedule: without a mask one part; causal two parts, one after the other). Strides
/// are in elements, multiples of 8; addresses multiples of 16 bytes. Nothing may overlap what is
/// written, or lie in the workspace.
struct RingAttentionDeviceTensors {
  cuda::AttentionTensor q;
  cuda::AttentionTensor k;
  cuda::AttentionTensor v;
  cuda::AttentionTensor o;  ///< undefined after an error
  float* lse = nullptr;     ///< natural logarithm of each query's sum of exponentials; or null
  std::int64_t lse_batch_stride = 0;
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
  float scale = 0;  ///< positive; 0: 1 / sqrt(head_dim)
  /// Of a plan with sequences_max: what RingAttentionTensors has, the starts in device memory. They
  /// are read when the launch runs.
  const std::uint32_t* starts = nullptr;
  std::uint32_t sequences = 0;
  std::uint64_t room = 0;  ///< rows that the tensors have room for; 0: packed_rows_max
};

/// One rank's operator, on the device that was current at creation. Not thread-safe, except that
/// `status()` may be asked from any thread. Launches follow each other: one stream, or events
/// between streams; they may be captured into a graph.
class RingAttentionCuda {
 public:
  /// Everything `context` points to outlives the operator. kInvalidArgument, kLimitExceeded,
  /// kUnsupported (no Hopper, or more ranks than the kernel's table of keys holds), kUnavailable.
  static Result<std::unique_ptr<RingAttentionCuda>> create(const RingAttentionPlan& plan,
                                                           const RankContext& context,
                                                           const CudaOptions& options);
  ~RingAttentionCuda();
  RingAttentionCuda(const RingAttentionCuda&) = delete;
  RingAttentionCuda& operator=(const RingAttentionCuda&) = delete;

  /// Puts one launch over sequences of `seq` rows in all on the stream, and does not wait. All
  /// ranks launch equally often and with the same `seq` (plan().check_seq). A wrong argument
  /// (kInvalidArgument) changes nothing; after a launch that failed its error, at once. Of packed
  /// sequences `seq` is what the starts may say at most; lengths that are not possible make the
  /// launch fail (kInvalidArgument).
  Status launch(cudaStream_t stream, const RingAttentionDeviceTensors& tensors, std::uint64_t seq,
                Mode mode = Mode::kFused);

  /// The first failure among the launches that have ended: kTimeout, kAborted, kShapeMismatch,
  /// kLimitExceeded; kInvalidArgument for lengths that are not possible. Does not wait.
  Status status() const;
  /// What the next launches show with them: Progress::tag.
  void set_tag(std::uint64_t tag) { arguments_.frame.host.told.tag = tag; }
  /// Waits for the stream, then answers what the last launch did, or the first failure.
  Result<LaunchStats> finish(cudaStream_t stream);

  /// Rows of Q, K, V and O that this rank has of a sequence of `seq` rows.
  std::uint32_t rows(std::uint64_t seq) const;
  /// The same of a launch with these arguments; of packed sequences, what its tensors have room
  /// for. kInvalidArgument: they are not possible.
  Result<std::uint32_t> rows_of_tensors(const RingAttentionTensors& tensors,
                                        std::uint64_t seq) const;
  const RingAttentionPlan& plan() const { return plan_; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  /// Keys of a tile: for what is derived of its rounding.
  int tile_keys() const { return kernel_->tile_keys; }
  /// Whether copy engines bring its keys to the node's others.
  bool shares_by_dma() const { return engines_.used(); }
  /// Whether the launches that follow note what their blocks do when, which they take a little
  /// longer for. Not while a launch runs.
  void set_trace(bool on);
  /// Of the last launch, after `finish`; of several windows of heads, the last one's. Of a compute
  /// block: its tiles of queries with each rank's keys (kTile: the first row, -; whose keys), and
  /// its waits for keys. Of a watching group (collect): kArrival. Empty: it was not traced.
  std::vector<TraceEvent> trace() const;
  /// OperatorFrame::partition_steps
  std::vector<PartitionStep> partition_steps() const { return frame_.partition_steps(); }
  /// How far a launch has come that does not end: for users.
  std::string progress() const { return frame_.progress(arguments_.launch); }

 private:
  explicit RingAttentionCuda(const RingAttentionPlan& plan);
  Status start(const RankContext& context, const CudaOptions& options);
  Status create_engines(const CudaOptions& options);
  Status bring_keys(cuda::DmaQueue& queue) const;
  Status make_room_for_tables();
  Result<std::uint32_t> rows_of_packed(const std::uint32_t* starts, std::uint32_t sequences,
                                       std::uint64_t room, std::uint64_t seq) const;
  Status make_maps(const RingAttentionGeometry& plan, const RingAttentionDeviceTensors& tensors,
                   std::uint32_t rows);
  Status make_row_maps(const RingAttentionGeometry& plan, const RingAttentionDeviceTensors& tensors,
                       std::uint32_t rows);
  Status set_window(const RingAttentionDeviceTensors& all, std::uint32_t index, std::uint32_t seq,
                    std::uint32_t rows);
  LaunchWork work(const RingAttentionDeviceTensors& tensors, std::uint32_t seq) const;
  RingAttentionSchedule schedule_of(std::uint64_t seq) const;
  const World& world() const { return arguments_.launch.context.world; }

  struct Form {
    std::uint32_t m = 0;
    Mode mode = Mode::kFused;
    Estimate estimate;
  };

  const RingAttentionPlan plan_;
  cuda::RingAttentionArguments arguments_;
  cuda::OperatorFrame frame_;
  plan::Account account_;  ///< what its launches are predicted by
  Form queued_;            ///< of the last launch on a stream
  const cuda::RingAttentionKernel* kernel_ = nullptr;
  cuda::RowEngines engines_;
  void* words_ = nullptr;   ///< in device memory: the dealer's, then what has arrived of each rank
  void* tables_ = nullptr;  ///< likewise, of packed sequences
  cuda::LaunchAccounts* accounts_ = nullptr;  ///< likewise, of a launch's windows, if several
  cuda::LengthsReport* report_ = nullptr;     ///< of packed sequences, in memory of the host
  cuda::RingTrace trace_;
};

}  // namespace mk::kernels
