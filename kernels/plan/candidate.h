/// \file
/// What the planner decides: a launch's problem, and one way to run it. Plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/comm/epilogue.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/types.h"
#include "shm/host/expected.h"

namespace mk::kernels::plan {

enum class Op : std::uint8_t { kAgGemm, kGemmRs, kGemmAr, kRing, kMoe, kCombine };
std::string_view name_of(Op op);  ///< "ag_gemm", "gemm_rs", "gemm_ar", "ring", "moe", "combine"
/// Of one B over all ranks. The model has terms for those on GPUs; else it goes by the plan's
/// account of the work (account.h).
constexpr bool is_product(Op op) { return op <= Op::kGemmAr; }
/// Whether copy engines may bring what a rank shares with its node.
constexpr bool has_engines(Op op) { return op == Op::kAgGemm || op == Op::kRing || op == Op::kMoe; }
Result<Op> op_named(std::string_view name);

/// What a caller has settled of a launch; 0, or not set: to be chosen.
struct Named {
  Tiling tiling;
  std::uint32_t compute_blocks = 0;
  std::uint32_t stream_warpgroups = 0;  ///< not of compute blocks that sum, nor beside copy engines
  std::uint32_t receive_warpgroups = 0;
  std::uint32_t send_warpgroups = 0;
  std::optional<bool> engines;    ///< Candidate::engines
  std::optional<bool> sums_once;  ///< whether Candidate::sums is kOnce
  std::optional<Mode> form;       ///< kFused or kUnfused
};

/// Ring Attention's.
struct Heads {
  std::uint32_t key_heads = 0;  ///< 0: as many as query heads
  std::uint32_t batch = 1;
  bool causal = false;
  bool packed = false;  ///< sequences of different lengths, which the host does not know
};
/// MoE Dispatch's and GEMM+Combine's.
struct Experts {
  std::uint32_t count = 0;  ///< of all ranks
  std::uint32_t top_k = 0;
};

/// One launch of one rank.
struct Problem {
  Op op = Op::kAgGemm;
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  /// m: rows of all ranks. n and k: as a rank multiplies them, of an expert's weights. Ring
  /// Attention: n query heads of k elements.
  Shape shape;
  Heads heads;
  Experts experts;
  DType dtype = DType::kBf16;
  GemmResult result;
  /// AllGather and ReduceScatter by themselves, as the product that moves the same rows: on a GPU
  /// bound_of() has the collective's (collective.h).
  bool rows_alone = false;
  bool in_place = false;         ///< AllGather+GEMM: rows lie where the network reads them
  bool batch_invariant = false;  ///< an element's bits must not depend on m
  std::uint32_t ranks_per_device = 1;
  std::uint32_t blocks = 0;  ///< SMs of the rank; 0: its share of the machine's
  std::uint32_t lanes = 1;   ///< command rings of the session
  Named named;

  std::uint32_t ranks() const { return nodes * locals; }
};

/// Who adds up the node's partial tiles.
enum class Sums : std::uint8_t {
  kWarpgroups,  ///< warpgroups outside the compute blocks
  kOwn,         ///< one node of two ranks: compute blocks, one tile late
  kOnce,        ///< GEMM + ReduceScatter over nodes: a rank's shard in one pass with what has come
};

/// Whether the exchange of the nodes' sums has two forms: GEMM+AllReduce's over three nodes or
/// more.
constexpr bool has_exchanges(const Problem& problem) {
  return problem.op == Op::kGemmAr && problem.nodes > 2;
}

/// Whether a rank may send several shards in turns (ChunkOrder): of keys over three nodes or more.
constexpr bool has_turns(const Problem& problem) {
  return problem.op == Op::kRing && problem.nodes > 2;
}

/// One way to run a problem.
struct Candidate {
  Mode form = Mode::kFused;  ///< kFused or kUnfused
  Sums sums = Sums::kWarpgroups;
  /// Copy engines bring a rank's rows, keys or tokens to its peers (has_engines).
  bool engines = false;
  /// Then, of Ring Attention, RingAttentionGeometry::heads_together; else 0.
  std::uint32_t heads_together = 0;
  /// RingAttentionTiling::turn_chunks, where it has_turns(); 0: the plan's.
  std::uint32_t turn_chunks = 0;
  /// tile_m, tile_n and chunk_bytes are named; banks: 0 for the default. The exchange is named
  /// where it has_exchanges(); a CPU's, and a tuned choice's that is not, is one-shot.
  Tiling tiling;
  /// Warpgroups outside the compute blocks. Those that only share or reduce; those that receive
  /// (AllGather+GEMM's share first); those that send.
  std::uint32_t stream_warpgroups = 0;
  std::uint32_t receive_warpgroups = 0;
  std::uint32_t send_warpgroups = 0;
  std::uint32_t compute_blocks = 0;  ///< SMs that only multiply; place_warpgroups() fills it in
};
bool operator==(const Candidate& one, const Candidate& other);

/// One line: "fused, tile 128x256, chunks of 128 KiB, 36 warpgroups share, ...".
std::string describe(const Problem& problem, const Candidate& candidate);

}  // namespace mk::kernels::plan
