#include "kernels/plan/model.h"

#include <algorithm>
#include <cmath>

#include "kernels/comm/shard.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/units.h"
#include "kernels/cuda/skeleton/chunk_steps.h"
#include "kernels/ops/ag_gemm/schedule.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/plan/accounted.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels::plan {
namespace {

constexpr double kBytesPerUs = 1e3;  ///< of 1 GB/s
constexpr double kNoTime = 1e-9;

double us(double bytes, double gb_s) { return gb_s > 0 ? bytes / (gb_s * kBytesPerUs) : 0; }

/// What a rail takes: its bytes, the first chunk's way by itself, and each command's.
double rail_us(const Machine& machine, double bytes, double chunk_bytes) {
  if (bytes <= 0) return 0;
  const double chunk = std::max(1.0, chunk_bytes);
  return us(bytes + machine.network_fill_chunks * std::min(chunk, bytes), machine.network_gb_s) +
         machine.network_command_us * bytes / chunk;
}

/// Lower clock at the power limit, which a long product feels (choices_h200_*.json), and more so of
/// narrow tiles.
double clock_factor(const Machine& machine, double time, std::uint32_t tile_n) {
  const double slowdown =
      machine.power_slowdown + (tile_n > 128 ? 0.0 : machine.power_slowdown_128);
  return time > 0 ? 1 + slowdown * time / (time + machine.power_after_us) : 1;
}

double waves(const Machine& machine, double tiles_per_block) {
  const double whole = std::ceil(tiles_per_block - 1e-9);
  return machine.whole_waves_share * whole +
         (1 - machine.whole_waves_share) * std::max(tiles_per_block, 1.0);
}

struct ByOp {
  double launch, overlap, unfused, unfused_link, unfused_network;
};
ByOp by_op(const Machine& m, Op op) {
  switch (op) {
    case Op::kAgGemm:
      return {m.launch_us_ag, m.overlap_ag, m.unfused_us_ag, m.unfused_link_ag,
              m.unfused_network_ag};
    case Op::kGemmRs:
      return {m.launch_us_rs, m.overlap_rs, m.unfused_us_rs, m.unfused_link_rs,
              m.unfused_network_rs};
    default:
      break;
  }
  return {m.launch_us_ar, m.overlap_ar, m.unfused_us_ar, m.unfused_link_ar, m.unfused_network_ar};
}

/// AllGather+GEMM: SMs that share rows take tiles when they have done so. So the product has
/// compute_blocks until this rank's rows are `shared`, then all but the SMs that receive, and those
/// too when the last rows have come.
double gather_product_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                         const Work& work, double tile, double shared, double last_rows) {
  const double blocks = candidate.compute_blocks;
  const double all = candidate.engines ? blocks : blocks_of_rank(problem, machine);
  const double receivers =
      candidate.engines ? 0 : std::ceil(candidate.receive_warpgroups / double{kWarpgroupsOfBlock});
  const double after = std::max(all - receivers, blocks);
  const std::uint32_t tile_n = candidate.tiling.tile_n;
  const double left = work.tiles * tile * clock_factor(machine, work.tiles * tile / blocks, tile_n);
  double time = left / blocks;
  if (time > shared) time = shared + (left - shared * blocks) / after;
  if (time > last_rows) {
    const double then = left - shared * blocks - (last_rows - shared) * after;
    time = std::min(time, last_rows + std::max(0.0, then) / all);
  }
  const double clock = clock_factor(machine, time, tile_n);
  return with_weights_us(machine, waves(machine, time / tile / clock) * tile * clock, work.b_bytes,
                         gather_passes(problem, candidate));
}

/// In how many parts warpgroups copy a chunk: the operator's own rule.
double parts_of_chunk(const Problem& problem, const Candidate& candidate, double chunks,
                      double warpgroups) {
  return cuda::copy_parts(static_cast<std::uint32_t>(std::ceil(std::min(chunks, 1e9))),
                          candidate.tiling.chunk_bytes, static_cast<std::uint32_t>(warpgroups),
                          problem.nodes > 1, problem.locals - 1);
}

/// Tiles that need rows of one shard.
Timeline predict_by_shards(const Problem& problem, const Machine& machine,
                           const Candidate& candidate, const Work& work) {
  const ByOp op = by_op(machine, problem.op);
  const bool over_nodes = problem.nodes > 1;
  const double peers = problem.locals - 1.0;
  Timeline time;
  time.tile = tile_us(machine, candidate.tiling, work.steps, work.b_bytes);
  // Own rows. Warpgroups: bytes, a flag for each chunk, and the first chunk of each. Engines:
  // bytes, and what each copy costs besides them (kernels/cuda/decisions/ag_copy_engines.md).
  if (peers > 0) {
    if (candidate.engines) {
      time.local = us(work.link_bytes, machine.engine_gb_s) + machine.engine_copy_us * peers;
    } else {
      const double warpgroups = candidate.stream_warpgroups + candidate.receive_warpgroups;
      const double chunk = std::max(1u, candidate.tiling.chunk_bytes);
      const double chunks = work.link_bytes / peers / chunk;
      const double parts = parts_of_chunk(problem, candidate, chunks, warpgroups);
      // Chunks of more than three parts are counted and shown later; and the last part ends late.
      time.local = us(work.link_bytes, copy_rate_gb_s(machine, warpgroups, problem.locals - 1)) *
                       (1 + machine.many_parts_share * std::max(0.0, 1 - 3 / parts)) +
                   machine.chunk_flag_us * chunks +
                   machine.last_part_share * us(chunk / parts * peers, machine.copy_gb_s);
    }
  }
  double rows = time.local;
  double shared = time.local;
  if (over_nodes) {
    // Rows from other nodes, which receivers pass on when they have shared the rank's own.
    if (peers > 0) {
      constexpr double kEnginePieces = 4;
      time.passed =
          candidate.engines
              ? us(work.passed_bytes, machine.engine_gb_s) +
                    machine.engine_copy_us * kEnginePieces * peers
              : us(work.passed_bytes, saturated_gb_s(machine, candidate.receive_warpgroups,
                                                     machine.pass_on_gb_s, machine.rows_link_gb_s));
    }
    time.network = rail_us(machine, work.network_bytes, candidate.tiling.chunk_bytes);
    if (!problem.in_place) {
      // Warpgroups copy the shard to where the network reads it, chunk by chunk: the rail goes at
      // their pace if that is slower, and begins when they have copied the first chunk.
      const double warpgroups = candidate.stream_warpgroups + candidate.receive_warpgroups;
      const double shard = work.network_bytes / (problem.nodes - 1.0);
      const double chunk = std::min<double>(std::max(1u, candidate.tiling.chunk_bytes), shard);
      const double parts = parts_of_chunk(
          problem, candidate, shard / std::max(1u, candidate.tiling.chunk_bytes), warpgroups);
      const double first =
          us(chunk, std::min(std::max(warpgroups, 1.0), parts) * machine.copy_gb_s);
      const double placed = first + us(shard, saturated_gb_s(machine, warpgroups, machine.copy_gb_s,
                                                             machine.hbm_gb_s / 2));
      time.network =
          overlapped_us(op.overlap, time.network + first, placed) + machine.copy_for_network_us;
      if (peers == 0) shared = placed;
    }
    rows = overlapped_us(op.overlap, time.network + kNoTime,
                         peers > 0 ? time.local + time.passed : kNoTime);
  }
  time.compute = gather_product_us(problem, machine, candidate, work, time.tile, shared, rows);
  // Warpgroups' stores stand in the way of tiles' loads; engines' copies hardly do.
  if (peers > 0 && !candidate.engines)
    time.compute += machine.copy_beside_share * std::min(time.compute, time.local);
  // The last rows' tiles: a row of them, over all SMs.
  const double all =
      candidate.engines ? candidate.compute_blocks : blocks_of_rank(problem, machine);
  const double last_row = div_up(problem.shape.n, candidate.tiling.tile_n) / all;
  time.last = machine.arrival_tiles * time.tile * std::max(1.0, last_row) *
              clock_factor(machine, time.compute, candidate.tiling.tile_n);
  time.launch = op.launch + (over_nodes ? machine.network_latency_us : 0);
  time.total = time.launch + overlapped_us(op.overlap, time.compute, rows + time.last);
  return time;
}

/// One row of tiles that spans all shards: it reads the weights once, when all rows have come, and
/// SMs that shared rows take tiles, too. `by_shards`: what both have in common.
Timeline predict_spanning(const Problem& problem, const Machine& machine,
                          const Candidate& candidate, const Work& work, const Timeline& by_shards) {
  Timeline time = by_shards;
  const double tiles = div_up(problem.shape.n, candidate.tiling.tile_n);
  // One thread asks for a box of each shard.
  time.tile += work.steps * (problem.locals - 1) * machine.step_us_box;
  time.compute =
      with_weights_us(machine,
                      product_us(machine, tiles, time.tile, blocks_of_rank(problem, machine),
                                 candidate.tiling.tile_n),
                      work.b_bytes, 1);
  time.last = 0;
  time.total = time.launch + time.local + time.compute;
  return time;
}

bool may_span(const Problem& problem, const Candidate& candidate) {
  return !candidate.engines && AgGemmSchedule::may_span(problem.nodes, problem.locals,
                                                        problem.shape.m, candidate.tiling.tile_m);
}

struct GatherTime {
  Timeline time;
  bool spans = false;  ///< tiles span all shards
};
GatherTime predict_gather(const Problem& problem, const Machine& machine,
                          const Candidate& candidate, const Work& work) {
  const Timeline by_shards = predict_by_shards(problem, machine, candidate, work);
  if (!may_span(problem, candidate)) return {by_shards};
  const Timeline spanning = predict_spanning(problem, machine, candidate, work, by_shards);
  const bool spans = spanning.total < by_shards.total;
  return {spans ? spanning : by_shards, spans};
}

/// What is left of `bytes` when warpgroups of `gb_s` in all have had `time`.
double share_left(double bytes, double gb_s, double time) {
  if (bytes <= 0) return 0;
  return 1 - std::min(1.0, gb_s * kBytesPerUs * time / bytes);
}

/// Sums within a node: warpgroups sum beside the product; what is left then all SMs sum, as fast as
/// memory or, of results for several, the link lets them.
/// The last wave's tiles come when no product is left to sum them beside.
void add_local_sums(const Problem& problem, const Machine& machine, const Candidate& candidate,
                    const Work& work, double product, Timeline& time) {
  const double last =
      machine.last_wave_share * std::min(1.0, candidate.compute_blocks / std::max(1.0, work.tiles));
  const bool scatter = problem.op == Op::kGemmRs;
  const double bytes = scatter ? work.sum_bytes : work.result_bytes;
  const double all = us(bytes, scatter ? machine.hbm_gb_s : machine.sums_link_gb_s);
  const double beside_gb_s =
      candidate.stream_warpgroups * (scatter ? machine.sum_gb_s : machine.sum_out_gb_s);
  time.sums = candidate.sums == Sums::kOwn
                  ? machine.own_share * all
                  : all * std::max(last, share_left(bytes, beside_gb_s, product));
  time.total = product + time.sums;
  if (!scatter)
    time.total = overlapped_us(machine.overlap_ar, time.total,
                               us(work.link_bytes + work.result_bytes, machine.link_gb_s));
}

/// Sums over nodes: the rail waits for what is to be sent, and ends with sums of what has come.
void add_network_sums(const Problem& problem, const Machine& machine, const Candidate& candidate,
                      const Work& work, double product, Timeline& time) {
  const bool scatter = problem.op == Op::kGemmRs;
  const double overlap = scatter ? machine.overlap_rs : machine.overlap_ar;
  time.network = rail_us(machine, work.network_bytes, candidate.tiling.chunk_bytes);
  // One rank to a node: math stores what is sent, nobody reduces.
  const double unsummed =
      problem.locals == 1
          ? 0
          : share_left(work.sent_sum_bytes,
                       candidate.stream_warpgroups *
                           (scatter ? machine.sum_sent_gb_s : machine.sum_sent_ar_gb_s),
                       product);
  time.wait = unsummed * time.network;
  const double rail = overlapped_us(
      overlap, time.network + fill_tiles(problem, machine) * time.tile, product + time.wait);
  if (scatter) {
    const bool once = candidate.sums == Sums::kOnce;
    const double warpgroups =
        candidate.receive_warpgroups + (once ? candidate.stream_warpgroups : 0u);
    const double ready =
        1 - share_left(work.come_sum_bytes, warpgroups * machine.sum_gb_s, product);
    // A shard that is summed once can only be so from the middle of the launch on.
    time.sums = (1 - ready * (once ? 0.5 : 1.0)) * us(work.come_sum_bytes, machine.hbm_gb_s);
  } else if (problem.locals > 1 && candidate.tiling.exchange != Exchange::kTwoShot) {
    // (A two-shot exchange's are two_shot.h's.) Sums of what has come go on until rail or product
    // ends, whichever is first.
    const double beside = overlapped_us(-8, product, rail);
    time.sums = share_left(work.come_sum_bytes,
                           candidate.receive_warpgroups * machine.sum_come_gb_s, beside) *
                us(work.come_sum_bytes, machine.sums_link_gb_s);
  }
  const double link = us(work.link_bytes + work.result_bytes, machine.link_gb_s);
  const double legs[] = {rail, product + time.sums, link};
  const double longest = *std::max_element(std::begin(legs), std::end(legs));
  double sum = 0;
  for (double leg : legs) sum += std::pow(leg / longest, overlap);
  time.total = longest * std::pow(sum, 1 / overlap);
}

Timeline predict_sums(const Problem& problem, const Machine& machine, const Candidate& candidate,
                      const Work& work) {
  const ByOp op = by_op(machine, problem.op);
  Timeline time;
  time.tile = tile_us(machine, candidate.tiling, work.steps, work.b_bytes);
  time.compute = with_weights_us(
      machine,
      product_us(machine, work.tiles, time.tile, candidate.compute_blocks, candidate.tiling.tile_n),
      work.b_bytes, 1);
  time.local = us(work.link_bytes, machine.link_gb_s);
  // Tiles leave for their owners as they are computed, and stand in their SM's way a little.
  const double product = overlapped_us(op.overlap, time.compute, time.local) +
                         machine.store_beside_share * std::min(time.compute, time.local);
  time.launch = op.launch + (problem.nodes > 1 ? machine.network_latency_us : 0);
  if (problem.nodes == 1) {
    add_local_sums(problem, machine, candidate, work, product, time);
  } else {
    add_network_sums(problem, machine, candidate, work, product, time);
  }
  time.total += time.launch;
  return time;
}

/// One phase after the other, each with all SMs.
Timeline predict_unfused(const Problem& problem, const Machine& machine, const Candidate& candidate,
                         const Work& work) {
  const ByOp op = by_op(machine, problem.op);
  Timeline time;
  time.tile = tile_us(machine, candidate.tiling, work.steps, work.b_bytes);
  time.compute = with_weights_us(
      machine,
      product_us(machine, work.tiles, time.tile, candidate.compute_blocks, candidate.tiling.tile_n),
      work.b_bytes, 1);
  const double bytes = problem.op == Op::kAgGemm ? work.link_bytes + work.passed_bytes
                                                 : work.link_bytes + work.result_bytes;
  time.local = op.unfused_link * us(bytes, machine.link_gb_s);
  time.network =
      op.unfused_network * rail_us(machine, work.network_bytes, candidate.tiling.chunk_bytes);
  // Finished chunks leave when the last sums have come.
  if (candidate.tiling.exchange == Exchange::kTwoShot) time.network += machine.network_latency_us;
  if (problem.op != Op::kAgGemm) {
    const double c = 2.0 * problem.shape.m * problem.shape.n * bytes_of(problem.result.partials);
    time.sums = machine.unfused_sum_share * us(c, machine.hbm_gb_s);
  }
  time.launch = op.unfused;
  time.total = time.launch + time.compute + time.local + time.network + time.sums;
  return time;
}

/// By the plan's account of the work (account.h): on CPUs, and where there is no other model.
Timeline predict_accounted(const Problem& problem, const Machine& machine,
                           const Candidate& candidate) {
  const auto work = work_by_plan(problem, machine.kind, candidate);
  if (!work) {
    Timeline never;
    never.total = HUGE_VAL;
    return never;
  }
  return account_of(problem, machine, candidate).predict(*work, candidate.form);
}

}  // namespace

double tile_us(const Machine& machine, const Tiling& tiling, double steps, double b_bytes) {
  // Tiles of 64 rows are the first math warpgroup's alone
  // (kernels/cuda/decisions/short_launches.md). Tiles of fewer than 256 columns read more for each
  // product; an H100's L2 feels that, an H200's does not (kernels/cuda/decisions/tile_columns.md).
  const double megabytes = b_bytes / 1e6;
  const double l2 =
      megabytes > 0 ? machine.l2_share_128 * megabytes / (megabytes + machine.l2_mb_128) : 0;
  if (tiling.tile_m <= 64) return steps * machine.step_us_64_rows * (1 + l2) + machine.tile_us_128;
  if (tiling.tile_n <= 64) return steps * machine.step_us_64 * (1 + l2) + machine.tile_us_128;
  if (tiling.tile_n <= 128) return steps * machine.step_us_128 * (1 + l2) + machine.tile_us_128;
  return steps * machine.step_us_256 + machine.tile_us_256;
}

double product_us(const Machine& machine, double tiles, double tile, double blocks,
                  std::uint32_t tile_n) {
  const double time = waves(machine, tiles / std::max(1.0, blocks)) * tile;
  return time * clock_factor(machine, time, tile_n);
}

double with_weights_us(const Machine& machine, double product, double b_bytes, double passes) {
  const double megabytes = b_bytes / 1e6;
  const double lost = megabytes > 0 ? megabytes / (megabytes + machine.l2_mb) : 0;
  const double memory = us(b_bytes * (1 + (passes - 1) * lost), machine.weights_gb_s);
  return overlapped_us(machine.weights_overlap, product, memory);
}

bool spans_shards(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  return problem.op == Op::kAgGemm && may_span(problem, candidate) &&
         predict_gather(problem, machine, candidate, work_of(problem, candidate)).spans;
}

double fill_tiles(const Problem& problem, const Machine& machine) {
  return problem.locals == 1 ? 1 : machine.network_fill_tiles;
}

double gather_passes(const Problem& problem, const Candidate& candidate) {
  const auto least = [](std::uint32_t one, std::uint32_t other) { return std::min(one, other); };
  const std::uint32_t locals = problem.locals;
  const std::uint32_t rounds = div_up(shard_rows_max(problem.shape.m, problem.ranks()),
                                      std::max(1u, candidate.tiling.tile_m));
  const std::uint32_t columns = div_up(problem.shape.n, std::max(1u, candidate.tiling.tile_n));
  const std::uint32_t blocks = std::max(1u, candidate.compute_blocks);
  const bool soon = ag_gemm_comes_in_turn(problem.nodes, problem.shape);
  const std::uint32_t whole = candidate.engines ? locals
                              : soon ? least(locals, 1 + div_up(blocks, rounds * columns))
                                     : 1;
  const std::uint32_t together = std::clamp(blocks / columns, 1u, TileGrid::kBandTiles);
  const auto band = [](std::uint32_t most, std::uint32_t shards) {
    return shards == 0 || most < shards ? std::max(1u, shards) : most / shards * shards;
  };
  const bool in_turn = soon || candidate.engines;
  const std::uint32_t near = band(in_turn ? TileGrid::kBandTiles : together, locals - whole);
  return whole * div_up(rounds, TileGrid::kBandTiles) + div_up((locals - whole) * rounds, near) +
         (problem.nodes - 1) * div_up(locals * rounds, band(together, locals));
}

double saturated_gb_s(const Machine& machine, double warpgroups, double each, double link) {
  const double asked = std::max(warpgroups, 1e-3) * each;
  const double sharpness = machine.link_sharpness;
  return asked / std::pow(1 + std::pow(asked / link, sharpness), 1 / sharpness);
}

double overlapped_us(double sharpness, double one, double other) {
  const double longest = std::max({one, other, kNoTime});
  return longest *
         std::pow(std::pow(one / longest, sharpness) + std::pow(other / longest, sharpness),
                  1 / sharpness);
}

double copy_rate_gb_s(const Machine& machine, double warpgroups, std::uint32_t peers) {
  const double rate =
      saturated_gb_s(machine, warpgroups, machine.copy_gb_s, machine.rows_link_gb_s);
  if (peers <= 1) return rate;
  return rate / (1 + machine.crowding * std::max(0.0, warpgroups - kCrowdedAbove) / 100);
}

Work work_of(const Problem& problem, const Candidate& candidate) {
  const double m = problem.shape.m;
  const double n = problem.shape.n;
  const double k = problem.shape.k;
  const double locals = problem.locals;
  const double ranks = problem.ranks();
  const double others = problem.nodes - 1.0;
  const std::uint32_t shard = shard_rows_max(problem.shape.m, problem.ranks());
  const std::uint32_t tile_m = std::max(1u, candidate.tiling.tile_m);
  const std::uint32_t tile_n = std::max(1u, candidate.tiling.tile_n);
  Work work;
  const double row_tiles =
      problem.op == Op::kGemmAr ? div_up(problem.shape.m, tile_m) : ranks * div_up(shard, tile_m);
  work.tiles = row_tiles * div_up(problem.shape.n, tile_n);
  work.steps = k / 64;
  work.b_bytes = n * k * kElementBytes;
  const double c = m * n * bytes_of(problem.result.partials);
  switch (problem.op) {
    case Op::kAgGemm: {
      const double rows = m * k * kElementBytes / ranks;
      work.link_bytes = rows * (locals - 1);
      work.passed_bytes = work.link_bytes * others;
      work.network_bytes = rows * others;
      break;
    }
    case Op::kGemmRs:
      work.link_bytes = c * (locals - 1) / locals;
      work.sum_bytes = c * (1 + 1 / locals);
      work.network_bytes = c / ranks * others;
      // What is kept is summed after what is sent.
      if (locals > 1) work.sent_sum_bytes = work.network_bytes * locals;
      work.come_sum_bytes = c / ranks * (problem.nodes + 1.0);
      if (candidate.sums == Sums::kOnce) work.come_sum_bytes += c / ranks * locals;
      break;
    case Op::kGemmAr:
      work.link_bytes = c * (locals - 1) / locals;
      work.result_bytes = m * problem.result.epilogue.columns_of(problem.shape.n) * kElementBytes *
                          (locals - 1) / locals;
      work.network_bytes = c / locals * others;
      if (locals > 1) work.sent_sum_bytes = work.network_bytes * locals;
      work.come_sum_bytes = c / locals * std::max(1.0, locals - 1);
      if (candidate.tiling.exchange == Exchange::kTwoShot) {
        // Of an owner's tiles the largest piece, which one node adds up.
        const double owned = std::ceil(work.tiles / locals);
        const double piece = std::ceil(owned / problem.nodes) / owned;
        const double result =
            m * problem.result.epilogue.columns_of(problem.shape.n) * kElementBytes / locals;
        work.network_bytes = c / locals * (1 - piece) + result * piece * others;
        if (locals > 1) work.sent_sum_bytes = c;
        work.come_sum_bytes = c / locals * piece * others + result * std::max(1.0, locals - 1);
      }
      break;
    default:  // by the plan's account
      break;
  }
  return work;
}

Timeline predict(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  if (machine.kind == MachineKind::kCpu || !is_product(problem.op))
    return predict_accounted(problem, machine, candidate);
  const Work work = work_of(problem, candidate);
  if (candidate.form == Mode::kUnfused) return predict_unfused(problem, machine, candidate, work);
  return problem.op == Op::kAgGemm ? predict_gather(problem, machine, candidate, work).time
                                   : predict_sums(problem, machine, candidate, work);
}

}  // namespace mk::kernels::plan
