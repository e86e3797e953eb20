/// \file
/// GEMM+Combine on the CPU: the rows that MoE Dispatch+GEMM left on each rank, times the
/// experts' weights and the tokens' routing weights, summed at each token's rank. Blocks are
/// threads; what they do is kernels/ops/combine/protocol.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/ops/combine/spec.h"
#include "kernels/ops/moe/routing_plan.h"
#include "shm/host/result.h"

namespace mk::kernels {

struct CombineCpuOptions : CpuOptions {
  BLayout b_layout = BLayout::kKN;  ///< of an expert's weights: [I][H], or [H][I]
  /// As GemmCpuOptions'.
  bool count_nonfinite = false;
};

/// One rank's input of one launch; dense.
struct CombineInput {
  const void* y = nullptr;  ///< [rows][I]: as MoE Dispatch+GEMM left them, or what became of them
  std::span<const MoeRow> rows;            ///< whose they are: MoeDispatchCpu::rows()
  std::span<const std::uint32_t> offsets;  ///< MoeDispatchCpu::expert_offsets()
  const void* expert_weights = nullptr;    ///< of this rank's experts, one after the other
  const std::int32_t* ids = nullptr;       ///< [count][top_k]: what was dispatched
  std::uint32_t count = 0;                 ///< of this rank's tokens
  const void* residual = nullptr;          ///< [count][H], or null
};

/// One rank's operator; made like GemmArCpu, and as little thread-safe.
class CombineCpu {
 public:
  /// Starts the blocks (threads that sleep between launches). Everything `context` points to
  /// outlives the operator. Errors: kInvalidArgument for a context that does not fit the plan,
  /// kUnsupported when oneDNN has no kernel for this machine, kSystem when threads cannot be
  /// started.
  static Result<std::unique_ptr<CombineCpu>> create(const CombinePlan& plan,
                                                    const RankContext& context,
                                                    const CombineCpuOptions& options);
  ~CombineCpu();
  CombineCpu(const CombineCpu&) = delete;
  CombineCpu& operator=(const CombineCpu&) = delete;

  /// Runs one launch; returns when `out` [count][H] is complete and no block touches memory of the
  /// caller. All ranks launch equally often; counts may differ.
  ///
  /// A wrong argument (kInvalidArgument) changes nothing. A rank whose Dispatch+GEMM had too many
  /// rows launches with its offsets, which tell of them, and no rows. Then this fails on every rank
  /// with kLimitExceeded, and names that rank. Where the rows that some rank brings are not those
  /// of this rank's tokens: kInvalidArgument, which names it. Either way nothing of `out` is
  /// written, and all can launch again. Any other error breaks the operator for good.
  Result<LaunchStats> launch(const CombineInput& input, void* out, Mode mode = Mode::kFused);

  /// This rank's.
  ShardRange experts() const;
  const CombinePlan& plan() const;
  /// Launches so far: the epoch of the last one.
  std::uint32_t epoch() const;
  /// For traces.
  LaunchRunner& runner();

 private:
  class Impl;
  explicit CombineCpu(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::kernels
