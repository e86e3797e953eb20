// An adaptive partition of Ring Attention, MoE Dispatch+GEMM and GEMM+Combine on GPUs
// (CudaOptions::adaptive). Whatever it begins with and wherever it moves, results are right and
// have the same bits. Its gains are partition_bench's.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/combine_ranks.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/graphs.h"
#include "tests/gpu/moe_ranks.h"
#include "tests/gpu/products.h"
#include "tests/gpu/ring_ranks.h"

namespace mk::test {
namespace {

using kernels::CudaOptions;
using kernels::Mode;
using kernels::testing::draw_routing;
using kernels::testing::Skew;
using namespace std::chrono_literals;

/// See ring_fixture.h.
[[maybe_unused]] const int kConnections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

/// Enough for a search to end, and some more.
constexpr int kLaunches = 100;

struct Place {
  std::uint32_t nodes, locals;
  int devices;
};
constexpr Place kPlaces[] = {{1, 2, 1}, {2, 1, 1}, {2, 2, 1}, {1, 2, 2}};

/// `size`: of sizes 0 to 3, 0 the largest.
struct Ring {
  using Setup = RingSetup;
  using Ranks = RingRanks;
  static Setup setup() {
    Setup setup;
    setup.shape = {1400, 6, 3, 128, true};
    return setup;
  }
  static void fill(Ranks& ranks, std::uint64_t seed, std::uint32_t size) {
    RingInputs inputs;
    inputs.seed = seed;
    ranks.fill(1400 - 300 * size, inputs);
  }
  static void poison(Ranks& ranks, std::uint64_t seed) { fill(ranks, seed, 0); }
  static std::string judge(Ranks& ranks) {
    const AttentionVerdict verdict = ranks.judge();
    return verdict.right() ? "" : "O or LSE is wrong";
  }
  static std::vector<std::uint16_t> results(Ranks& ranks) {
    ranks.collect();
    std::vector<std::uint16_t> all(static_cast<std::size_t>(ranks.output_elements()));
    require(cudaMemcpy(all.data(), ranks.outputs(), all.size() * 2, cudaMemcpyDefault), "results");
    return all;
  }
};

/// The routing of all ranks that goes with a seed.
JobRouting routing_of(std::uint32_t ranks, std::uint32_t experts, std::uint32_t top_k,
                      std::uint32_t tokens, std::uint64_t seed, std::uint32_t size) {
  std::mt19937_64 random(seed);
  return draw_routing(ranks, experts, top_k, tokens - tokens / 4 * size,
                      size == 2 ? Skew::kOneRank : Skew::kUniform, size == 3, random);
}
template <class Ranks>
std::string judge_each(Ranks& ranks, bool behind) {
  for (std::uint32_t r = 0; r < ranks.world(); ++r) {
    if (std::string wrong = ranks.judge(r, 0, behind); !wrong.empty()) return wrong;
  }
  return {};
}
template <class Ranks>
std::vector<std::uint16_t> results_of_each(Ranks& ranks) {
  std::vector<std::uint16_t> all;
  for (std::uint32_t r = 0; r < ranks.world(); ++r) {
    const std::vector<std::uint16_t> one = ranks.output(r);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

struct Moe {
  using Setup = MoeSetup;
  using Ranks = MoeRanks;
  static Setup setup() {
    Setup setup;
    setup.shape = {600, 512, 264, 16, 4, 0, kernels::MoeEpilogue::kGatedSilu};
    return setup;
  }
  static void fill(Ranks& ranks, std::uint64_t seed, std::uint32_t size) {
    const kernels::MoeDispatchShape& shape = ranks.plan().shape;
    ranks.fill(routing_of(ranks.world(), shape.experts, shape.top_k, shape.tokens_max, seed, size),
               seed);
  }
  static void poison(Ranks& ranks, std::uint64_t seed) { fill(ranks, seed, 0); }
  static std::string judge(Ranks& ranks) { return judge_each(ranks, false); }
  static std::vector<std::uint16_t> results(Ranks& ranks) { return results_of_each(ranks); }
};

struct Combine {
  using Setup = CombineSetup;
  using Ranks = CombineRanks;
  static Setup setup() {
    Setup setup;
    setup.shape = {500, 520, 256, 16, 4, kernels::CombinePartials::kElement};
    return setup;
  }
  static void fill(Ranks& ranks, std::uint64_t seed, std::uint32_t size) {
    const kernels::CombineShape& shape = ranks.plan().shape;
    ranks.fill(routing_of(ranks.world(), shape.experts, shape.top_k, shape.tokens_max, seed, size),
               seed);
  }
  /// A graph has its inputs' addresses, and fill() would move these.
  static void poison(Ranks& ranks, std::uint64_t /*seed*/) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      ranks.make_current(r);
      ranks.poison_output(r);
    }
  }
  static std::string judge(Ranks& ranks) { return judge_each(ranks, false); }
  static std::vector<std::uint16_t> results(Ranks& ranks) { return results_of_each(ranks); }
};

template <class Op>
class AdaptiveRoles : public testing::Test {
 protected:
  using Ranks = typename Op::Ranks;

  /// `test(setup)`, with each world that there is.
  template <class Test>
  void each_place(Test&& test) {
    for (const Place& place : kPlaces) {
      if (device_count() < place.devices) continue;
      SCOPED_TRACE(testing::Message()
                   << place.nodes << "x" << place.locals << " on " << place.devices);
      typename Op::Setup setup = Op::setup();
      setup.nodes = place.nodes;
      setup.locals = place.locals;
      setup.devices = place.devices;
      setup.options.wait_timeout = 10s;
      test(setup);
      if (this->HasFatalFailure()) return;
    }
  }
  void launch(Ranks& ranks, Mode mode = Mode::kFused) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      ranks.make_current(r);
      const Status launched = ranks.launch(r, mode);
      ASSERT_TRUE(launched) << launched.error().message;
    }
  }
  void finish(Ranks& ranks) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_TRUE(finished) << finished.error().message << "\n" << ranks.op(r).progress();
    }
    ranks.make_current(0);
  }
  void launch_to_end(Ranks& ranks, Mode mode = Mode::kFused) {
    launch(ranks, mode);
    if (!this->HasFatalFailure()) finish(ranks);
  }
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "needs a CUDA device";
  }
};
using Kinds = testing::Types<Ring, Moe, Combine>;
TYPED_TEST_SUITE(AdaptiveRoles, Kinds);

TYPED_TEST(AdaptiveRoles, APartitionAdaptsFromAnyBegin) {
  this->each_place([&](const typename TypeParam::Setup& with) {
    const std::uint64_t seed = fresh_seed();
    std::vector<std::uint16_t> planned;
    {
      typename TypeParam::Ranks ranks(with);
      TypeParam::fill(ranks, seed, 0);
      this->launch_to_end(ranks);
      if (this->HasFatalFailure()) return;
      planned = TypeParam::results(ranks);
    }
    for (const std::uint32_t streams : {0u, 1u, 60u}) {
      SCOPED_TRACE(std::to_string(streams) + " groups");
      typename TypeParam::Setup from = with;
      from.options.adaptive = true;
      from.options.stream_groups = streams;
      typename TypeParam::Ranks ranks(from);
      TypeParam::fill(ranks, seed, 0);
      std::uint32_t moves = 0;
      std::uint32_t least = ~0u;
      std::uint32_t most = 0;
      for (int launch = 0; launch < kLaunches; ++launch) {
        const bool last = launch + 1 == kLaunches;
        if (launch % 8 == 7 || last) TypeParam::poison(ranks, seed);
        this->launch_to_end(ranks, launch % 16 == 14 ? Mode::kUnfused : Mode::kFused);
        if (this->HasFatalFailure()) return;
        const auto stats = ranks.op(0).finish(ranks.stream(0));
        ASSERT_TRUE(stats) << stats.error().message;
        ASSERT_GE(stats->partition.moves, moves);
        moves = stats->partition.moves;
        least = std::min(least, stats->partition.last);
        most = std::max(most, stats->partition.last);
        const auto steps = ranks.op(0).partition_steps();
        ASSERT_EQ(steps.size(), 1u);
        ASSERT_EQ(steps[0].target, stats->partition.last);
        if (launch % 8 == 7 || last) {
          ASSERT_TRUE(TypeParam::results(ranks) == planned) << "launch " << launch;
        }
      }
      // It has at least tried neighbours.
      EXPECT_GE(moves, 2u);
      EXPECT_GE(least, 1u);
      EXPECT_GT(most, least);
      ASSERT_EQ(TypeParam::judge(ranks), "");
    }
  });
}

/// Ranks search by themselves: each has times and numbers of tokens of its own.
TYPED_TEST(AdaptiveRoles, RanksMayDiffer) {
  this->each_place([&](const typename TypeParam::Setup& with) {
    typename TypeParam::Setup from = with;
    from.options.adaptive = true;
    typename TypeParam::Ranks ranks(from);
    for (std::uint32_t turn = 0; turn < 40; ++turn) {
      SCOPED_TRACE("turn " + std::to_string(turn));
      // Others' launches are so late that targets change at other times.
      TypeParam::fill(ranks, fresh_seed(), turn % 4);
      for (std::uint32_t r = 0; r < ranks.world(); ++r) {
        ranks.make_current(r);
        if ((turn + r) % 3 == 0) delay(300'000, ranks.stream(r));
        const Status launched = ranks.launch(r);
        ASSERT_TRUE(launched) << launched.error().message;
      }
      this->finish(ranks);
      if (this->HasFatalFailure()) return;
      ASSERT_EQ(TypeParam::judge(ranks), "");
    }
  });
}

TYPED_TEST(AdaptiveRoles, APartitionAdaptsWithoutAPause) {
  this->each_place([&](const typename TypeParam::Setup& with) {
    typename TypeParam::Setup from = with;
    from.options.adaptive = true;
    typename TypeParam::Ranks ranks(from);
    for (std::uint32_t round = 0; round < 8; ++round) {
      SCOPED_TRACE("round " + std::to_string(round));
      TypeParam::fill(ranks, fresh_seed(), round % 4);
      for (int i = 0; i < 25; ++i) {
        this->launch(ranks);
        if (this->HasFatalFailure()) return;
      }
      this->finish(ranks);
      if (this->HasFatalFailure()) return;
      ASSERT_EQ(TypeParam::judge(ranks), "");
    }
  });
}

/// A captured launch keeps the partition that was the best one when it was captured.
TYPED_TEST(AdaptiveRoles, AnAdaptivePartitionInAGraph) {
  this->each_place([&](const typename TypeParam::Setup& with) {
    typename TypeParam::Setup from = with;
    from.options.adaptive = true;
    typename TypeParam::Ranks ranks(from);
    const std::uint64_t seed = fresh_seed();
    TypeParam::fill(ranks, seed, 0);
    for (int i = 0; i < 20; ++i) {
      this->launch_to_end(ranks);
      if (this->HasFatalFailure()) return;
    }
    ASSERT_EQ(TypeParam::judge(ranks), "");
    const std::vector<std::uint16_t> first = TypeParam::results(ranks);
    Graphs graphs;
    const Status captured =
        graphs.capture_all(ranks, [&](std::uint32_t r) { return ranks.launch(r); });
    ASSERT_TRUE(captured) << captured.error().message;
    for (int replay = 0; replay < 12; ++replay) {
      SCOPED_TRACE("replay " + std::to_string(replay));
      TypeParam::poison(ranks, seed);
      graphs.replay_all(ranks);
      this->finish(ranks);
      if (this->HasFatalFailure()) return;
      ASSERT_TRUE(TypeParam::results(ranks) == first);
      // Launches between replays go on with the search.
      for (int i = 0; i < 6; ++i) {
        this->launch_to_end(ranks);
        if (this->HasFatalFailure()) return;
      }
    }
  });
}

/// With any number of blocks, each span of a traced launch is of a block that there is.
TEST(AdaptiveRing, IsTracedWhateverTheGrid) {
  if (device_count() == 0) GTEST_SKIP() << "needs a CUDA device";
  RingSetup with = Ring::setup();
  with.locals = 2;
  with.devices = std::min(2, device_count());
  with.options.adaptive = true;
  with.options.wait_timeout = 10s;
  RingRanks ranks(with);
  ranks.op(0).set_trace(true);
  Ring::fill(ranks, fresh_seed(), 0);
  for (int launch = 0; launch < 60; ++launch) {
    for (std::uint32_t r = 0; r < 2; ++r) {
      ranks.make_current(r);
      ASSERT_TRUE(ranks.launch(r));
    }
    for (std::uint32_t r = 0; r < 2; ++r) ASSERT_TRUE(ranks.finish(r));
    ranks.make_current(0);
    std::uint32_t arrivals = 0;
    for (const kernels::TraceEvent& event : ranks.op(0).trace()) {
      if (event.role == kernels::Role::kCollect) {
        ASSERT_EQ(event.block, 0u) << "there is one watcher";
        ASSERT_EQ(event.span.kind, kernels::SpanKind::kArrival);
        ++arrivals;
      } else {
        ASSERT_NE(event.span.kind, kernels::SpanKind::kArrival) << "launch " << launch;
      }
    }
    ASSERT_GT(arrivals, 0u) << "launch " << launch;
  }
}

}  // namespace
}  // namespace mk::test
