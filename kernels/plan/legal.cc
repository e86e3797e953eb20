#include "kernels/plan/legal.h"

#include <algorithm>
#include <span>

#include "kernels/comm/launch.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "shm/host/result.h"
#include "shm/limits.h"

namespace mk::kernels::plan {
namespace {

// The tiles of a GPU's compiled configurations, at most (kernels/cuda/operator_inputs.cc).
constexpr std::uint32_t kGpuTileRowsMax = 128;
constexpr std::uint32_t kGpuTileColumnsMax = 256;
constexpr std::uint32_t kWarpgroupsOfBlock = 3;  ///< cuda::kGroupsOfBlock
constexpr std::uint32_t kPieceColumns = 64;      ///< of C that math stores at a time
constexpr std::uint32_t kPieceRows = 64;
constexpr std::uint32_t kKib = 1024;

std::uint32_t pollers(const Problem& problem) { return problem.nodes > 1 ? 1 : 0; }

std::uint32_t share_of_device(const Problem& problem, const Machine& machine) {
  return machine.sms / std::max(1u, problem.ranks_per_device);
}

/// The plan refuses what every executor would.
Status check_plan(const Problem& problem, const Tiling& tiling) {
  const auto refused = [](const auto& plan) { return plan ? Status{} : Status(propagate(plan)); };
  switch (problem.op) {
    case Op::kAgGemm:
      return refused(
          AgGemmPlan::make(problem.nodes, problem.locals, problem.shape, problem.dtype, tiling));
    case Op::kGemmRs:
      return refused(
          GemmRsPlan::make(problem.nodes, problem.locals, problem.shape, problem.dtype, tiling));
    case Op::kGemmAr:
      break;
  }
  return refused(
      GemmArPlan::make(problem.nodes, problem.locals, problem.shape, problem.dtype, tiling));
}

Status check_sums(const Problem& problem, const Candidate& candidate) {
  const std::string op(name_of(problem.op));
  if (candidate.sums == Sums::kWarpgroups) return {};
  if (problem.op == Op::kAgGemm)
    return fail(ErrorCode::kInvalidArgument, "{}: it has no sums; leave them to warpgroups", op);
  if (candidate.sums == Sums::kOnce) {
    if (problem.op == Op::kGemmRs && problem.nodes > 1 && problem.locals > 1 &&
        problem.locals + problem.nodes - 1 <= shm::kLocalRanksMax) {
      return {};
    }
    return fail(ErrorCode::kInvalidArgument,
                "{}: a shard is summed once by GEMM + ReduceScatter over several nodes of several "
                "ranks, at most {} sources; here are {} x {}",
                op, shm::kLocalRanksMax, problem.nodes, problem.locals);
  }
  if (problem.nodes != 1 || problem.locals != 2)
    return fail(ErrorCode::kInvalidArgument,
                "{}: compute blocks add up their own tiles on one node of two ranks; here are "
                "{} x {}",
                op, problem.nodes, problem.locals);
  // Pieces must not reach into the next tile.
  const TileGrid grid(problem.op == Op::kGemmAr ? problem.shape.m : 1, problem.shape.n,
                      candidate.tiling.tile_m, candidate.tiling.tile_n);
  const bool columns = grid.tiles_n() == 1 || grid.tile_cols() % kPieceColumns == 0;
  const bool rows = problem.op == Op::kGemmRs || grid.tile_rows() % kPieceRows == 0;
  if (columns && rows) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: compute blocks add up tiles of whole pieces of {} x {}; these are {} x {}", op,
              kPieceRows, kPieceColumns, grid.tile_rows(), grid.tile_cols());
}

Status check_engines(const Problem& problem, const Candidate& candidate) {
  if (!candidate.engines) return {};
  const std::string op(name_of(problem.op));
  if (problem.op != Op::kAgGemm || problem.locals == 1 || problem.ranks_per_device > 1)
    return fail(ErrorCode::kInvalidArgument,
                "{}: copy engines bring rows of AllGather + GEMM to other ranks of a node, with a "
                "GPU each; here are {} local ranks, {} to a GPU",
                op, problem.locals, problem.ranks_per_device);
  if (candidate.tiling.local_banks != 1)
    return fail(ErrorCode::kInvalidArgument,
                "{}: copy engines need one local bank, as copies go by addresses; the candidate "
                "has {}",
                op, candidate.tiling.local_banks);
  return {};
}

struct Numbers {
  std::span<const std::uint32_t> stream;
  std::span<const std::uint32_t> receive;
};

/// Numbers of warpgroups: whole SMs. Those of roles that a world has not are 0.
Numbers numbers_of(const Problem& problem, bool engines) {
  static constexpr std::uint32_t kNone[] = {0};
  static constexpr std::uint32_t kStream[] = {3, 6, 12, 18, 24, 36, 48, 60, 72, 96, 144, 192};
  static constexpr std::uint32_t kShareFirst[] = {0, 12, 24, 48, 96};
  static constexpr std::uint32_t kReceive[] = {1, 6, 12, 24, 48, 96};
  static constexpr std::uint32_t kEngines[] = {12};
  static constexpr std::uint32_t kEnginesReceive[] = {10};
  const bool over_nodes = problem.nodes > 1;
  const bool gather = problem.op == Op::kAgGemm;
  if (problem.ranks() == 1) return {kNone, kNone};
  if (engines) return over_nodes ? Numbers{kNone, kEnginesReceive} : Numbers{kEngines, kNone};
  if (!over_nodes) return {kStream, kNone};
  // One rank to a node: nobody reduces there, and nobody passes rows on.
  if (problem.locals == 1) return gather ? Numbers{kStream, kNone} : Numbers{kNone, kReceive};
  return gather ? Numbers{kShareFirst, kReceive} : Numbers{kStream, kReceive};
}

std::vector<Tiling> tilings_of(const Problem& problem, bool engines) {
  std::vector<TileSides> sides = {{128, 256}, {128, 128}};
  if (problem.op == Op::kAgGemm) {
    sides.push_back({128, 64});
    sides.push_back({64, 128});
  }
  std::vector<Tiling> tilings;
  for (const TileSides& side : sides) {
    std::vector<std::uint32_t> chunks;
    if (engines && problem.nodes == 1) {
      // A row of tiles: a tile looks at a flag for each chunk of its rows.
      const std::uint64_t row = std::uint64_t{128} * problem.shape.k * kElementBytes;
      chunks = {
          static_cast<std::uint32_t>(std::clamp<std::uint64_t>(row, 128 * kKib, 8 * 1024 * kKib))};
    } else if (problem.op == Op::kAgGemm && problem.nodes == 1) {
      chunks = {32 * kKib, 64 * kKib, 128 * kKib, 256 * kKib, 512 * kKib};
    } else if (problem.nodes == 1) {
      // What one warpgroup sums at a time: a tile.
      chunks = {side.rows * side.columns * kElementBytes};
    } else {
      chunks = {kNetworkChunkBytesMin, 2 * kNetworkChunkBytesMin, 4 * kNetworkChunkBytesMin};
    }
    for (std::uint32_t chunk : chunks) {
      Tiling tiling;
      tiling.tile_m = side.rows;
      tiling.tile_n = side.columns;
      tiling.chunk_bytes = chunk;
      if (engines) tiling.banks = tiling.local_banks = 1;
      tilings.push_back(tiling);
    }
  }
  return tilings;
}

std::vector<Sums> sums_of(const Problem& problem) {
  if (problem.op == Op::kAgGemm) return {Sums::kWarpgroups};
  return {Sums::kWarpgroups, Sums::kOwn, Sums::kOnce};
}

/// A CPU's: the plan's default tiles and three sizes of chunks, in both forms.
std::vector<Candidate> cpu_candidates(const Problem& problem, const Machine& machine) {
  std::vector<Candidate> legal;
  for (Mode form : {Mode::kFused, Mode::kUnfused}) {
    for (std::uint32_t chunk : {0u, 64 * kKib, 256 * kKib, 1024 * kKib}) {
      Candidate candidate;
      candidate.form = form;
      candidate.tiling.chunk_bytes = chunk;
      candidate.compute_blocks = 1;
      if (check_candidate(problem, machine, candidate)) legal.push_back(candidate);
    }
  }
  return legal;
}

}  // namespace

Status place_warpgroups(const Problem& problem, const Machine& machine, Candidate& candidate) {
  if (machine.kind == MachineKind::kCpu) return {};
  const std::uint32_t share = share_of_device(problem, machine);
  const std::uint32_t warpgroups = pollers(problem) + candidate.send_warpgroups +
                                   candidate.receive_warpgroups + candidate.stream_warpgroups;
  const std::uint32_t comm = div_up(warpgroups, kWarpgroupsOfBlock);
  candidate.compute_blocks = std::min(share > comm ? share - comm : 0, kBlocksMax);
  if (candidate.compute_blocks >= 1 && comm <= kBlocksMax &&
      candidate.receive_warpgroups <= kBlocksMax) {
    return {};
  }
  return fail(ErrorCode::kLimitExceeded,
              "{}: {} warpgroups take {} of the {} SMs that a rank has, and {} receive; they must "
              "leave one SM, and at most {} receive",
              name_of(problem.op), warpgroups, comm, share, candidate.receive_warpgroups,
              kBlocksMax);
}

Status check_candidate(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  const auto op = name_of(problem.op);
  MK_RETURN_IF_ERROR(check_plan(problem, candidate.tiling));
  if (machine.kind == MachineKind::kCpu) {
    if (!candidate.engines && candidate.sums == Sums::kWarpgroups) return {};
    return fail(ErrorCode::kInvalidArgument, "{}: a CPU has no copy engines and one way to sum",
                op);
  }
  if (candidate.tiling.tile_m > kGpuTileRowsMax || candidate.tiling.tile_n > kGpuTileColumnsMax)
    return fail(ErrorCode::kInvalidArgument, "{}: tiles of {} x {}; a GPU's are at most {} x {}",
                op, candidate.tiling.tile_m, candidate.tiling.tile_n, kGpuTileRowsMax,
                kGpuTileColumnsMax);
  if (candidate.send_warpgroups > std::min(problem.lanes, shm::kLanesMax))
    return fail(ErrorCode::kInvalidArgument, "{}: {} send warpgroups, but the session has {} rings",
                op, candidate.send_warpgroups, problem.lanes);
  if ((problem.nodes > 1) != (candidate.send_warpgroups > 0))
    return fail(ErrorCode::kInvalidArgument, "{}: {} send warpgroups for {} nodes", op,
                candidate.send_warpgroups, problem.nodes);
  MK_RETURN_IF_ERROR(check_sums(problem, candidate));
  MK_RETURN_IF_ERROR(check_engines(problem, candidate));
  Candidate placed = candidate;
  return place_warpgroups(problem, machine, placed);
}

std::vector<Candidate> legal_candidates(const Problem& problem, const Machine& machine) {
  if (machine.kind == MachineKind::kCpu) return cpu_candidates(problem, machine);
  std::vector<Candidate> legal;
  for (bool engines : {false, true}) {
    for (const Tiling& tiling : tilings_of(problem, engines)) {
      for (Sums sums : sums_of(problem)) {
        Candidate candidate;
        candidate.sums = sums;
        candidate.engines = engines;
        candidate.tiling = tiling;
        candidate.send_warpgroups = problem.nodes > 1 ? 1 : 0;
        // Whether tile, engines and sums are possible does not depend on the numbers.
        if (!check_candidate(problem, machine, candidate)) continue;
        const Numbers numbers = numbers_of(problem, engines);
        // Math that sums needs one SM's warpgroups for the end.
        static constexpr std::uint32_t kOneSm[] = {3};
        const std::span<const std::uint32_t> streams =
            sums == Sums::kOwn ? std::span<const std::uint32_t>(kOneSm) : numbers.stream;
        for (std::uint32_t stream : streams) {
          for (std::uint32_t receive : numbers.receive) {
            candidate.stream_warpgroups = stream;
            candidate.receive_warpgroups = receive;
            if (stream + receive == 0 && problem.ranks() > 1) continue;
            if (!place_warpgroups(problem, machine, candidate)) continue;
            for (Mode form : {Mode::kFused, Mode::kUnfused}) {
              candidate.form = form;
              legal.push_back(candidate);
            }
          }
        }
      }
    }
  }
  return legal;
}

}  // namespace mk::kernels::plan
