// The sums of reports, and the outputs that a launch writes to.

#include "tests/bench/mkbench/figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "kernels/ops/registry.h"
#include "tests/bench/mkbench/inputs.h"
#include "tests/bench/mkbench/machine.h"
#include "tests/bench/mkbench/operator_case.h"
#include "tests/bench/mkbench/output.h"

namespace mk::bench {
namespace {

LaunchReport report(bool fused, std::uint64_t total_ns, std::uint64_t compute_ns = 0) {
  LaunchReport report;
  report.fused = fused;
  report.total_ns = total_ns;
  report.compute_ns = compute_ns;
  report.verified = true;
  report.compared = 10;
  return report;
}

TEST(Figures, ALaunchTakesAsLongAsItsSlowestRankAndOnlyTimedOnesCount) {
  Reports reports = {{report(true, 1'000'000), report(true, 3'000'000)},
                     {report(false, 9'000'000), report(false, 7'000'000)},
                     {report(true, 5'000'000), report(true, 2'000'000)},
                     {report(true, 99'000'000), report(true, 99'000'000)}};
  for (LaunchReport& rank : reports.back()) rank.timed = false;
  const ModeFigures fused = figures_of(reports, true);
  EXPECT_EQ((std::vector<double>{3.0, 5.0}), fused.samples_ms);
  EXPECT_EQ(4.0, fused.total_ms.median);
  EXPECT_EQ(9.0, figures_of(reports, false).total_ms.median);
}

TEST(Verification, WantsWhatWasComparedToBeRight) {
  Reports reports = {{report(true, 1), report(true, 1)}};
  Verification right = verification_of(reports, true, true);
  EXPECT_TRUE(right.passed());
  EXPECT_EQ(20u, right.elements_compared);
  EXPECT_EQ(1u, right.launches_checked);
  reports[0][1].wrong = 1;
  EXPECT_FALSE(verification_of(reports, true, true).passed());
}

TEST(Verification, WantsEqualRanksOnlyWhereTheyMustBe) {
  Reports reports = {{report(true, 1), report(true, 1)}};
  reports[0][1].output_hash = 1;
  EXPECT_FALSE(verification_of(reports, true, true).passed());
  EXPECT_EQ(1u, verification_of(reports, true, true).launches_with_differing_ranks);
  EXPECT_TRUE(verification_of(reports, false, true).passed());
}

TEST(Verification, ALaunchCountsAsCheckedWhenAllItsRanksChecked) {
  Reports reports = {{report(true, 1), report(true, 1)}};
  reports[0][1].verified = false;
  EXPECT_EQ(0u, verification_of(reports, false, true).launches_checked);
  // Ranks that each checked another launch have checked none.
  EXPECT_FALSE(verification_of(reports, false, true).passed());
  EXPECT_FALSE(verification_of({}, false, true).passed());
  EXPECT_TRUE(verification_of(reports, false, false).passed());
  // Checked, but nothing there to compare: not passed.
  reports[0][1].verified = true;
  for (LaunchReport& rank : reports[0]) rank.compared = 0;
  EXPECT_FALSE(verification_of(reports, false, true).passed());
}

// GEMM+ReduceScatter of 1000 x 1024 elements over two nodes of two: each rank sends a quarter of
// its node's sums, and a link carries what the rails' ranks send.
TEST(Bound, IsTheLargestOfThePlannersLegs) {
  BenchSpec spec;
  spec.op = "gemm-rs";
  const auto made = make_case(spec.op);
  auto shape = made->options();
  shape["m"] = 1000;
  shape["n"] = 1024;
  made->set_options(shape);
  const auto problems = made->problems(spec);
  const auto machine = planned_machine("cpu");
  WorkFigures work;
  work.per_rank = {0, 4e6, 4e6};
  const Reports reports = {{report(true, 20'000'000)}, {report(false, 30'000'000, 9'000'000)}};
  const ModeFigures fused = figures_of(reports, true);
  const ModeFigures unfused = figures_of(reports, false);
  const auto bound_at = [&](std::uint32_t rails, const RunRates& rates) {
    return bound_of(spec, rails, problems, machine, work, fused, unfused, rates);
  };
  const double sent_ms = 250 * 1024 * 2 / 50e6 * 1e3;
  auto bound = bound_at(2, {50e6, 1e12});
  ASSERT_TRUE(bound);
  EXPECT_DOUBLE_EQ(9.0, bound->compute_ms);
  EXPECT_NEAR(sent_ms, bound->network_ms, 0.02 * sent_ms);
  EXPECT_EQ("network", bound->limit);
  EXPECT_DOUBLE_EQ(bound->network_ms, bound->ms);
  EXPECT_DOUBLE_EQ(bound->ms / 20, bound->fused_share);
  // Two ranks on one rail: twice as long.
  EXPECT_DOUBLE_EQ(2 * bound->network_ms, bound_at(1, {50e6, 1e12})->network_ms);
  // Over several links at once: that much less.
  work.per_rank.network_bytes = 12e6;
  EXPECT_DOUBLE_EQ(bound->network_ms / 3, bound_at(2, {50e6, 1e12})->network_ms);
  EXPECT_EQ("compute", bound_at(2, {50e9, 1e12})->limit);
  EXPECT_EQ("local", bound_at(2, {50e9, 1e7})->limit);
  EXPECT_FALSE(bound_at(2, {0, 1e12})) << "a link of unknown rate";
  spec.sizes = "vary";
  EXPECT_FALSE(bound_at(2, {50e6, 1e12})) << "launches of several sizes";
}

// Every operator has a bound on both executors; only what runs over several nodes has a network.
TEST(Bound, EveryOperatorHasOneOnBothExecutors) {
  const Reports reports = {{report(true, 20'000'000)}, {report(false, 30'000'000, 0)}};
  const ModeFigures fused = figures_of(reports, true);
  const ModeFigures unfused = figures_of(reports, false);
  for (const char* executor : {"cpu", "cuda"}) {
    for (const std::string& name : case_names()) {
      for (const std::uint32_t nodes : {1u, 2u}) {
        BenchSpec spec;
        spec.op = name;
        spec.nodes = nodes;
        spec.executor = executor;
        const auto bound = bound_of(spec, 2, make_case(name)->problems(spec),
                                    planned_machine(executor), {}, fused, unfused, {1e9, 0});
        ASSERT_TRUE(bound) << name << " on " << executor;
        // A collective moves and adds rows: on a GPU that is memory's.
        const bool rows_alone = name == "all-gather" || name == "reduce-scatter";
        EXPECT_EQ(bound->compute_ms > 0, !rows_alone || spec.executor == "cpu") << name;
        EXPECT_GT(bound->local_ms, 0) << name;
        EXPECT_EQ(bound->network_ms > 0, nodes > 1) << name;
      }
    }
  }
}

TEST(Extents, GoThroughTheEdges) {
  BenchSpec spec;
  EXPECT_EQ(100u, extent_of(spec, 3, 4, 100));
  spec.sizes = "vary";
  for (spec.seed = 0; spec.seed < 50; ++spec.seed) {
    std::set<std::uint64_t> seen;
    for (std::uint32_t launch = 0; launch < 20; ++launch) {
      const std::uint64_t extent = extent_of(spec, launch, 4, 100);
      EXPECT_LE(4u, extent);
      EXPECT_GE(100u, extent);
      seen.insert(extent);
      EXPECT_EQ(7u, extent_of(spec, launch, 7, 7));
    }
    for (const std::uint64_t edge : {4u, 5u, 99u, 100u}) EXPECT_TRUE(seen.contains(edge)) << edge;
    EXPECT_LT(6u, seen.size());
  }
}

TEST(Work, OfARingIsAllButWhatTheNextNodeHadFirst) {
  BenchSpec spec;
  spec.nodes = 3;
  spec.local = 2;
  const auto bytes_of = [](std::uint32_t rank) { return static_cast<double>(1 << rank); };
  // Rank 3 is rail 1 of node 1: of ranks 1, 3 and 5 it hands on all but 5's.
  EXPECT_EQ(2.0 + 8.0, ring_work(spec, 3, bytes_of).network_bytes);
  // The last node hands on to the first.
  EXPECT_EQ(4.0 + 16.0, ring_work(spec, 4, bytes_of).network_bytes);
  spec.nodes = 1;
  EXPECT_EQ(0.0, ring_work(spec, 1, bytes_of).network_bytes);
}

TEST(OutputMemory, ShowsWritesBeyondItsEnds) {
  for (const int at : {-1, 3}) {
    Output output;
    output.resize(6);
    output.poison();
    EXPECT_TRUE(output.guards_intact());
    EXPECT_EQ(0xffff, output.as<std::uint16_t>()[2]);
    for (std::byte& byte : output.contents()) byte = std::byte{0};
    EXPECT_TRUE(output.guards_intact());
    output.as<std::uint16_t>()[at] = 0;
    EXPECT_FALSE(output.guards_intact());
  }
}

TEST(Figures, LinksOfRunningDaemonsCountFromTheBeginOfTheRun) {
  const auto before = nlohmann::json::parse(
      R"({"links": [{"rail": 0, "peer": 1, "bytes": 1000, "messages": "10", "errors": 2}]})");
  const auto after = nlohmann::json::parse(
      R"({"links": [{"rail": 0, "peer": 1, "bytes": 1500, "messages": "14", "errors": 2},
                    {"rail": 1, "peer": 1, "bytes": 70, "messages": 7, "errors": 0}]})");
  const auto links = links_since(before, after)["links"];
  EXPECT_EQ(500, links[0]["bytes"]);
  EXPECT_EQ(4, links[0]["messages"]);
  EXPECT_EQ(0, links[0]["errors"]);
  EXPECT_EQ(70, links[1]["bytes"]);
  EXPECT_EQ(after, links_since(nlohmann::json::object(), after)) << "none before";
  EXPECT_EQ(before, links_since(after, before)) << "started again meanwhile";
}

TEST(Figures, EstimatesThatAreFarOffAreDoubted) {
  ModeFigures fused, unfused, none;
  fused.total_ms.count = unfused.total_ms.count = 3;
  fused.total_ms.median = 1768;
  unfused.total_ms.median = 40;
  const Estimates estimates{35, 40};
  EXPECT_THAT(doubt_of(estimates, fused, unfused), testing::HasSubstr("measured is 51x that"));
  EXPECT_EQ("", doubt_of(estimates, none, unfused));
  unfused.total_ms.median = 10;
  EXPECT_THAT(doubt_of(estimates, none, unfused), testing::HasSubstr("measured is 0.25x that"));
}

TEST(Cases, EachHasItsNameAndTakesItsOwnOptionsBack) {
  // Every operator, and the layer of two.
  std::vector<std::string> names;
#define MK_NAME(id, name, Class) names.emplace_back(name);
  MK_OPERATORS(MK_NAME)
#undef MK_NAME
  names.emplace_back("moe-layer");
  EXPECT_EQ(names, case_names());
  for (const std::string& name : case_names()) {
    BenchSpec spec;
    spec.op = name;
    spec.operation = make_case(name)->options();
    const auto again = case_of(spec);
    ASSERT_TRUE(again);
    EXPECT_EQ(name, (*again)->name());
    EXPECT_EQ(spec.operation, (*again)->options());
    (*again)->make_large();
    EXPECT_NE(spec.operation, (*again)->options());
  }
  EXPECT_EQ(nullptr, make_case("gemm"));
}

}  // namespace
}  // namespace mk::bench
