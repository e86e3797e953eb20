#include "kernels/plan/legal.h"

#include <algorithm>

#include "kernels/comm/launch.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/units.h"
#include "kernels/plan/accounted.h"
#include "kernels/plan/model.h"
#include "kernels/plan/operator_work.h"
#include "shm/host/result.h"
#include "shm/limits.h"

namespace mk::kernels::plan {
namespace {

// The tiles of a GPU's compiled configurations, at most (kernels/cuda/host/operator_inputs.cc).
constexpr std::uint32_t kGpuTileRowsMax = 128;
constexpr std::uint32_t kGpuTileColumnsMax = 256;
constexpr std::uint32_t kPieceColumns = 64;  ///< of C that math stores at a time
constexpr std::uint32_t kPieceRows = 64;
constexpr std::uint32_t kKib = 1024;

std::uint32_t pollers(const Problem& problem) { return problem.nodes > 1 ? 1 : 0; }

/// What is named, or `chosen`.
std::uint32_t or_chosen(std::uint32_t named, std::uint32_t chosen) {
  return named != 0 ? named : chosen;
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
  if (!problem.result.adds_in_place())
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: compute blocks add to C, so partial sums must be elements, and nothing may come "
        "after the sum: no bias, no activation",
        op);
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
  if (!has_engines(problem.op) || problem.locals == 1 ||
      (problem.ranks_per_device > 1 && !problem.named.engines.value_or(false)))
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: copy engines bring rows of AllGather + GEMM, keys and tokens to other ranks of "
        "a node, with a GPU each; here are {} local ranks, {} to a GPU",
        op, problem.locals, problem.ranks_per_device);
  if (problem.op != Op::kAgGemm) return {};
  if (candidate.tiling.local_banks != 1)
    return fail(ErrorCode::kInvalidArgument,
                "{}: copy engines need one local bank, as copies go by addresses; the candidate "
                "has {}",
                op, candidate.tiling.local_banks);
  return {};
}

struct Numbers {
  std::vector<std::uint32_t> stream;
  std::vector<std::uint32_t> receive;
};

/// Numbers of warpgroups: whole SMs, of those that have run. Those of roles that a world has not
/// are 0, whatever is named.
Numbers numbers_of(const Problem& problem, const Machine& machine, bool engines, Sums sums) {
  constexpr std::uint32_t kFewBlocks = 24;  // of ranks that share a GPU
  const std::vector<std::uint32_t> none = {0};
  const bool over_nodes = problem.nodes > 1;
  const bool gather = problem.op == Op::kAgGemm;
  const bool few = blocks_of_rank(problem, machine) < kFewBlocks;
  Numbers numbers = {none, none};
  if (problem.ranks() == 1) return numbers;
  // Beside copy engines those that the SMs hold which the product cannot have; one at least.
  const std::uint32_t share = blocks_of_rank(problem, machine);
  const std::uint32_t beside = (share > kBlocksMax ? share - kBlocksMax : 1) * kWarpgroupsOfBlock;
  if (engines && over_nodes) {
    numbers.receive = {beside - 2};  // poller and send
  } else if (engines) {
    numbers.stream = {beside};
  } else if (sums == Sums::kOwn) {
    // Math that sums needs one SM's warpgroups for the end.
    numbers.stream = {3};
  } else {
    if (gather || problem.locals > 1) {
      numbers.stream =
          gather && over_nodes && problem.locals > 1
              ? std::vector<std::uint32_t>{3, 12, 24, 48, 96}
              : std::vector<std::uint32_t>{3, 6, 12, 18, 24, 36, 48, 60, 72, 96, 144, 192};
      if (few) numbers.stream.insert(numbers.stream.begin(), 1);
    }
    // A shard that is summed once has run with 12 and more.
    if (sums == Sums::kOnce && !few)
      numbers.stream.erase(numbers.stream.begin(), numbers.stream.begin() + 2);
    // One rank to a node: nobody passes rows on.
    if (over_nodes && (!gather || problem.locals > 1)) {
      numbers.receive = {6, 12, 24, 48, 96};
      // They are joined by those that reduce.
      if (few || sums == Sums::kOnce) numbers.receive.insert(numbers.receive.begin(), 1);
    }
  }
  const Named& named = problem.named;
  if (numbers.stream != none && named.stream_warpgroups != 0)
    numbers.stream = {named.stream_warpgroups};
  if (engines && over_nodes && named.stream_warpgroups != 0)
    numbers.stream = {named.stream_warpgroups};
  if (numbers.receive != none && named.receive_warpgroups != 0)
    numbers.receive = {named.receive_warpgroups};
  return numbers;
}

/// Payloads of a network command, of what one warpgroup shares, or of what copy engines show at a
/// time.
std::vector<std::uint32_t> chunks_of(const Problem& problem, const TileSides& side, bool engines) {
  if (problem.named.tiling.chunk_bytes != 0) return {problem.named.tiling.chunk_bytes};
  if (problem.nodes > 1)
    return {kNetworkChunkBytesMin, 2 * kNetworkChunkBytesMin, 4 * kNetworkChunkBytesMin};
  if (engines) {
    // A row of tiles: a tile looks at a flag for each chunk of its rows.
    const std::uint64_t row = std::uint64_t{128} * problem.shape.k * kElementBytes;
    return {
        static_cast<std::uint32_t>(std::clamp<std::uint64_t>(row, 128 * kKib, 8 * 1024 * kKib))};
  }
  if (problem.op == Op::kAgGemm) return {32 * kKib, 64 * kKib, 128 * kKib, 256 * kKib, 512 * kKib};
  // What one warpgroup sums at a time: a tile.
  return {side.rows * side.columns * bytes_of(problem.result.partials)};
}

std::vector<TileSides> sides_of(const Problem& problem) {
  std::vector<TileSides> sides = {{128, 256}, {128, 128}, {128, 64}};
  if (problem.op == Op::kAgGemm) sides.push_back({64, 128});
  const Tiling& named = problem.named.tiling;
  std::vector<TileSides> kept;
  for (const TileSides& side : sides) {
    const TileSides with_named = {or_chosen(named.tile_m, side.rows),
                                  or_chosen(named.tile_n, side.columns)};
    const bool known = std::any_of(kept.begin(), kept.end(), [&](const TileSides& other) {
      return other.rows == with_named.rows && other.columns == with_named.columns;
    });
    if (!known) kept.push_back(with_named);
  }
  return kept;
}

/// Ways that were measured to be slower wherever they were tried, or were not tried at all: the
/// model's terms do not hold there. Who names one, in Named or in tuned.json, gets it.
bool was_measured(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  constexpr double kEngineBytesMin = 8 << 20;  // of a rank's rows: each copy takes time to begin
  constexpr double kPairFactor = 2;
  constexpr double kLinkShare = 0.65;
  constexpr std::uint32_t kFewRows = 2048;
  constexpr std::uint32_t kFewTiles = 4 * kBlocksMax;
  constexpr std::uint32_t kFewRowsOfSums = 256;
  constexpr std::uint32_t kMuchK = 4096;
  const Named& named = problem.named;
  const Shape& shape = problem.shape;
  const Work work = work_of(problem, candidate);
  if (candidate.engines && !named.engines) {
    const double rows = double{1} * shape.m * shape.k * kElementBytes / problem.ranks();
    if (rows < kEngineBytesMin) return false;
    // The product's time, whatever tiles the candidate has.
    Candidate large = candidate;
    large.tiling.tile_m = kGpuTileRowsMax;
    large.tiling.tile_n = kGpuTileColumnsMax;
    const double tile = tile_us(machine, large.tiling, work.steps, work.b_bytes);
    const double product =
        product_us(machine, work_of(problem, large).tiles, tile, blocks_of_rank(problem, machine));
    const auto us = [](double bytes, double gb_s) { return bytes / (gb_s * 1e3); };
    // Of many rows beside products that take nearly as long as the link, over nodes as long as the
    // network. To one other rank warpgroups pass on in good time, and the loopback's network takes
    // the same engines (kernels/cuda/decisions/ag_copy_engines.md).
    if (problem.nodes == 1 &&
        (shape.m <= kFewRows || product < kLinkShare * us(work.link_bytes, machine.link_gb_s)))
      return false;
    if (product <
        (problem.locals > 2 ? 1 : kPairFactor) * us(work.network_bytes, machine.network_gb_s)) {
      return false;
    }
  }
  // Beside many tiles of much k a few warpgroups are through with the sums in good time
  // (kernels/cuda/decisions/deferred_accumulate.md).
  if (candidate.sums == Sums::kOwn && work.tiles > kFewTiles &&
      (problem.op == Op::kGemmAr || shape.k >= kMuchK)) {
    return false;
  }
  // Sums of narrow tiles: of few rows, whose weights many SMs then read at one time
  // (kernels/cuda/decisions/few_rows.md).
  if (candidate.tiling.tile_n < kGpuTileColumnsMax / 2 && problem.op != Op::kAgGemm &&
      named.tiling.tile_n == 0 && (problem.nodes > 1 || shape.m > kFewRowsOfSums)) {
    return false;
  }
  // Tiles of 64 rows are one math warpgroup's (kernels/cuda/decisions/ag_network_tiles.md).
  return problem.nodes > 1 || candidate.tiling.tile_m >= 128 || named.tiling.tile_m != 0;
}

std::vector<Tiling> tilings_of(const Problem& problem, bool engines) {
  const Tiling& named = problem.named.tiling;
  std::vector<Tiling> tilings;
  for (const TileSides& side : sides_of(problem)) {
    for (const std::uint32_t chunk : chunks_of(problem, side, engines)) {
      Tiling tiling = named;
      tiling.tile_m = side.rows;
      tiling.tile_n = side.columns;
      tiling.chunk_bytes = chunk;
      if (engines && named.banks == 0) tiling.banks = 1;
      if (engines && named.local_banks == 0) tiling.local_banks = 1;
      for (const Exchange exchange : exchanges_of(problem)) {
        tiling.exchange = exchange;
        tilings.push_back(tiling);
      }
    }
  }
  return tilings;
}

std::vector<Sums> sums_of(const Problem& problem) {
  if (problem.op == Op::kAgGemm) return {Sums::kWarpgroups};
  const Named& named = problem.named;
  std::vector<Sums> sums;
  if (!named.sums_once.value_or(false)) {
    sums.push_back(Sums::kWarpgroups);
    // Who names warpgroups that sum wants them to.
    if (named.stream_warpgroups == 0 && problem.result.adds_in_place()) sums.push_back(Sums::kOwn);
  }
  if (named.sums_once.value_or(true)) sums.push_back(Sums::kOnce);
  return sums;
}

std::vector<Mode> forms_of(const Problem& problem) {
  if (problem.named.form) return {*problem.named.form};
  return {Mode::kFused, Mode::kUnfused};
}

/// Whether an element's bits are the same whatever m is. No way to run shares the K of a tile, a
/// node's partials are added in rank order, and each node's sum is rounded to the partials' type,
/// however it is made. So the order of the nodes is left: GEMM+AllReduce has node order, and
/// GEMM+ReduceScatter can (GemmRsLaunch::in_node_order), unless a shard is summed once. That begins
/// with its owner's node, and a row's owner depends on m. (Of two nodes either order gives the
/// same.)
Status check_batch_invariance(const Problem& problem, const Candidate& candidate) {
  constexpr std::uint32_t kNodesMax = 2;
  if (!problem.batch_invariant || candidate.sums != Sums::kOnce || problem.nodes <= kNodesMax)
    return {};
  return fail(ErrorCode::kUnsupported,
              "{}: over {} nodes a shard that is summed once begins with its owner's node, which "
              "depends on m, so it is not batch_invariant; leave one of the two out",
              name_of(problem.op), problem.nodes);
}

Status check_senders(const Problem& problem, const Candidate& candidate) {
  const auto op = name_of(problem.op);
  if (candidate.send_warpgroups > std::min(problem.lanes, shm::kLanesMax))
    return fail(ErrorCode::kInvalidArgument, "{}: {} send warpgroups, but the session has {} rings",
                op, candidate.send_warpgroups, problem.lanes);
  if ((problem.nodes > 1) == (candidate.send_warpgroups > 0)) return {};
  return fail(ErrorCode::kInvalidArgument, "{}: {} send warpgroups for {} nodes", op,
              candidate.send_warpgroups, problem.nodes);
}

/// All of check_candidate() but the SMs.
Status check_way(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  const auto op = name_of(problem.op);
  MK_RETURN_IF_ERROR(check_plan(problem, machine.kind, candidate.tiling));
  MK_RETURN_IF_ERROR(check_batch_invariance(problem, candidate));
  if (machine.kind == MachineKind::kCpu || !is_product(problem.op)) {
    const bool engines = has_engines(problem.op) && machine.kind == MachineKind::kGpu;
    if (engines && candidate.engines) {
      MK_RETURN_IF_ERROR(work_by_plan(problem, machine.kind, candidate).map([](const auto&) {}));
      MK_RETURN_IF_ERROR(check_engines(problem, candidate));
    }
    if ((candidate.engines && !engines) || candidate.sums != Sums::kWarpgroups)
      return fail(ErrorCode::kInvalidArgument,
                  "{}: there are no copy engines, and one way to sum; leave both out", op);
    if (machine.kind == MachineKind::kCpu) return {};
    return check_senders(problem, candidate);
  }
  if (candidate.tiling.tile_m > kGpuTileRowsMax || candidate.tiling.tile_n > kGpuTileColumnsMax)
    return fail(ErrorCode::kInvalidArgument, "{}: tiles of {} x {}; a GPU's are at most {} x {}",
                op, candidate.tiling.tile_m, candidate.tiling.tile_n, kGpuTileRowsMax,
                kGpuTileColumnsMax);
  MK_RETURN_IF_ERROR(check_senders(problem, candidate));
  MK_RETURN_IF_ERROR(check_sums(problem, candidate));
  return check_engines(problem, candidate);
}

}  // namespace

std::vector<Exchange> exchanges_of(const Problem& problem) {
  const Exchange named = problem.named.tiling.exchange;
  if (!has_exchanges(problem) || named != Exchange::kAuto) return {named};
  return {Exchange::kOneShot, Exchange::kTwoShot};
}

std::uint32_t blocks_of_rank(const Problem& problem, const Machine& machine) {
  if (problem.blocks != 0) return problem.blocks;
  return blocks_of_share(machine.sms, problem.ranks_per_device);
}

std::uint32_t blocks_outside(const Problem& problem, const Candidate& candidate) {
  return div_up(pollers(problem) + candidate.send_warpgroups + candidate.receive_warpgroups +
                    candidate.stream_warpgroups,
                kWarpgroupsOfBlock);
}

Status place_warpgroups(const Problem& problem, const Machine& machine, Candidate& candidate) {
  if (machine.kind == MachineKind::kCpu) return {};
  const std::uint32_t share = blocks_of_rank(problem, machine);
  const std::uint32_t outside = blocks_outside(problem, candidate);
  candidate.compute_blocks = or_chosen(problem.named.compute_blocks,
                                       std::min(share > outside ? share - outside : 0, kBlocksMax));
  if (candidate.compute_blocks >= 1 && candidate.compute_blocks <= kBlocksMax &&
      candidate.compute_blocks + outside <= share && outside <= kBlocksMax &&
      candidate.receive_warpgroups <= kBlocksMax) {
    return {};
  }
  return fail(
      ErrorCode::kLimitExceeded,
      "{}: {} compute blocks and {} for communication do not fit: this device holds {} at a "
      "time, {} ranks share it, so at most {} each (and {} of one role)",
      name_of(problem.op), candidate.compute_blocks, outside,
      share * std::max(1u, problem.ranks_per_device), std::max(1u, problem.ranks_per_device), share,
      kBlocksMax);
}

Status check_candidate(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  MK_RETURN_IF_ERROR(check_way(problem, machine, candidate));
  Candidate placed = candidate;
  return place_warpgroups(problem, machine, placed);
}

std::vector<Candidate> legal_candidates(const Problem& problem, const Machine& machine) {
  if (machine.kind == MachineKind::kCpu || !is_product(problem.op))
    return accounted_candidates(problem, machine);
  const Named& named = problem.named;
  const std::uint32_t share = blocks_of_rank(problem, machine);
  // Who names warpgroups or compute blocks decides what is left of the rank's SMs.
  const bool all_chosen = named.compute_blocks == 0 && named.stream_warpgroups == 0 &&
                          named.receive_warpgroups == 0 && named.send_warpgroups == 0;
  const std::uint32_t most_outside = all_chosen ? std::max(1u, share / 2) : share;
  std::vector<Candidate> legal;
  for (bool engines : {false, true}) {
    if (named.engines.value_or(engines) != engines) continue;
    // Who names warpgroups that share wants them to, unless copy engines are named, too.
    if (engines && !named.engines && named.stream_warpgroups != 0) continue;
    for (const Tiling& tiling : tilings_of(problem, engines)) {
      for (Sums sums : sums_of(problem)) {
        Candidate candidate;
        candidate.sums = sums;
        candidate.engines = engines;
        candidate.tiling = tiling;
        candidate.send_warpgroups = problem.nodes > 1 ? or_chosen(named.send_warpgroups, 1) : 0;
        // Whether tile, engines and sums are possible does not depend on the numbers.
        if (!was_measured(problem, machine, candidate) || !check_way(problem, machine, candidate))
          continue;
        const Numbers numbers = numbers_of(problem, machine, engines, sums);
        for (const std::uint32_t stream : numbers.stream) {
          for (const std::uint32_t receive : numbers.receive) {
            candidate.stream_warpgroups = stream;
            candidate.receive_warpgroups = receive;
            if (blocks_outside(problem, candidate) > most_outside ||
                !place_warpgroups(problem, machine, candidate))
              continue;
            for (Mode form : forms_of(problem)) {
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
