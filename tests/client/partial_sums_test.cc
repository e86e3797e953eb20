// Partial sums beyond the element type's range, as the public headers say: what becomes of them,
// and that they are counted when asked.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "client/tools/numeric/elements.h"
#include "mkernel/gemm_all_reduce.h"
#include "mkernel/gemm_combine.h"
#include "mkernel/gemm_reduce_scatter.h"
#include "mkernel/mkernel_c.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

constexpr std::uint64_t kM = 5, kN = 16, kK = 2;

struct World {
  std::uint32_t nodes, locals;
  std::uint64_t all_reduce, reduce_scatter;  ///< counted over all ranks, of one element
};
/// Rank 0's partial is 80000 everywhere, rank 1's -80000, all others' 0. Products are added by
/// their owner, here and, where nodes are several, on each; a node's sum is added once more.
constexpr World kWorlds[] = {{1, 1, 0, 0}, {1, 2, 2, 2}, {2, 1, 4, 2}, {2, 2, 4, 3}};

struct Sums {
  std::uint64_t counted = 0;
  std::vector<std::uint16_t> c;  ///< all ranks', one after the other
};

template <class Op>
Sums run(const World& world, DataType type, bool count) {
  const std::uint32_t ranks = world.nodes * world.locals;
  const auto cluster = cluster_of(world.nodes);
  std::atomic<std::uint64_t> counted{0};
  std::vector<std::vector<std::uint16_t>> outputs(ranks);
  for_ranks(ranks, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, world.locals, rank, "partials"));
    ASSERT_TRUE(session) << session.error().message;
    Tuning tuning;
    tuning.count_nonfinite = count;
    auto op = Op::create(*session, {kM, kN, kK, type}, tuning);
    ASSERT_TRUE(op) << op.error().message;
    // In a world of one rank both products are its own.
    const float large = rank < 2 ? 40000 : 0;
    const float other = ranks == 1 ? -large : large;
    std::vector<std::uint16_t> a;
    for (std::uint64_t row = 0; row < kM; ++row) {
      for (const float value : {large, other})
        a.push_back(tools::from_float(type, rank == 1 ? -value : value));
    }
    const std::vector<std::uint16_t> b(kK * kN, tools::from_float(type, 1));
    for (int launch = 0; launch < 2; ++launch) {
      std::vector<std::uint16_t> c(kM * kN, 0);
      const auto stats = op->launch(a.data(), b.data(), c.data(), kM);
      ASSERT_TRUE(stats) << stats.error().message;
      if (launch == 0) continue;  // each launch has a count of its own
      counted += stats->nonfinite_partials;
      const bool all = std::is_same_v<Op, GemmAllReduce>;
      c.resize(all ? c.size() : rows_of_rank(kM, ranks, rank).count * kN);
      outputs[rank] = c;
    }
    EXPECT_TRUE(session->barrier());
  });
  Sums sums{counted, {}};
  for (const auto& output : outputs) sums.c.insert(sums.c.end(), output.begin(), output.end());
  return sums;
}

template <class Op>
void expect_counted(std::uint64_t World::*each) {
  for (const World& world : kWorlds) {
    SCOPED_TRACE(testing::Message() << world.nodes << " x " << world.locals);
    const Sums f16 = run<Op>(world, DataType::kF16, true);
    EXPECT_EQ(world.*each * kM * kN, f16.counted);
    for (const std::uint16_t bits : f16.c) {
      const float value = tools::to_float(DataType::kF16, bits);
      if (world.nodes * world.locals == 1) {
        EXPECT_EQ(0, value);
      } else {
        EXPECT_TRUE(std::isnan(value)) << value;
      }
    }
    EXPECT_EQ(0u, run<Op>(world, DataType::kF16, false).counted) << "nobody asked";
    const Sums bf16 = run<Op>(world, DataType::kBf16, true);
    EXPECT_EQ(0u, bf16.counted);
    for (const std::uint16_t bits : bf16.c) EXPECT_EQ(0, tools::to_float(DataType::kBf16, bits));
  }
}

TEST(PartialSums, OfAnAllReduceBeyondF16AreInfiniteAndCounted) {
  expect_counted<GemmAllReduce>(&World::all_reduce);
}

TEST(PartialSums, OfAReduceScatterBeyondF16AreInfiniteAndCounted) {
  expect_counted<GemmReduceScatter>(&World::reduce_scatter);
}

/// All ranks' of a GEMM+Combine of two experts: each token's rows are 80000 and -80000 everywhere.
Sums run_combine(std::uint32_t nodes, std::uint32_t locals, DataType type, Partials partials,
                 bool count) {
  constexpr std::uint64_t kTokens = 3, kHidden = 16, kFeatures = 8;
  const auto cluster = cluster_of(nodes);
  std::atomic<std::uint64_t> counted{0};
  std::vector<std::vector<std::uint16_t>> outputs(nodes * locals);
  for_ranks(nodes * locals, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "combined"));
    ASSERT_TRUE(session) << session.error().message;
    Tuning tuning;
    tuning.count_nonfinite = count;
    auto dispatch = MoeDispatchGemm::create(*session, {kTokens, 8, kFeatures, 2, 2, 0, type});
    auto combine = GemmCombine::create(
        *session, {kTokens, kHidden, kFeatures, 2, 2, type, BLayout::kKN, partials}, tuning);
    ASSERT_TRUE(dispatch && combine);
    const std::vector<std::int32_t> ids{0, 1, 1, 0, 0, 1};
    const std::vector<float> ones(ids.size(), 1);
    const std::vector<std::uint16_t> tokens(kTokens * 8, 0);
    std::vector<std::uint16_t> up(std::size_t{2} * 8 * kFeatures, 0), down;
    for (std::uint32_t i = 0; i < dispatch->expert_count(); ++i) {
      const float sign = dispatch->first_expert() + i == 0 ? 1 : -1;
      down.insert(down.end(), kFeatures * kHidden, tools::from_float(type, sign));
    }
    for (int launch = 0; launch < 2; ++launch) {
      std::vector<std::uint16_t> y(nodes * locals * kTokens * 2 * kFeatures, 0);
      ASSERT_TRUE(dispatch->launch({tokens.data(), ids.data(), ones.data(), kTokens, up.data()},
                                   {y.data(), y.size() / kFeatures}));
      std::fill(y.begin(), y.end(), tools::from_float(type, 10000));
      std::vector<std::uint16_t> out(kTokens * kHidden, 0);
      const auto stats = combine->launch({y.data(), dispatch->rows(), dispatch->expert_offsets(),
                                          down.data(), ids.data(), kTokens},
                                         out.data());
      ASSERT_TRUE(stats) << stats.error().message;
      if (launch == 0) continue;
      counted += stats->nonfinite_partials;
      outputs[rank] = out;
    }
    EXPECT_TRUE(session->barrier());
  });
  Sums sums{counted, {}};
  for (const auto& output : outputs) sums.c.insert(sums.c.end(), output.begin(), output.end());
  return sums;
}

TEST(PartialSums, OfACombineBeyondF16AreInfiniteAndCounted) {
  struct {
    std::uint32_t nodes, locals;
    std::uint64_t of_each;  ///< of an element of a token: two rows, and another node's sum
  } const worlds[] = {{1, 1, 2}, {1, 2, 2}, {2, 1, 3}};
  for (const auto& [nodes, locals, of_each] : worlds) {
    SCOPED_TRACE(testing::Message() << nodes << " x " << locals);
    const auto run = [&, nodes = nodes, locals = locals](DataType type, Partials partials,
                                                         bool count) {
      return run_combine(nodes, locals, type, partials, count);
    };
    const Sums f16 = run(DataType::kF16, Partials::kElement, true);
    EXPECT_EQ(of_each * f16.c.size(), f16.counted);
    for (const std::uint16_t bits : f16.c) {
      EXPECT_TRUE(std::isnan(tools::to_float(DataType::kF16, bits)));
    }
    EXPECT_EQ(0u, run(DataType::kF16, Partials::kElement, false).counted) << "nobody asked";
    for (const auto& [type, partials] : {std::pair(DataType::kF16, Partials::kF32),
                                         std::pair(DataType::kBf16, Partials::kElement)}) {
      const Sums good = run(type, partials, true);
      EXPECT_EQ(0u, good.counted);
      for (const std::uint16_t bits : good.c) EXPECT_EQ(0, tools::to_float(type, bits));
    }
  }
}

TEST(PartialSums, AreNotCountedOnGpus) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "gpu"));
  ASSERT_TRUE(session) << session.error().message;
  Tuning tuning;
  tuning.count_nonfinite = true;
  tuning.executor = Executor::kCuda;
  const auto op = GemmAllReduce::create(*session, {8, 8, 8}, tuning);
  ASSERT_FALSE(op);
  EXPECT_EQ(ErrorCode::kUnsupported, op.error().code);
  EXPECT_NE(std::string::npos, op.error().message.find("count_nonfinite")) << op.error().message;
}

}  // namespace
}  // namespace mk
