// Operators and sessions that go as soon as a launch has returned, while other ranks are still amid
// it; and operators that come and go for as long as a session lives.

#include <gtest/gtest.h>

#include <future>

#include "shm/host/memory_room.h"
#include "tests/client/embedded_ranks.h"
#include "tests/client/lifetime_runs.h"

namespace mk {
namespace {

using test::AnyOperator;
using test::Kind;
using test::kKinds;

struct Place {
  Kind kind;
  const char* fabric;
  std::uint32_t locals;
};
std::string name_of_place(const testing::TestParamInfo<Place>& info) {
  return fmt::format("{}_{}_2x{}", test::name_of(info.param.kind), info.param.fabric,
                     info.param.locals);
}
std::vector<Place> places() {
  std::vector<Place> all;
  for (const Kind kind : kKinds) {
    all.push_back({kind, "loopback", 1});
    all.push_back({kind, "ofi", 1});
    all.push_back({kind, "loopback", 2});
  }
  return all;
}

class DestroyedAfterLaunch : public testing::TestWithParam<Place> {};

TEST_P(DestroyedAfterLaunch, EveryRankEndsWell) {
  const auto [kind, fabric, locals] = GetParam();
  const auto cluster = cluster_of(2, fabric);
  ASSERT_NE(nullptr, cluster);
  constexpr std::uint32_t kRounds = 12;
  for (std::uint32_t round = 0; round < kRounds && !HasFailure(); ++round) {
    const std::string job = fmt::format("job{}", round);
    for_ranks(2 * locals, [&, kind = kind, locals = locals](std::uint32_t rank) {
      test::live_once(place(*cluster, locals, rank, job), kind, round,
                      std::chrono::milliseconds(3));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, DestroyedAfterLaunch, testing::ValuesIn(places()),
                         name_of_place);

// A network so slow that the last commands wait for it, far beyond the launch and the detachment.
TEST(DestroyedAfterLaunch, OverASlowNetwork) {
  EmbeddedOptions options;
  options.nodes = 2;
  options.link_bytes_per_second = 1e6;
  options.link_latency = std::chrono::milliseconds(20);
  auto cluster = EmbeddedCluster::start(options);
  ASSERT_TRUE(cluster) << cluster.error().message;
  for (const Kind kind : kKinds) {
    for_ranks(2, [&](std::uint32_t rank) {
      test::live_once(place(**cluster, 1, rank, test::name_of(kind)), kind, 3,
                      std::chrono::milliseconds(3));
    });
  }
}

class OperatorsComeAndGo : public testing::TestWithParam<const char*> {};

TEST_P(OperatorsComeAndGo, WithoutAnEnd) {
  const auto cluster = cluster_of(2, GetParam());
  ASSERT_NE(nullptr, cluster);
  for_ranks(4, [&](std::uint32_t rank) {
    auto options = place(*cluster, 2, rank, "churn");
    options.arrival_flags = 2048;  // few, so that they come back soon
    auto session = Session::attach(options);
    ASSERT_TRUE(session) << session.error().message;
    test::come_and_go(*session, 120);
  });
}

INSTANTIATE_TEST_SUITE_P(Fabrics, OperatorsComeAndGo, testing::Values("loopback", "ofi"));

// A flag may show long after the write that it belongs to: never in the next operator.
TEST(OperatorsComeAndGo, OverANetworkOfMuchLatency) {
  EmbeddedOptions options;
  options.nodes = 2;
  options.link_latency = std::chrono::milliseconds(5);
  auto cluster = EmbeddedCluster::start(options);
  ASSERT_TRUE(cluster) << cluster.error().message;
  for_ranks(2, [&](std::uint32_t rank) {
    auto at = place(**cluster, 1, rank, "latency");
    at.arrival_flags = 2048;
    auto session = Session::attach(at);
    ASSERT_TRUE(session) << session.error().message;
    test::come_and_go(*session, 40);
  });
}

// A rank that keeps its operators holds up nobody's work.
TEST(OperatorsComeAndGo, WhileOneRankKeepsItsOwn) {
  const auto cluster = cluster_of(2);
  ASSERT_NE(nullptr, cluster);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 1, rank, "kept"));
    ASSERT_TRUE(session) << session.error().message;
    std::vector<AnyOperator> kept;
    for (std::uint32_t round = 0; round < 20; ++round) {
      auto op = AnyOperator::create(*session, Kind::kGemmAllReduce, round);
      ASSERT_TRUE(op) << op.error().message;
      const Status launched = op->launch(1 + round % 4);
      ASSERT_TRUE(launched) << launched.error().message;
      if (rank == 1) kept.push_back(std::move(*op));
    }
    EXPECT_TRUE(session->barrier());
  });
}

// What cannot be had is refused before anything is made, and says what it needs and what there is.
TEST(CreationThatCannotFit, IsRefusedAtOnceWithBothNumbers) {
  const auto cluster = cluster_of(1);
  ASSERT_NE(nullptr, cluster);
  const auto room = shm::memory_room();
  ASSERT_TRUE(room);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "large"));
    ASSERT_TRUE(session) << session.error().message;
    std::uint32_t refused = 0;
    const auto check = [&]<class Op>(std::type_identity<Op>, const typename Op::Shape& shape) {
      const auto bytes = Op::workspace_bytes(*session, shape);
      ASSERT_TRUE(bytes) << bytes.error().message;
      if (*bytes <= room->total) return;  // as large as operators get, and yet too small
      ++refused;
      const auto op = Op::create(*session, shape);
      ASSERT_FALSE(op);
      EXPECT_EQ(ErrorCode::kLimitExceeded, op.error().code) << op.error().message;
      for (const std::uint64_t number : {*bytes, 2 * *bytes, room->total}) {
        EXPECT_NE(std::string::npos, op.error().message.find(fmt::format("{} ", number)))
            << op.error().message;
      }
    };
    constexpr std::uint64_t kLarge = 1 << 20;
    check(std::type_identity<GemmReduceScatter>{}, {kLarge, kLarge, 64});
    check(std::type_identity<GemmAllReduce>{}, {kLarge, kLarge, 64});
    EXPECT_EQ(2u, refused);
    check(std::type_identity<AllGatherGemm>{}, {kLarge / 16, 64, kLarge});
    MoeDispatchGemm::Shape moe;
    moe.tokens_max = kLarge / 4;
    moe.hidden = kLarge / 16;
    moe.features = 64;
    moe.experts = 8;
    moe.top_k = 2;
    check(std::type_identity<MoeDispatchGemm>{}, moe);
    GemmCombine::Shape combine;
    combine.tokens_max = kLarge;
    combine.hidden = kLarge / 16;
    combine.features = 64;
    combine.experts = combine.top_k = 8;
    check(std::type_identity<GemmCombine>{}, combine);
    check(std::type_identity<RingAttention>{}, {kLarge * 16, 8, 8, 128, false});
    // The session is as well as before.
    auto op = AnyOperator::create(*session, Kind::kGemmAllReduce);
    ASSERT_TRUE(op) << op.error().message;
    EXPECT_TRUE(op->launch(2));
  });
}

TEST(CreationThatCannotFit, WhatAnOperatorTakesIsWhatItAsksFor) {
  const auto cluster = cluster_of(2);
  ASSERT_NE(nullptr, cluster);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 1, rank, "bytes"));
    ASSERT_TRUE(session) << session.error().message;
    const auto small = GemmAllReduce::workspace_bytes(*session, {64, 64, 64});
    const auto larger = GemmAllReduce::workspace_bytes(*session, {640, 640, 64});
    ASSERT_TRUE(small && larger);
    EXPECT_GE(*small, 64u * 64 * 2);
    EXPECT_GE(*larger, 640u * 640 * 2);
    EXPECT_FALSE(GemmAllReduce::workspace_bytes(*session, {0, 64, 64}));
    mk_session* const by_c = attach_through_c(place(*cluster, 1, rank, "bytes-in-C"));
    ASSERT_NE(nullptr, by_c);
    mk_gemm_shape shape{};
    shape.struct_bytes = sizeof shape;
    shape.m_max = shape.n = shape.k = 64;
    shape.dtype = MK_BF16;
    std::uint64_t bytes = 0;
    EXPECT_EQ(0, mk_op_workspace_bytes(by_c, "gemm-ar", &shape, &bytes)) << mk_last_error();
    EXPECT_EQ(*small, bytes);
    EXPECT_NE(0, mk_op_workspace_bytes(by_c, "gemm-ar", &shape, nullptr));
    EXPECT_NE(0, mk_op_workspace_bytes(nullptr, "gemm-ar", &shape, &bytes));
    EXPECT_EQ(0, mk_session_detach(by_c));
  });
}

// One rank cannot have its part, which the others could have: all of them hear why.
TEST(CreationThatCannotFit, OnOneRankIsEveryRanksErrorAtOnce) {
  const auto cluster = cluster_of(2);
  ASSERT_NE(nullptr, cluster);
  for_ranks(2, [&](std::uint32_t rank) {
    auto options = place(*cluster, 1, rank, "flags");
    if (rank == 1) options.arrival_flags = 64;
    auto session = Session::attach(options);
    ASSERT_TRUE(session) << session.error().message;
    const auto began = std::chrono::steady_clock::now();
    const auto op = GemmAllReduce::create(*session, {640, 640, 64});
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kLimitExceeded, op.error().code) << op.error().message;
    EXPECT_NE(std::string::npos, op.error().message.find("of its 64 are free"))
        << op.error().message;
    EXPECT_LT(std::chrono::steady_clock::now() - began, options.timeout) << "nobody waited it out";
  });
}

// A rank that is late hears at once that another has given up, and harms nobody.
TEST(CreationThatTimesOut, IsNoneOnRanksThatComeLater) {
  const auto cluster = cluster_of(2);
  ASSERT_NE(nullptr, cluster);
  std::promise<void> gave_up;
  for_ranks(2, [&](std::uint32_t rank) {
    auto options = place(*cluster, 1, rank, "late");
    if (rank == 0) options.timeout = std::chrono::seconds(5);  // of the attachment, too
    auto session = Session::attach(options);
    if (rank == 1) gave_up.get_future().wait_for(std::chrono::seconds(60));
    ASSERT_TRUE(session) << session.error().message;
    const auto op = GemmAllReduce::create(*session, {64, 64, 64});
    if (rank == 0) gave_up.set_value();
    ASSERT_FALSE(op);
    EXPECT_EQ(rank == 0 ? ErrorCode::kTimeout : ErrorCode::kAborted, op.error().code);
    EXPECT_NE(std::string::npos, op.error().message.find("missing: rank 1")) << op.error().message;
    EXPECT_EQ(rank != 0, op.error().message.starts_with("rank 0 cannot create gemm-ar: "))
        << op.error().message;
    // Both sessions go on.
    const Status together = session->barrier();
    ASSERT_TRUE(together) << "rank " << rank << ": " << together.error().message;
    auto next = AnyOperator::create(*session, Kind::kGemmAllReduce);
    ASSERT_TRUE(next) << next.error().message;
    EXPECT_TRUE(next->launch(2));
  });
}

}  // namespace
}  // namespace mk
