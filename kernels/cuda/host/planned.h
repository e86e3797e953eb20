/// \file
/// From the planner's choice (kernels/plan) to what an operator on a GPU takes, and from what its
/// caller named to the planner's question.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/comm/world.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/host/role_blocks.h"
#include "kernels/ops/moe/spec.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/plan/accounted.h"
#include "kernels/plan/operator_plan.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// The machine file for a GPU of that name and so many SMs. Says on stderr, once in a process, if
/// none is shipped for it.
plan::Machine machine_of(const char* device_name, std::uint32_t sms);
/// By the shipped files, for a GPU of that name and so many SMs.
std::shared_ptr<const plan::JobPlan> job_plan_for(const char* device_name, std::uint32_t sms);

/// A plan has to be made with these: of `options` what is named counts, of the caller's tiles and
/// chunks what is not 0. `blocks`: SMs of a rank, the same on all, as are the shape, and what all
/// name. The operator's own plan is then made of the answer.
Result<Tiling> planned_tiling(plan::Op op, std::uint32_t nodes, std::uint32_t locals,
                              const Shape& shape, kernels::DType dtype, std::uint32_t blocks,
                              const plan::JobPlan& job, const CudaOptions& options,
                              const Tiling& named);

/// The same of Ring Attention, whose tiles are its kernel's: whether copy engines bring keys within
/// the node, unless `options.dma` says so, and how heads lie then; and over three nodes and more
/// how shards take turns. `chunk_bytes`: 0: chosen. kInvalidArgument: engines shall and cannot.
Result<RingAttentionTiling> planned_ring_tiling(std::uint32_t nodes, std::uint32_t locals,
                                                const RingAttentionShape& shape,
                                                std::uint32_t chunk_bytes, std::uint32_t blocks,
                                                const plan::JobPlan& job,
                                                const CudaOptions& options);

/// The same of MoE Dispatch: moe_dispatch_cuda_way(), and whether copy engines bring tokens.
Result<MoeDispatchWay> planned_moe_way(std::uint32_t nodes, std::uint32_t locals,
                                       const MoeDispatchShape& shape, kernels::DType dtype,
                                       std::uint32_t blocks, const plan::JobPlan& job,
                                       const CudaOptions& options);

/// How an operator runs whose plan has `tiling`. `blocks`, `lanes`: this rank's.
Result<plan::OperatorPlan> plan_launches(plan::Op op, const World& world, const Shape& shape,
                                         kernels::DType dtype, const Tiling& tiling,
                                         std::uint32_t blocks, std::uint32_t lanes,
                                         const CudaOptions& options,
                                         std::shared_ptr<const plan::JobPlan> job);

/// The groups that the plan's warpgroups are.
GroupNeeds planned_needs(const plan::OperatorPlan& planned);
/// The same of an operator that is no product. Of a rank with a GPU of its own, whose caller names
/// nothing, they are plan::accounted_candidate()'s.
GroupNeeds accounted_needs(const plan::Problem& problem, const plan::AccountedGroups& groups);

}  // namespace mk::kernels::cuda
