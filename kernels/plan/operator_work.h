/// \file
/// What the operators' own plans say of a problem: whether they take it, and what a rank has to do.
/// Host only.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_work.h"
#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {

/// Why the plan, which is made alike for all executors of the kind, refuses the tiles and chunks.
Status check_plan(const Problem& problem, MachineKind kind, const Tiling& tiling);
/// The plan's account of what the first rank does in a launch of the problem's m.
Result<LaunchWork> work_by_plan(const Problem& problem, MachineKind kind,
                                const Candidate& candidate);

/// What an operator takes on a rank for its lifetime.
struct OperatorMemory {
  std::uint64_t workspace_bytes = 0;
  std::uint32_t arrival_flags = 0;
};
/// By the plan of the candidate. Errors: those of the plan.
Result<OperatorMemory> memory_by_plan(const Problem& problem, MachineKind kind,
                                      const Candidate& candidate);

/// The operator's plan settles this of the order in which things come.
struct OrderNumbers {
  std::uint32_t chunks = 1;        ///< of a rank's keys or tokens
  std::uint32_t turn_chunks = 0;   ///< ChunkOrder, of keys
  std::uint32_t table_chunks = 1;  ///< of its routing table
  std::uint32_t tile_rows = 1;     ///< of experts' rows
  std::uint32_t column_tiles = 1;  ///< of their products
  std::uint32_t tile_columns = 1;
  std::uint32_t chunk_tokens = 1;  ///< whose sums a chunk has
  std::uint32_t chunk_tiles = 1;   ///< of GEMM+AllReduce, which many nodes' flags enlarge
};
/// Headers' chunks are not counted.
Result<OrderNumbers> order_numbers(const Problem& problem, MachineKind kind,
                                   const Candidate& candidate);

/// Ring Attention with the heads of one window, by which a launch goes through them all.
Problem of_one_window(const Problem& problem, MachineKind kind, const Candidate& candidate);

/// Tokens of MoE Dispatch and GEMM+Combine.
std::uint32_t tokens_of_rank(const Problem& problem);
/// Experts' weights that a rank reads from memory, in bytes, once at least. 0 of other operators.
double expert_bytes(const Problem& problem);

}  // namespace mk::kernels::plan
