/// \file
/// ReduceScatter: the rows of all ranks are added up, and each rank gets a share of the sums. The
/// plan on which the ranks agree, the workspace and arrival flags that an operator needs, and the
/// operator on the CPU. Host only.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/cpu/collective.h"
#include "kernels/cuda/host/collective.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "kernels/ops/reduce_scatter/protocol.h"
#include "shm/host/result.h"
#include "shm/progress.h"

namespace mk::kernels {

struct ReduceScatterPlan {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t m_max = 0;  ///< rows that each rank brings, at most
  std::uint32_t n = 0;      ///< elements of a row
  DType dtype = DType::kBf16;
  GemmRsPlan sums;  ///< of fp32, its partials are fp32 and its element type says nothing
  std::uint64_t workspace_bytes = 0;
  WorkspaceParts workspace;  ///< of the sums

  /// Each rank brings up to m_max rows of `n` elements, and rank r gets the sums of rows
  /// shard_of(m, W, r) (comm/shard.h). `partials`: in what the rows lie at their owner, and a
  /// node's sums travel; kF32 for any type. All arguments are the same on all ranks. Errors:
  /// kInvalidArgument, kLimitExceeded.
  static Result<ReduceScatterPlan> make(std::uint32_t nodes, std::uint32_t locals,
                                        std::uint32_t m_max, std::uint32_t n, DType dtype,
                                        const Tiling& tiling,
                                        Partials partials = Partials::kElement);

  std::uint32_t banks() const { return sums.banks; }
  /// The workspace's data lies `by` bytes further on, not right behind its words. Before the
  /// operator is made, and equally on all ranks.
  void move_data(std::uint64_t by) { sums.move_data(by); }
  /// Arrival flags this operator needs in its session, which start out zero and at a multiple of
  /// shm::kFlagGranule; 0 with one node.
  std::uint32_t flag_count() const { return sums.flag_count(); }
  /// There is no place for inputs that saves a copy.
  static void* input(const RankContext& /*context*/) { return nullptr; }
  /// The part of the plan that a launch has.
  const GemmRsGeometry& geometry() const { return sums; }
  /// Checks a launch's arguments, and takes them if they are right: `input`, this rank's m rows;
  /// `output`, its share of the sums, null if it has none. The context is there.
  Status bind(const void* input, void* output, std::uint32_t m, ReduceScatterLaunch& launch) const;
  /// The shape as people are told of it: shm::kProgressSizeNames.
  std::array<std::uint32_t, shm::kProgressSizes> sizes() const { return {n}; }
  /// The rank's, in a launch with m.
  LaunchWork work(const World& world, std::uint32_t m) const;
  /// Equal on two ranks when their plans are: compare before the first launch.
  std::uint64_t fingerprint() const;
  /// Lists the same numbers for a reader.
  std::string describe() const;
};

/// Launches with what ReduceScatterPlan::bind says. Everything `context` points to outlives the
/// operator. Errors: kInvalidArgument for a context
/// that does not fit the plan, kSystem when threads cannot be started.
Result<std::unique_ptr<CollectiveCpu>> make_reduce_scatter_cpu(const ReduceScatterPlan& plan,
                                                               const RankContext& context,
                                                               const CpuOptions& options);

/// The same on the current Hopper GPU, with addresses that are multiples of 16 bytes, and rows of a
/// multiple of 8 elements; kInvalidArgument if they are not, kUnsupported for another GPU.
Result<std::unique_ptr<CollectiveCuda>> make_reduce_scatter_cuda(const ReduceScatterPlan& plan,
                                                                 const RankContext& context,
                                                                 const CudaOptions& options);

}  // namespace mk::kernels
