/// \file
/// AllGather: every rank gets all ranks' rows. What the ranks agree on, what an operator needs
/// before it exists (workspace, arrival flags), and the operator on the CPU. Host only.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/cpu/collective.h"
#include "kernels/cuda/host/collective.h"
#include "kernels/ops/all_gather/protocol.h"
#include "shm/host/result.h"
#include "shm/progress.h"

namespace mk::kernels {

struct AllGatherPlan : AllGatherGeometry {
  /// Of m_max rows over all ranks, rank r's being shard_of(m, W, r) (comm/shard.h), and `n`
  /// elements each. Of the tiling chunk_bytes and both numbers of banks count (GatherPlan::make).
  /// All arguments are the same on all ranks. Errors: kInvalidArgument, kLimitExceeded.
  static Result<AllGatherPlan> make(std::uint32_t nodes, std::uint32_t locals, std::uint32_t m_max,
                                    std::uint32_t n, DType dtype, const Tiling& tiling);

  std::uint32_t banks() const { return gather.banks; }
  /// The workspace's data lies `by` bytes further on, not right behind its words. Before the
  /// operator is made, and equally on all ranks.
  void move_data(std::uint64_t by);
  /// Arrival flags this operator needs in its session, which start out zero and at a multiple of
  /// shm::kFlagGranule; 0 with one node.
  std::uint32_t flag_count() const;
  /// Where, in its workspace, a rank's rows may lie so that they need no copy for the network: the
  /// caller's between launches. Null for one rank alone.
  void* input(const RankContext& context) const;
  /// Whether `rows` lie there and the network is to read them. kInvalidArgument if they lie
  /// elsewhere in the workspace.
  Result<bool> in_place(const RankContext& context, const void* rows) const;
  /// The part of the plan that a launch has.
  const AllGatherGeometry& geometry() const { return *this; }
  /// Checks a launch's arguments, and takes them if they are right: `input`, this rank's rows, null
  /// if it has none; `output`, all m rows. The context is there.
  Status bind(const void* input, void* output, std::uint32_t m, AllGatherLaunch& launch) const;
  /// The shape as people are told of it: shm::kProgressSizeNames.
  std::array<std::uint32_t, shm::kProgressSizes> sizes() const { return {gather.row_bytes}; }
  /// Of the rank in a launch with m.
  LaunchWork work(const World& world, std::uint32_t m) const;
  /// Equal on two ranks when their plans are: compare before the first launch.
  std::uint64_t fingerprint() const;
  /// Lists the same numbers for a reader.
  std::string describe() const;

  WorkspaceParts workspace;
};

/// Launches with what AllGatherPlan::bind says. Everything `context` points to outlives the
/// operator. Errors: kInvalidArgument for a context that does not fit the plan, kSystem when
/// threads cannot be started.
Result<std::unique_ptr<CollectiveCpu>> make_all_gather_cpu(const AllGatherPlan& plan,
                                                           const RankContext& context,
                                                           const CpuOptions& options);

/// The same on the current Hopper GPU, with addresses and rows that are multiples of 16 bytes;
/// kInvalidArgument if rows are not, kUnsupported for another GPU.
Result<std::unique_ptr<CollectiveCuda>> make_all_gather_cuda(const AllGatherPlan& plan,
                                                             const RankContext& context,
                                                             const CudaOptions& options);

}  // namespace mk::kernels
