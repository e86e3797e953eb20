// The model term by term, with numbers one can follow; and what must hold whatever the numbers are.
#include "kernels/plan/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/ops/ag_gemm/schedule.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "kernels/plan/account.h"
#include "kernels/plan/legal.h"
#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

/// 100 SMs; a tile of 128 x 256 takes 1 µs for each 64 of K; no second terms.
Machine plain_machine() {
  Machine machine = shipped_machine("H100").value();
  machine.sms = 100;
  machine.step_us_256 = 1;
  machine.step_us_128 = 0.6;
  machine.step_us_64 = 0.25;
  machine.step_us_64_rows = 0.3;
  machine.tile_us_256 = machine.tile_us_128 = 0;
  machine.power_slowdown = machine.power_slowdown_128 = 0;
  machine.weights_overlap = 64;
  machine.whole_waves_share = 1;
  machine.store_beside_share = machine.copy_beside_share = 0;
  machine.last_wave_share = 0;
  machine.overlap_ag = machine.overlap_rs = machine.overlap_ar = 64;  // as good as a maximum
  return machine;
}

Candidate candidate_of(const Problem& problem, const Machine& machine, std::uint32_t stream,
                       std::uint32_t receive = 0) {
  Candidate candidate;
  candidate.tiling.tile_m = 128;
  candidate.tiling.tile_n = 256;
  candidate.tiling.chunk_bytes = 256 * 1024;
  candidate.stream_warpgroups = stream;
  candidate.receive_warpgroups = receive;
  candidate.send_warpgroups = problem.nodes > 1 ? 1 : 0;
  EXPECT_TRUE(place_warpgroups(problem, machine, candidate));
  return candidate;
}

TEST(PlanModel, ATileTakesItsStepsAndItsEnds) {
  Machine machine = plain_machine();
  machine.tile_us_256 = 3;
  machine.tile_us_128 = 2;
  Tiling tiling;
  tiling.tile_m = 128;
  tiling.tile_n = 256;
  EXPECT_DOUBLE_EQ(tile_us(machine, tiling, 10, 0), 13);
  tiling.tile_n = 128;
  EXPECT_DOUBLE_EQ(tile_us(machine, tiling, 10, 0), 8);
  tiling.tile_n = 64;
  EXPECT_DOUBLE_EQ(tile_us(machine, tiling, 10, 0), 4.5);
  tiling = {};
  tiling.tile_m = 64;
  tiling.tile_n = 128;
  EXPECT_DOUBLE_EQ(tile_us(machine, tiling, 10, 0), 5);
}

// AllGather+GEMM of few rows, on 100 SMs. With 80 columns of tiles both ranks' rows take two waves
// of tiles; a row of tiles that spans both takes one, with a second box of rows in each step. With
// 40 columns both kinds take one wave, so the box decides.
TEST(PlanModel, TilesSpanAllShardsWhereThatSavesAWave) {
  Machine machine = plain_machine();
  machine.step_us_box = 0.1;
  machine.weights_gb_s = 1e9;  // all of it is the product
  for (const std::uint32_t columns : {80u, 40u}) {
    Problem problem;
    problem.locals = 2;
    problem.shape = {64, columns * 256, 6400};
    const Candidate candidate = candidate_of(problem, machine, 12);
    const bool saves = columns == 80;
    EXPECT_EQ(saves, spans_shards(problem, machine, candidate));
    const Timeline time = predict(problem, machine, candidate);
    if (saves) {
      // 100 steps of 1 + 0.1 µs, behind the rows.
      EXPECT_NEAR(110, time.compute, 1e-6);
      EXPECT_NEAR(time.launch + time.local + 110, time.total, 1e-6);
    } else {
      EXPECT_LT(time.compute, 105);
    }
    // Where a tile holds them no more, or over nodes, rows have tiles of their own.
    problem.shape.m = 136;
    EXPECT_FALSE(spans_shards(problem, machine, candidate_of(problem, machine, 12)));
    problem.shape.m = 64;
    problem.nodes = 2;
    EXPECT_FALSE(spans_shards(problem, machine, candidate_of(problem, machine, 12, 6)));
  }
}

TEST(PlanModel, NarrowTilesTakeLongerAsTheWeightsOutgrowL2) {
  Machine machine = plain_machine();
  machine.l2_share_128 = 0.3;
  machine.l2_mb_128 = 20;
  Tiling tiling;
  tiling.tile_m = 128;
  tiling.tile_n = 128;
  EXPECT_DOUBLE_EQ(tile_us(machine, tiling, 10, 20e6), 6 * 1.15);
  EXPECT_NEAR(tile_us(machine, tiling, 10, 1e12), 6 * 1.3, 1e-3);
  tiling.tile_n = 256;
  EXPECT_DOUBLE_EQ(tile_us(machine, tiling, 10, 20e6), 10);
}

TEST(PlanModel, AProductTakesWholeWaves) {
  Machine machine = plain_machine();
  EXPECT_DOUBLE_EQ(product_us(machine, 100, 7, 100), 7);
  EXPECT_DOUBLE_EQ(product_us(machine, 101, 7, 100), 14);
  EXPECT_DOUBLE_EQ(product_us(machine, 200, 7, 100), 14);
  machine.whole_waves_share = 0.5;
  EXPECT_DOUBLE_EQ(product_us(machine, 150, 7, 100), 7 * 1.75);
  // Fewer tiles than SMs take a tile's time all the same.
  EXPECT_DOUBLE_EQ(product_us(machine, 10, 7, 100), 7);
}

// 16 rows: all of the weights are read, and nothing of a wave's time hides that.
TEST(PlanModel, AProductOfFewRowsTakesAsLongAsItsWeights) {
  Machine machine = plain_machine();
  machine.weights_gb_s = 1000;
  const Problem problem = problem_of(Op::kGemmAr, 1, 4, {16, 16384, 64});
  const Candidate candidate = candidate_of(problem, machine, 12);
  EXPECT_DOUBLE_EQ(predict(problem, machine, candidate).compute, 16384.0 * 64 * 2 / 1e6);
  machine.weights_gb_s = 1e6;
  EXPECT_DOUBLE_EQ(predict(problem, machine, candidate).compute, 1);
}

// The passes over B are the bands of the order of tiles that the kernel walks.
TEST(PlanModel, PassesOverTheWeightsAreThoseOfTheTilesOrder) {
  const Machine machine = plain_machine();
  std::mt19937 random(20261129);
  const auto pick = [&](std::uint32_t least, std::uint32_t most) {
    return std::uniform_int_distribution<std::uint32_t>(least, most)(random);
  };
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t nodes = pick(1, 2);
    const std::uint32_t locals = pick(1, 4);
    // A B of less than 8 MiB has no bands.
    const Shape shape{nodes * locals * 128 * pick(1, 24), 256 * pick(8, 60), 4096};
    const Problem problem = problem_of(Op::kAgGemm, nodes, locals, shape);
    const Candidate candidate = candidate_of(problem, machine, 12, nodes > 1 ? 12 : 0);
    const auto plan = AgGemmPlan::make(nodes, locals, shape, problem.dtype, candidate.tiling);
    ASSERT_TRUE(plan) << plan.error().message;
    const AgGemmSchedule schedule(*plan, {nodes, locals, 0, 0}, shape.m);
    const Arrival arrival =
        ag_gemm_comes_in_turn(nodes, shape) ? Arrival::kSoonInTurn : Arrival::kSideBySide;
    const AgGemmBands bands = AgGemmBands::of(schedule, arrival, candidate.compute_blocks);
    double passes = 0;
    std::uint32_t last_origin = ~0u;
    std::uint32_t last_column = ~0u;
    for (AgGemmWalk walk(schedule, bands, 0); !walk.done(); walk.advance(1)) {
      // A band begins where the columns begin again.
      if (walk.column() == 0 && (last_column != 0 || last_origin == ~0u)) ++passes;
      last_column = walk.column();
      last_origin = walk.origin();
    }
    EXPECT_EQ(gather_passes(problem, candidate), passes)
        << nodes << " x " << locals << ": " << shape.m << " x " << shape.n;
  }
}

TEST(PlanModel, NodesCopyRowsThatAreNotInPlaceAtTheirWarpgroupsPace) {
  Machine machine = plain_machine();
  machine.copy_gb_s = 10;
  const Problem problem = problem_of(Op::kAgGemm, 2, 1, {8192, 256, 8192});
  const double bytes = 8192.0 / 2 * 8192 * 2;
  // Three warpgroups are slower than the network, 96 are not.
  const double few = predict(problem, machine, candidate_of(problem, machine, 3)).network;
  EXPECT_GE(few, bytes / 30e3);
  const double many = predict(problem, machine, candidate_of(problem, machine, 96)).network;
  EXPECT_LT(many, bytes / 1e3 / machine.network_gb_s * 1.1);
}

// Sharing SMs compute as soon as this rank's rows are copied, long before the network is through.
TEST(PlanModel, SmsThatShareTakeTilesWhileTheNetworkGoesOn) {
  Machine machine = plain_machine();
  machine.weights_gb_s = 1e6;
  Problem problem = problem_of(Op::kAgGemm, 2, 1, {16384, 8192, 8192});
  const Candidate candidate = candidate_of(problem, machine, 96);
  const double compute = predict(problem, machine, candidate).compute;
  machine.network_gb_s /= 1.5;
  EXPECT_NEAR(predict(problem, machine, candidate).compute, compute, 0.01 * compute);
  EXPECT_LT(compute, 1.1 * product_us(machine, work_of(problem, candidate).tiles, 128, 100));
}

TEST(PlanModel, APassOverLargeWeightsReadsThemAnew) {
  Machine machine = plain_machine();
  machine.weights_gb_s = 1000;
  machine.l2_mb = 50;
  EXPECT_NEAR(with_weights_us(machine, 1, 50e6, 1), 50, 1e-6);
  EXPECT_NEAR(with_weights_us(machine, 1, 50e6, 3), 50 + 2 * 25, 1e-6);
  EXPECT_NEAR(with_weights_us(machine, 500, 50e6, 3), 500, 1e-6);
}

TEST(PlanModel, ALongProductRunsAtTheClockOfThePowerLimit) {
  Machine machine = plain_machine();
  machine.power_slowdown = 0.2;
  machine.power_after_us = 1000;
  EXPECT_NEAR(product_us(machine, 100, 1, 100), 1, 1e-3);
  EXPECT_DOUBLE_EQ(product_us(machine, 100, 1000, 100), 1000 * 1.1);
  EXPECT_NEAR(product_us(machine, 100, 1e6, 100), 1.2e6, 1e3);
}

TEST(PlanModel, WarpgroupsSaturateALink) {
  const Machine machine = plain_machine();
  EXPECT_NEAR(saturated_gb_s(machine, 3, 10, 300), 30, 0.1);
  EXPECT_NEAR(saturated_gb_s(machine, 300, 10, 300), 300, 0.1);
  double before = 0;
  for (int warpgroups = 1; warpgroups < 200; ++warpgroups) {
    const double rate = saturated_gb_s(machine, warpgroups, 10, 300);
    EXPECT_GE(rate, before);
    EXPECT_LE(rate, std::min(300.0, 10.0 * warpgroups) + 1e-9);
    before = rate;
  }
}

TEST(PlanModel, CrowdedWarpgroupsCopySlowerToSeveralPeers) {
  Machine machine = plain_machine();
  machine.crowding = 0.1;
  const double one = copy_rate_gb_s(machine, 136, 1);
  EXPECT_NEAR(copy_rate_gb_s(machine, 136, 7), one / 1.1, 1e-9);
  EXPECT_DOUBLE_EQ(copy_rate_gb_s(machine, 36, 7), copy_rate_gb_s(machine, 36, 1));
}

TEST(PlanModel, OverlappedLegsTakeTheLongestAndALittle) {
  EXPECT_NEAR(overlapped_us(64, 10, 3), 10, 1e-6);
  EXPECT_DOUBLE_EQ(overlapped_us(2, 3, 4), 5);
  EXPECT_DOUBLE_EQ(overlapped_us(2, 4, 3), 5);
  EXPECT_NEAR(overlapped_us(-64, 10, 3), 3, 1e-6);
}

// Tiles and bytes are those of the plans that the operators run by.
TEST(PlanModel, WorkIsThatOfTheOperatorsPlans) {
  const Machine machine = plain_machine();
  std::mt19937 random(20261127);
  const auto pick = [&](std::uint32_t least, std::uint32_t most) {
    return std::uniform_int_distribution<std::uint32_t>(least, most)(random);
  };
  for (int round = 0; round < 60; ++round) {
    const std::uint32_t nodes = pick(1, 3);
    const std::uint32_t locals = pick(1, 4);
    const Shape shape{nodes * locals * 128 * pick(1, 4), 256 * pick(1, 6), 64 * pick(1, 20)};
    const World world{nodes, locals, 0, 0};
    Problem problem = problem_of(Op::kAgGemm, nodes, locals, shape);
    Candidate candidate = candidate_of(problem, machine, 12, nodes > 1 ? 12 : 0);
    const auto ag = AgGemmPlan::make(nodes, locals, shape, problem.dtype, candidate.tiling);
    ASSERT_TRUE(ag) << ag.error().message;
    const Work rows = work_of(problem, candidate);
    EXPECT_DOUBLE_EQ(rows.tiles * 128 * 256 * rows.steps * 64 * 2, ag->work(world, shape.m).flops);
    EXPECT_NEAR(rows.network_bytes, ag->work(world, shape.m).network_bytes,
                0.001 * rows.network_bytes + 64.0 * nodes * 8);

    problem.op = Op::kGemmRs;
    const auto rs = GemmRsPlan::make(nodes, locals, shape, problem.dtype, candidate.tiling);
    ASSERT_TRUE(rs) << rs.error().message;
    const Work scattered = work_of(problem, candidate);
    EXPECT_DOUBLE_EQ(scattered.tiles * 128 * 256 * scattered.steps * 64 * 2,
                     rs->work(world, shape.m, shape.k).flops);
    EXPECT_NEAR(scattered.network_bytes, rs->work(world, shape.m, shape.k).network_bytes,
                0.001 * scattered.network_bytes + 64.0 * nodes * 8);

    problem.op = Op::kGemmAr;
    const auto ar = GemmArPlan::make(nodes, locals, shape, problem.dtype, candidate.tiling);
    ASSERT_TRUE(ar) << ar.error().message;
    const Work reduced = work_of(problem, candidate);
    // An owner has whole tiles: at most one more than its share.
    EXPECT_NEAR(reduced.network_bytes, ar->work(world, shape.m, shape.k).network_bytes,
                128.0 * 256 * 2 * nodes + 64.0 * nodes * 8);
  }
}

TEST(PlanModel, AGatherByWarpgroupsTakesItsBytesAtTheirRate) {
  Machine machine = plain_machine();
  machine.many_parts_share = machine.chunk_flag_us = machine.last_part_share = 0;
  machine.crowding = 0;
  const Problem problem = problem_of(Op::kAgGemm, 1, 4, {8192, 256, 8192});
  const Candidate candidate = candidate_of(problem, machine, 12);
  const Timeline time = predict(problem, machine, candidate);
  const double bytes = 8192.0 / 4 * 8192 * 2 * 3;
  EXPECT_NEAR(time.local,
              bytes / 1e3 / saturated_gb_s(machine, 12, machine.copy_gb_s, machine.rows_link_gb_s),
              1e-6);
  EXPECT_EQ(time.network, 0);
  EXPECT_EQ(time.passed, 0);
  EXPECT_GE(time.total, time.local);
}

TEST(PlanModel, EnginesCostNoSmAndEachCopy) {
  Machine machine = plain_machine();
  const Problem problem = problem_of(Op::kAgGemm, 1, 4, {8192, 256, 8192});
  Candidate candidate = candidate_of(problem, machine, 12);
  candidate.engines = true;
  candidate.tiling.local_banks = 1;
  const double before = predict(problem, machine, candidate).local;
  machine.engine_copy_us += 10;
  EXPECT_NEAR(predict(problem, machine, candidate).local, before + 30, 1e-9);
  EXPECT_NEAR(before - 3 * (machine.engine_copy_us - 10),
              8192.0 / 4 * 8192 * 2 * 3 / 1e3 / machine.engine_gb_s, 1e-6);
}

// GEMM+ReduceScatter: the sums that 0 warpgroups' rates leave come at the end, at memory's rate.
TEST(PlanModel, SumsThatNobodyDoesBesideTheProductComeAtItsEnd) {
  Machine machine = plain_machine();
  machine.sum_gb_s = 0;
  const Problem problem = problem_of(Op::kGemmRs, 1, 4, {8192, 8192, 8192});
  const Candidate candidate = candidate_of(problem, machine, 12);
  const Timeline none = predict(problem, machine, candidate);
  EXPECT_NEAR(none.sums, 8192.0 * 8192 * 2 * 1.25 / 1e3 / machine.hbm_gb_s, 1e-6);
  machine.sum_gb_s = 1e6;
  const Timeline all = predict(problem, machine, candidate);
  EXPECT_EQ(all.sums, 0);
  EXPECT_NEAR(none.total - all.total, none.sums, 1e-6);
}

// Over nodes the rail waits for sums: none are ready when the product ends, so it begins then.
TEST(PlanModel, TheRailWaitsForSums) {
  Machine machine = plain_machine();
  machine.sum_sent_gb_s = 0;
  const Problem problem = problem_of(Op::kGemmRs, 2, 4, {16384, 16384, 2048});
  const Candidate candidate = candidate_of(problem, machine, 24, 6);
  const Timeline late = predict(problem, machine, candidate);
  EXPECT_NEAR(late.wait, late.network, 1e-6);
  EXPECT_GE(late.total, late.compute + late.network);
  machine.sum_sent_gb_s = 1e6;
  const Timeline early = predict(problem, machine, candidate);
  EXPECT_EQ(early.wait, 0);
  EXPECT_LT(early.total, late.total);
}

// A shard is in place: nothing is copied for the network.
TEST(PlanModel, RowsInPlaceSaveTheirCopy) {
  const Machine machine = shipped_machine("H100").value();
  Problem problem = problem_of(Op::kAgGemm, 2, 2, {4096, 512, 4096});
  const Candidate candidate = candidate_of(problem, machine, 48, 48);
  const double copied = predict(problem, machine, candidate).network;
  problem.in_place = true;
  EXPECT_LT(predict(problem, machine, candidate).network, copied);
}

TEST(PlanModel, UnfusedIsOnePhaseAfterTheOther) {
  const Machine machine = shipped_machine("H100").value();
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    const Problem problem = problem_of(op, 2, 4, {8192, 8192, 4096});
    Candidate candidate = candidate_of(problem, machine, 24, 24);
    candidate.form = Mode::kUnfused;
    const Timeline time = predict(problem, machine, candidate);
    EXPECT_NEAR(time.total, time.launch + time.compute + time.local + time.network + time.sums,
                1e-6);
  }
}

// A CPU's times are those of the plan's own account of the work.
TEST(PlanModel, ACpusTimesAreThoseOfTheAccount) {
  const Machine machine = shipped_machine("CPU").value();
  const Problem problem = problem_of(Op::kGemmAr, 2, 2, {2048, 2048, 1024});
  Candidate candidate;
  candidate.compute_blocks = 1;
  const LaunchWork work =
      GemmArPlan::make(2, 2, problem.shape, problem.dtype, {})->work({2, 2, 0, 0}, 2048, 1024);
  const double share = std::min(1.0, machine.sms / 2.0);
  const bool in_turns = 2 * 2 > machine.sms;
  MachineRates rates;
  rates.flops_per_s = machine.cpu_gflops * share * 1e9;
  rates.local_bytes_per_s = machine.cpu_memory_gb_s * share * 1e9;
  rates.network_bytes_per_s =
      (in_turns ? machine.cpu_network_in_turns_gb_s : machine.network_gb_s) * 1e9;
  rates.command_ns = machine.cpu_command_us * 1e3;
  rates.step_ns = (in_turns ? machine.cpu_step_in_turns_us : machine.cpu_step_us) * 1e3;
  const Estimate both = expected(work, rates);
  EXPECT_NEAR(predict(problem, machine, candidate).total, static_cast<double>(both.fused_ns) / 1e3,
              0.01);
  candidate.form = Mode::kUnfused;
  EXPECT_NEAR(predict(problem, machine, candidate).total,
              static_cast<double>(both.unfused_ns) / 1e3, 0.01);
}

// More of anything takes no less: rows, columns, K, and a slower part of the machine.
TEST(PlanModel, MoreWorkAndSlowerPartsTakeNoLess) {
  const Machine machine = shipped_machine("H100").value();
  std::mt19937 random(42);
  const auto pick = [&](std::uint32_t least, std::uint32_t most) {
    return std::uniform_int_distribution<std::uint32_t>(least, most)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const Op op = static_cast<Op>(pick(0, 2));
    const std::uint32_t nodes = pick(1, 2);
    const Shape shape{pick(64, 16384), 8 * pick(16, 1024), 64 * pick(4, 128)};
    const Problem problem = problem_of(op, nodes, 4, shape);
    const Candidate candidate =
        candidate_of(problem, machine, 12 * pick(1, 8), nodes > 1 ? 12 * pick(1, 4) : 0);
    const double time = predict(problem, machine, candidate).total;
    ASSERT_TRUE(std::isfinite(time));
    ASSERT_GT(time, 0);
    Problem deeper = problem;
    deeper.shape.k *= 2;
    EXPECT_GE(predict(deeper, machine, candidate).total, time * (1 - 1e-9)) << round;
    Machine slower = machine;
    slower.network_gb_s /= 2;
    EXPECT_GE(predict(problem, slower, candidate).total, time * (1 - 1e-9)) << round;
    slower = machine;
    slower.step_us_256 *= 2;
    slower.step_us_128 *= 2;
    EXPECT_GE(predict(problem, slower, candidate).total, time * (1 - 1e-9)) << round;
  }
}

}  // namespace
}  // namespace mk::kernels::plan
