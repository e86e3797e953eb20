// libmkclient against real engines in this process: every rank is a thread, every node an embedded
// daemon.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <tuple>

#include "mkernel/mkernel.h"
#include "mkernel/mkernel_c.h"
#include "shm/limits.h"
#include "tests/client/gemm_arguments.h"

namespace mk {
namespace {

using namespace std::chrono_literals;
using Elements = std::vector<std::uint16_t>;

class GemmAllReduceWorld : public testing::TestWithParam<EmbeddedWorld> {};

TEST_P(GemmAllReduceWorld, GivesTheSumOfAllRanksOnAllRanks) {
  expect_sums_over_ranks<GemmAllReduce>(GetParam(),
                                        [](std::uint64_t m, std::uint32_t, std::uint32_t) {
                                          return RowRange{0, m};
                                        });
}

INSTANTIATE_TEST_SUITE_P(Worlds, GemmAllReduceWorld, testing::ValuesIn(kEmbeddedWorlds),
                         name_of_world);

TEST(Session, ExchangeGathersByRankAndBarriersPass) {
  const auto cluster = cluster_of(2);
  for_ranks(4, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "exchange"));
    ASSERT_TRUE(session) << session.error().message;
    for (int round = 0; round < 5; ++round) {
      const std::vector<std::byte> mine(rank * 10, static_cast<std::byte>(rank + round));
      const auto all = session->exchange("round", mine);
      ASSERT_TRUE(all) << all.error().message;
      ASSERT_EQ(4u, all->size());
      for (std::uint32_t other = 0; other < 4; ++other) {
        EXPECT_EQ(std::vector<std::byte>(other * 10, static_cast<std::byte>(other + round)),
                  (*all)[other]);
      }
      EXPECT_TRUE(session->barrier());
    }
  });
}

TEST(Session, AnExchangeTakesWhatOneMessageHoldsAndNoMore) {
  // Ranks of a job are at most what its daemons hold; the rule is the same for any number.
  EXPECT_EQ(64u * 1024, shm::exchange_blob_bytes_max(63));
  EXPECT_EQ((4u * 1024 * 1024 - 4) / 64 - 4, shm::exchange_blob_bytes_max(64));
  const auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 1, rank, "full"));
    ASSERT_TRUE(session) << session.error().message;
    const std::vector<std::byte> most(64 * 1024, std::byte{7});
    const auto all = session->exchange("most", most);
    ASSERT_TRUE(all) << all.error().message;
    for (const auto& part : *all) EXPECT_EQ(most, part);
    const std::vector<std::byte> more(64 * 1024 + 1);
    EXPECT_EQ(ErrorCode::kInvalidArgument, session->exchange("more", more).error().code);
    EXPECT_TRUE(session->barrier());
  });
}

TEST(Session, ANameThatFitsNoWireHarmsNobody) {
  const auto cluster = cluster_of(2);
  for_ranks(4, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "names"));
    ASSERT_TRUE(session) << session.error().message;
    for (const std::string& name : {std::string(300, 'x'), std::string("caf\xe9")}) {
      EXPECT_EQ(ErrorCode::kInvalidArgument, session->alloc_buffer(64, name).error().code);
      EXPECT_EQ(ErrorCode::kInvalidArgument, session->exchange(name, {}).error().code);
    }
    const auto buffer = session->alloc_buffer(64, std::string(256, 'x'));
    EXPECT_TRUE(buffer) << buffer.error().message;
    EXPECT_TRUE(session->barrier());
  });
}

TEST(GemmAllReduceWaits, TheLongestTimeoutWorks) {
  const auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 1, rank, "patient"));
    ASSERT_TRUE(session) << session.error().message;
    GemmAllReduce::Tuning tuning;
    tuning.wait_timeout = std::chrono::milliseconds::max();
    auto op = GemmAllReduce::create(*session, {16, 16, 16, DataType::kBf16}, tuning);
    ASSERT_TRUE(op) << op.error().message;
    const Elements ones(256, 0x3f80);
    // Rank 1 lets rank 0 wait, longer than any wait spins.
    if (rank == 1) std::this_thread::sleep_for(200ms);
    Elements c(256);
    const auto stats = op->launch(ones.data(), ones.data(), c.data(), 16, LaunchMode::kFused);
    ASSERT_TRUE(stats) << stats.error().message;
    for (const std::uint16_t element : c) EXPECT_EQ(0x4200, element);  // 32.0
    tuning.wait_timeout = 0ms;
    EXPECT_EQ(ErrorCode::kInvalidArgument,
              GemmAllReduce::create(*session, {16, 16, 16}, tuning).error().code);
    EXPECT_TRUE(session->barrier());
  });
}

TEST(Session, MissingRanksAreListedAfterTheTimeout) {
  const auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    AttachOptions options = place(*cluster, 2, rank * 2, "incomplete");  // ranks 0 and 2 of four
    options.timeout = 500ms;
    const auto session = Session::attach(options);
    ASSERT_FALSE(session);
    EXPECT_EQ(ErrorCode::kTimeout, session.error().code);
    const std::string own_missing = rank == 0 ? "1" : "3";
    EXPECT_NE(std::string::npos, session.error().message.find(own_missing))
        << session.error().message;
  });
}

TEST(Session, ADuplicateRankIsRefused) {
  const auto cluster = cluster_of(1);
  auto first = Session::attach(place(*cluster, 1, 0, "twice"));
  ASSERT_TRUE(first);
  const auto second = Session::attach(place(*cluster, 1, 0, "twice"));
  ASSERT_FALSE(second);
  EXPECT_EQ(ErrorCode::kAlreadyExists, second.error().code) << second.error().message;
  EXPECT_TRUE(first->status());
}

TEST(Session, TheSameNameCanBeUsedAgainAfterDetach) {
  const auto cluster = cluster_of(2);
  for (int round = 0; round < 3; ++round) {
    for_ranks(2, [&](std::uint32_t rank) {
      auto session = Session::attach(place(*cluster, 1, rank, "again"));
      ASSERT_TRUE(session) << session.error().message;
      EXPECT_TRUE(session->barrier());
      EXPECT_TRUE(session->detach());
    });
  }
}

TEST(Session, BuffersAreZeroedRegisteredAndFreedOnce) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "buffers"));
  ASSERT_TRUE(session);
  const auto buffer = session->alloc_buffer(100'000, "test");
  ASSERT_TRUE(buffer) << buffer.error().message;
  for (std::uint64_t i = 0; i < buffer->bytes; ++i) ASSERT_EQ(std::byte{0}, buffer->data[i]);
  EXPECT_TRUE(session->free_buffer(*buffer));
  EXPECT_EQ(ErrorCode::kNotFound, session->free_buffer(*buffer).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, session->alloc_buffer(0, "none").error().code);
}

TEST(GemmAllReduceErrors, RanksThatDisagreeAboutTheShapeAreToldSo) {
  const auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 1, rank, "disagree"));
    ASSERT_TRUE(session);
    const auto op =
        GemmAllReduce::create(*session, {64, rank == 0 ? 64u : 72u, 32, DataType::kBf16});
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kShapeMismatch, op.error().code);
    EXPECT_NE(std::string::npos, op.error().message.find("n=64")) << op.error().message;
    EXPECT_NE(std::string::npos, op.error().message.find("n=72")) << op.error().message;
  });
}

TEST(GemmAllReduceErrors, WrongArgumentsChangeNothing) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "arguments"));
  ASSERT_TRUE(session);
  EXPECT_EQ(ErrorCode::kInvalidArgument, GemmAllReduce::create(*session, {0, 8, 8}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, GemmAllReduce::create(*session, {8, 0, 8}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, GemmAllReduce::create(*session, {8, 8, 0}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            GemmAllReduce::create(*session, {8, 8, 8, static_cast<DataType>(9)}).error().code);
  auto op = GemmAllReduce::create(*session, {8, 8, 8});
  ASSERT_TRUE(op) << op.error().message;
  const Elements ones(64, 0x3f80);
  Elements c(64, 0xffff);
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            op->launch(ones.data(), ones.data(), c.data(), 9).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            op->launch(ones.data(), ones.data(), c.data(), 0).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            op->launch(nullptr, ones.data(), c.data(), 8).error().code);
  ASSERT_TRUE(op->launch(ones.data(), ones.data(), c.data(), 8));
  for (const std::uint16_t element : c) EXPECT_EQ(0x4100, element);  // 8.0
}

TEST(GemmAllReduceErrors, ARankThatLeavesEndsTheOthersLaunchWithItsName) {
  const auto cluster = cluster_of(2);
  for_ranks(4, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "leaver"));
    ASSERT_TRUE(session);
    GemmAllReduce::Tuning tuning;
    tuning.wait_timeout = 60s;
    auto op = GemmAllReduce::create(*session, {64, 64, 32, DataType::kBf16}, tuning);
    ASSERT_TRUE(op) << op.error().message;
    ASSERT_TRUE(session->barrier());  // a rank that leaves earlier fails the others' create
    if (rank == 3) {
      EXPECT_TRUE(session->detach());
      return;
    }
    const Elements a(64 * 32, 0x3f80);
    const auto before = std::chrono::steady_clock::now();
    const auto stats = op->launch(a.data(), a.data(), nullptr, 64);
    ASSERT_FALSE(stats);
    EXPECT_EQ(ErrorCode::kPeerLost, stats.error().code) << stats.error().message;
    EXPECT_NE(std::string::npos, stats.error().message.find("rank 3")) << stats.error().message;
    EXPECT_LT(std::chrono::steady_clock::now() - before, 30s)
        << "far below the wait's own deadline";
    EXPECT_FALSE(op->launch(a.data(), a.data(), nullptr, 64));
  });
}

TEST(GemmAllReduceErrors, ADaemonThatStopsEndsTheLaunch) {
  const auto cluster = cluster_of(2);
  std::atomic<int> ready{0};
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 1, rank, "stopped"));
    ASSERT_TRUE(session);
    auto op = GemmAllReduce::create(*session, {64, 64, 32});
    ASSERT_TRUE(op);
    const Elements a(64 * 32, 0x3f80);
    ASSERT_TRUE(op->launch(a.data(), a.data(), nullptr, 64));
    ASSERT_TRUE(session->barrier());
    if (rank == 1) {
      cluster->stop_node(1);
      EXPECT_FALSE(op->launch(a.data(), a.data(), nullptr, 64));
      return;
    }
    const auto stats = op->launch(a.data(), a.data(), nullptr, 64);
    ASSERT_FALSE(stats);
    EXPECT_TRUE(stats.error().code == ErrorCode::kPeerLost ||
                stats.error().code == ErrorCode::kLinkDown ||
                stats.error().code == ErrorCode::kDraining)
        << error_code_name(stats.error().code) << ": " << stats.error().message;
  });
}

}  // namespace
}  // namespace mk
