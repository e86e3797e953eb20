/// \file
/// Groups of a launch's ranks as jobs of their own: places, refusals, and many groups at once.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/client/c_calls.h"

namespace mk {
namespace {

using Ranks = std::vector<std::uint32_t>;

Result<AttachOptions> group_of(std::uint32_t rank, std::uint32_t nodes, std::uint32_t locals,
                               const Ranks& ranks) {
  return AttachOptions::of_group(AttachOptions::of_rank("job", rank, nodes, locals), ranks);
}

// Every subset of every world of up to three nodes of up to three ranks, seen by each of its ranks.
TEST(ProcessGroups, OfAllRanksAreNumberedNodeByNode) {
  std::uint32_t accepted = 0, refused = 0;
  for (std::uint32_t nodes = 1; nodes <= 3; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 3; ++locals) {
      const std::uint32_t world = nodes * locals;
      for (std::uint32_t subset = 1; subset < 1u << world; ++subset) {
        Ranks ranks;
        std::map<std::uint32_t, std::uint32_t> on_node;
        for (std::uint32_t rank = 0; rank < world; ++rank) {
          if ((subset >> rank & 1) == 0) continue;
          ranks.push_back(rank);
          ++on_node[rank / locals];
        }
        std::set<std::uint32_t> sizes;
        for (const auto& [node, count] : on_node) sizes.insert(count);
        std::set<std::string> jobs;
        for (std::uint32_t i = 0; i < ranks.size(); ++i) {
          const auto group = group_of(ranks[i], nodes, locals, ranks);
          ASSERT_EQ(sizes.size() == 1, group.has_value());
          ++(group ? accepted : refused);
          if (!group) {
            EXPECT_NE(std::string::npos, group.error().message.find("every node"));
            continue;
          }
          EXPECT_EQ(i, group->rank);
          EXPECT_EQ(ranks.size(), group->world);
          EXPECT_EQ(on_node.size(), group->nodes);
          EXPECT_EQ(*sizes.begin(), group->local_size);
          const auto before = static_cast<std::uint32_t>(
              std::distance(on_node.begin(), on_node.find(ranks[i] / locals)));
          EXPECT_EQ(before, group->node_rank);
          EXPECT_EQ(group->node_rank * group->local_size + group->local_rank, group->rank);
          jobs.insert(group->job);
        }
        EXPECT_EQ(sizes.size() == 1 ? 1u : 0u, jobs.size());
      }
    }
  }
  EXPECT_GT(accepted, 100u);
  EXPECT_GT(refused, 100u);
}

TEST(ProcessGroups, OfOtherRanksOrNamesAreOtherJobs) {
  const auto whole = AttachOptions::of_rank("job", 0, 2, 4);
  std::set<std::string> jobs;
  for (const char* name : {"tp", "dp"}) {
    for (const Ranks& ranks :
         {Ranks{0}, Ranks{0, 1}, Ranks{0, 1, 2, 3}, Ranks{0, 4}, Ranks{0, 5}}) {
      const auto group = AttachOptions::of_group(whole, ranks, name);
      ASSERT_TRUE(group) << group.error().message;
      EXPECT_TRUE(group->job.starts_with(std::string("job.") + name + ".")) << group->job;
      jobs.insert(group->job);
    }
  }
  EXPECT_EQ(10u, jobs.size());
}

TEST(ProcessGroups, KeepAllButThePlace) {
  auto whole = AttachOptions::of_rank("job", 5, 2, 4);
  whole.socket = "@somewhere";
  whole.job_secret = "secret";
  whole.lanes = 7;
  whole.arrival_flags = 640;
  whole.timeout = std::chrono::milliseconds{77};
  const Ranks ranks{1, 5};
  const auto group = AttachOptions::of_group(whole, ranks);
  ASSERT_TRUE(group);
  EXPECT_EQ("@somewhere", group->socket);
  EXPECT_EQ("secret", group->job_secret);
  EXPECT_EQ(7u, group->lanes);
  EXPECT_EQ(640u, group->arrival_flags);
  EXPECT_EQ(whole.timeout, group->timeout);
}

TEST(ProcessGroups, ThatBreakARuleAreRefusedByWhatBreaksIt) {
  const auto expect = [](const Ranks& ranks, const std::vector<std::string>& words) {
    const auto group = group_of(1, 2, 2, ranks);
    ASSERT_FALSE(group);
    EXPECT_EQ(ErrorCode::kInvalidArgument, group.error().code);
    for (const std::string& word : words)
      EXPECT_NE(std::string::npos, group.error().message.find(word)) << group.error().message;
  };
  expect({}, {"no ranks"});
  expect({0, 2}, {"rank 1 is none"});
  expect({1, 4}, {"rank 4", "0 to 3"});
  expect({1, 1}, {"rank 1 behind rank 1"});
  expect({3, 1}, {"rank 1 behind rank 3", "rising"});
  expect({0, 1, 2}, {"2 ranks on node 0", "1 on node 1"});
  const Ranks self{0};
  auto whole = AttachOptions::of_rank("job", 0, 1, 1);
  EXPECT_FALSE(AttachOptions::of_group(whole, self, "two words"));
  EXPECT_FALSE(AttachOptions::of_group(whole, self, std::string(128, 'x')));
  whole.local_size = 0;
  EXPECT_FALSE(AttachOptions::of_group(whole, self));
}

// Two nodes of four: two groups of the node's ranks, four across the nodes, and all, at once; each
// process is in three of them.
TEST(ProcessGroups, RunSideBySide) {
  const auto cluster = cluster_of(2);
  for_ranks(8, [&](std::uint32_t rank) {
    const AttachOptions whole = place(*cluster, 4, rank, "launch");
    const std::uint32_t node = rank / 4, local = rank % 4;
    const Ranks on_node{node * 4, node * 4 + 1, node * 4 + 2, node * 4 + 3};
    const Ranks across{local, local + 4};
    const Ranks all{0, 1, 2, 3, 4, 5, 6, 7};
    std::vector<Session> sessions;
    std::vector<const Ranks*> groups;
    for (const Ranks* ranks : {&on_node, &across, &all}) {
      const auto options = AttachOptions::of_group(whole, *ranks, "g");
      ASSERT_TRUE(options) << options.error().message;
      auto session = Session::attach(*options);
      ASSERT_TRUE(session) << session.error().message;
      sessions.push_back(std::move(*session));
      groups.push_back(ranks);
    }
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      const auto found = sessions[i].exchange("who", std::as_bytes(std::span(&rank, 1)));
      ASSERT_TRUE(found) << found.error().message;
      Ranks ranks;
      for (const auto& blob : *found) {
        ASSERT_EQ(sizeof(rank), blob.size());
        std::memcpy(&ranks.emplace_back(), blob.data(), sizeof(rank));
      }
      EXPECT_EQ(*groups[i], ranks);
    }
    for (Session& session : sessions) {
      EXPECT_TRUE(session.barrier());
      EXPECT_TRUE(session.detach());
    }
  });
}

TEST(ProcessGroups, AreAttachedThroughTheCAbi) {
  const auto cluster = cluster_of(2);
  for_ranks(4, [&](std::uint32_t rank) {
    const AttachOptions whole = place(*cluster, 2, rank, "launch");
    auto options = sized<mk_attach_options>();
    options.socket = whole.socket.c_str();
    options.job = "launch";
    options.rank = rank;
    options.world = 4;
    options.node_rank = whole.node_rank;
    options.nodes = options.local_size = 2;
    options.local_rank = whole.local_rank;
    const std::uint32_t ranks[] = {rank % 2, rank % 2 + 2};
    mk_session* session = nullptr;
    ASSERT_EQ(0, mk_session_attach_group(&options, 0, ranks, 2, "dp", &session)) << mk_last_error();
    EXPECT_EQ(rank / 2, mk_session_rank(session));
    EXPECT_EQ(2u, mk_session_world(session));
    leave(session);
    if (rank != 0) return;
    expect_refused(mk_session_attach_group(&options, 0, nullptr, 2, "dp", &session),
                   ErrorCode::kInvalidArgument, {"ranks is null"});
    expect_refused(mk_session_attach_group(nullptr, 0, ranks, 2, "dp", &session),
                   ErrorCode::kInvalidArgument, {"mk_attach_options is null"});
    expect_refused(mk_session_attach_group(&options, 0, ranks, 0, nullptr, &session),
                   ErrorCode::kInvalidArgument, {"no ranks"});
    expect_refused(mk_session_attach_group(&options, 0, ranks, ~std::uint64_t{0}, "dp", &session),
                   ErrorCode::kInvalidArgument, {"at most"});
  });
}

}  // namespace
}  // namespace mk
