// libmkclient against nodes inside this process, as a user of the embedded mode has it.
#include "client/embedded/embedded.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <mkernel/mkernel.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

namespace mk {
namespace {

using testing::HasSubstr;

AttachOptions rank_options(const EmbeddedCluster& cluster, const std::string& job,
                           std::uint32_t local_size, std::uint32_t rank) {
  auto options = AttachOptions::of_rank(job, rank, cluster.nodes(), local_size);
  options.socket = cluster.socket_path(options.node_rank);
  return options;
}

/// Runs `body` on every rank, each a thread.
template <class Body>
void on_all_ranks(const EmbeddedCluster& cluster, std::uint32_t local_size, Body body) {
  std::vector<std::thread> ranks;
  for (std::uint32_t rank = 0; rank < cluster.nodes() * local_size; ++rank) {
    ranks.emplace_back([&, rank] {
      auto session = Session::attach(rank_options(cluster, "job", local_size, rank));
      ASSERT_TRUE(session) << session.error().message;
      body(*session, rank);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(Embedded, RanksOfAllNodesMeet) {
  for (const std::string& fabric : {std::string("loopback"), std::string("ofi")}) {
    SCOPED_TRACE(fabric);
    auto cluster = EmbeddedCluster::start({.nodes = 2, .rails = 2, .fabric = fabric});
    ASSERT_TRUE(cluster) << cluster.error().message;
    EXPECT_THAT((*cluster)->fabric(), HasSubstr(fabric));
    on_all_ranks(**cluster, 2, [&](Session& session, std::uint32_t rank) {
      EXPECT_EQ(session.fabric(), (*cluster)->fabric());
      const auto text = fmt::format("rank {}", rank);
      const auto all = session.exchange("names", std::as_bytes(std::span(text)));
      ASSERT_TRUE(all) << all.error().message;
      ASSERT_EQ(all->size(), 4u);
      for (std::uint32_t other = 0; other < 4; ++other) {
        const auto expected = fmt::format("rank {}", other);
        ASSERT_EQ((*all)[other].size(), expected.size());
        EXPECT_EQ(std::memcmp((*all)[other].data(), expected.data(), expected.size()), 0);
      }
      EXPECT_TRUE(session.detach());
    });
  }
}

TEST(Embedded, SeveralClustersLiveSideBySide) {
  auto one = EmbeddedCluster::start({.nodes = 1});
  auto two = EmbeddedCluster::start({.nodes = 2});
  ASSERT_TRUE(one);
  ASSERT_TRUE(two);
  EXPECT_NE((*one)->socket_path(0), (*two)->socket_path(0));
  on_all_ranks(**one, 1, [](Session& session, std::uint32_t) { EXPECT_TRUE(session.barrier()); });
  on_all_ranks(**two, 1, [](Session& session, std::uint32_t) { EXPECT_TRUE(session.barrier()); });
}

TEST(Embedded, ANodeThatStopsFailsItsJobsAndNamesTheNode) {
  auto cluster = EmbeddedCluster::start({.nodes = 2});
  ASSERT_TRUE(cluster);
  std::thread other([&] {
    auto session = Session::attach(rank_options(**cluster, "job", 1, 1));
    ASSERT_TRUE(session);
    EXPECT_TRUE(session->barrier());
    const auto never = session->exchange("never", {});
    ASSERT_FALSE(never);
    EXPECT_EQ(never.error().code, ErrorCode::kPeerLost);
    EXPECT_THAT(never.error().message, HasSubstr("node 0"));
  });
  auto session = Session::attach(rank_options(**cluster, "job", 1, 0));
  ASSERT_TRUE(session);
  EXPECT_TRUE(session->barrier());
  (*cluster)->stop_node(0);
  other.join();
  EXPECT_FALSE(session->status());
}

TEST(Embedded, WhatCannotBeStarted) {
  const auto code = [](const EmbeddedOptions& options) {
    const auto cluster = EmbeddedCluster::start(options);
    return cluster ? ErrorCode::kOk : cluster.error().code;
  };
  EXPECT_EQ(code({.nodes = 0}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.nodes = 1025}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.rails = 0}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.rails = 17}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.link_bytes_per_second = -1}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.link_latency = std::chrono::nanoseconds(-1)}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({.spin = std::chrono::nanoseconds(-1)}), ErrorCode::kInvalidArgument);
  EXPECT_NE(code({.fabric = "pigeons"}), ErrorCode::kOk);
}

TEST(Embedded, ASessionMayOutliveItsCluster) {
  auto cluster = EmbeddedCluster::start({});
  ASSERT_TRUE(cluster);
  auto session = Session::attach(rank_options(**cluster, "job", 1, 0));
  ASSERT_TRUE(session) << session.error().message;
  cluster->reset();
  EXPECT_FALSE(session->barrier());
}

TEST(Embedded, AForkedChildThatDestroysItStopsNothing) {
  auto cluster = EmbeddedCluster::start({});
  ASSERT_TRUE(cluster) << cluster.error().message;
  auto session = Session::attach(rank_options(**cluster, "parent", 1, 0));
  ASSERT_TRUE(session) << session.error().message;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(100);
    {
      const auto mine = std::move(*cluster);
      const auto own = std::move(*session);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(child, ::waitpid(child, &status, 0));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(session->barrier());
  EXPECT_TRUE(session->detach());
}

}  // namespace
}  // namespace mk
