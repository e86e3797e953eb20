// Operators on a GPU share memory (client/src/shared_workspace.h): how much there is, who moves
// when a larger one comes, and where each then finds its words. The GPU is host memory, and
// launches are what a kernel leaves behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/src/session_impl.h"
#include "client/src/shared_workspace.h"
#include "kernels/comm/workspace_head.h"
#include "kernels/comm/workspace_turn.h"
#include "tests/client/embedded_ranks.h"
#include "tests/shm/gpu/fake_driver.h"

namespace mk {
namespace {

using kernels::RankContext;
using kernels::WorkspaceHead;
using kernels::WorkspaceTurn;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kWords = 8 * kernels::kPage;
/// Allocations come in granules; an operator has one, and its share of words.
constexpr std::uint64_t kLittle = 4 * kMiB;
constexpr std::uint32_t kFlags = 32;

struct Rank {
  Session& session;
  gpu::test::FakeDriver& driver;
  std::uint32_t number;

  /// At most `most` for a rank, once all that was given up is gone. Collective.
  void expect_bytes(std::uint64_t most) const {
    EXPECT_TRUE(session.barrier());
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const std::uint64_t all = most * session.options().world;
    while (driver.allocated_bytes() > all && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_LE(driver.allocated_bytes(), all);
    EXPECT_TRUE(session.barrier());
  }
};

/// An operator whose kernels' side is what it was last told.
class Operator final : public MovingOperator {
 public:
  static std::unique_ptr<Operator> create(Rank& rank, std::uint64_t data, bool own = false,
                                          std::uint64_t words = kWords,
                                          std::uint32_t flags = kFlags) {
    auto made = try_to(rank, data, own, words, flags);
    EXPECT_TRUE(made) << made.error().message;
    return made ? std::make_unique<Operator>(std::move(*made), words) : nullptr;
  }
  /// As make_device_operator() does.
  static Result<OperatorWorkspace> try_to(Rank& rank, std::uint64_t data, bool own = false,
                                          std::uint64_t words = kWords,
                                          std::uint32_t flags = kFlags) {
    Session::Impl& session = *rank.session.impl();
    const std::string tag = session.next_operator_tag("ready");
    auto made =
        OperatorWorkspace::create(session, "fake", fmt::format("data={} words={}", data, words),
                                  {words, data, words}, flags, own, Executor::kCuda);
    MK_RETURN_IF_ERROR(session.agree(tag, "fake", made.map([](const auto&) {})));
    return made;
  }
  Operator(OperatorWorkspace memory, std::uint64_t words)
      : memory_(std::move(memory)),
        words_(words),
        context_(memory_.context()),
        moved_by_(memory_.data_moved()) {
    memory_.let_move(*this);
  }
  ~Operator() override { memory_.let_move_no_more(*this); }

  std::byte* words() const { return context_.workspaces[context_.world.local]; }
  std::byte* data() const { return words() + words_ + moved_by_; }
  const WorkspaceTurn& turn() const { return *context_.shared->turn; }
  const RankContext& context() const { return context_; }
  const OperatorWorkspace& memory() const { return memory_; }
  /// Leaves the traces of a launch that was put on a stream.
  void launch(bool ended = true) {
    ++context_.shared->turn->queued[context_.shared->sharer];
    if (ended) kernels::announce_end(context_, ++ended_);
  }
  void capture() { context_.shared->turn->in_graph[context_.shared->sharer] = true; }
  void fail_launch() const { kernels::announce_failure(context_); }

  bool moves = true;
  bool can_prepare = true;
  int moved = 0;
  int stayed = 0;

 private:
  bool may_move() override { return moves; }
  Status prepare_move(const RankContext& context, std::uint64_t data_moved) override {
    if (!can_prepare) return fail(ErrorCode::kSystem, "no kernels");
    next_ = std::pair(context, data_moved);
    return {};
  }
  void stay() override { ++stayed; }
  void move(SharedMemory&) override {
    ++moved;
    std::tie(context_, moved_by_) = *next_;
    ended_ = 0;
  }

  OperatorWorkspace memory_;
  const std::uint64_t words_;
  RankContext context_;
  std::uint64_t moved_by_;
  std::optional<std::pair<RankContext, std::uint64_t>> next_;
  std::uint32_t ended_ = 0;
};

struct Nodes {
  std::uint32_t nodes, locals;
};
constexpr Nodes kWorlds[] = {{1, 2}, {2, 1}, {2, 2}};

/// Ranks, each a thread, on one GPU. Between the nodes nothing is sent.
void on_ranks(Nodes world, const std::function<void(Rank&)>& body) {
  const auto cluster = cluster_of(world.nodes, "null");
  ASSERT_NE(nullptr, cluster);
  const auto driver =
      std::make_shared<gpu::test::FakeDriver>(std::make_shared<gpu::test::FakeMachine>());
  for_ranks(world.nodes * world.locals, [&](std::uint32_t number) {
    auto session = Session::attach(place(*cluster, world.locals, number, "gpu-workspace"));
    ASSERT_TRUE(session) << session.error().message;
    session->impl()->use_driver(driver);
    Rank rank{*session, *driver, number};
    body(rank);
    EXPECT_TRUE(session->barrier());
  });
}

TEST(GpuWorkspace, FiveShapesNeedTheMemoryOfTheLargest) {
  std::vector<std::uint64_t> sizes = {8 * kMiB, 16 * kMiB, 32 * kMiB, 48 * kMiB, 64 * kMiB};
  for (const Nodes world : {Nodes{1, 1}, {1, 2}, {2, 1}, {2, 2}}) {
    for (int order = 0; order < 3; ++order) {
      if (order == 1) std::ranges::reverse(sizes);
      if (order == 2) std::swap(sizes[0], sizes[3]);
      on_ranks(world, [&](Rank& rank) {
        std::vector<std::unique_ptr<Operator>> all;
        std::uint64_t largest = 0;
        for (const std::uint64_t size : sizes) {
          all.push_back(Operator::create(rank, size));
          ASSERT_NE(nullptr, all.back());
          largest = std::max(largest, size);
          rank.expect_bytes(largest + (all.size() + 1) * kLittle);
        }
        for (const auto& one : all) {
          EXPECT_EQ(all[0]->data(), one->data());
          EXPECT_EQ(kWords, std::count(one->words(), one->words() + kWords, std::byte{0}));
          for (const auto& other : all) {
            if (one < other) {
              EXPECT_GE(static_cast<std::uint64_t>(std::abs(one->words() - other->words())),
                        kWords);
            }
          }
        }
        EXPECT_TRUE(rank.session.barrier());
      });
    }
  }
}

TEST(GpuWorkspace, WordsThatDoNotFitEnlargeItToo) {
  on_ranks({1, 2}, [](Rank& rank) {
    const auto first = Operator::create(rank, kMiB, false, kMiB);
    const auto larger = Operator::create(rank, 8 * kMiB);
    ASSERT_TRUE(first && larger);
    EXPECT_EQ(1, first->moved);
    EXPECT_GE(first->data(), first->words() + kMiB);
    EXPECT_GE(larger->data(), larger->words() + kWords);
    const auto wordy = Operator::create(rank, kMiB, false, 4 * kMiB);
    ASSERT_NE(nullptr, wordy);
    EXPECT_EQ(1, larger->moved);
    EXPECT_EQ(larger->data(), wordy->data());
    // Room for seven more like it, all words, and the data of the largest.
    rank.expect_bytes((28 + 4 + 1 + 8) * kMiB + 4 * kLittle);
    EXPECT_GE(rank.driver.allocated_bytes(), 2 * (28 + 4 + 1 + 8 + 3 * 2) * kMiB);
  });
}

TEST(GpuWorkspace, NobodyHasLaunchedAtFirst) {
  on_ranks({1, 2}, [](Rank& rank) {
    const auto first = Operator::create(rank, 4 * kMiB);
    const auto second = Operator::create(rank, kMiB);
    ASSERT_TRUE(first && second);
    const std::byte* const memory = first->words() - first->context().shared->at;
    EXPECT_EQ(0u, *reinterpret_cast<const std::uint64_t*>(memory + WorkspaceTurn::kLastAt));
    EXPECT_EQ(0u, first->turn().last);
    EXPECT_EQ(&first->turn(), &second->turn());
    EXPECT_STREQ("fake", first->turn().names[1]);
    EXPECT_FALSE(first->memory().claim()) << "both have the data";
  });
}

// None of them has launched, so that all want to move to each new workspace.
TEST(GpuWorkspace, MoreOperatorsThanAWorkspaceTakes) {
  on_ranks({1, 2}, [](Rank& rank) {
    std::vector<std::unique_ptr<Operator>> all;
    for (std::uint32_t i = 0; i < kernels::kSharersMax + 3; ++i) {
      all.push_back(Operator::create(rank, kMiB, false, kernels::kPage));
      ASSERT_NE(nullptr, all.back()) << i;
    }
    std::set<const std::byte*> places;
    std::set<const WorkspaceTurn*> workspaces;
    for (const auto& one : all) {
      places.insert(one->words());
      workspaces.insert(&one->turn());
      const kernels::WorkspaceShare& share = *one->context().shared;
      EXPECT_LT(share.sharer, kernels::kSharersMax);
      EXPECT_EQ(share.at, one->turn().words_at[share.sharer]);
    }
    EXPECT_EQ(all.size(), places.size());
    EXPECT_EQ(2u, workspaces.size());
    EXPECT_TRUE(rank.session.barrier());
  });
}

// Each has to have new flags before the old ones go: who gets none stays, and the new one has its
// own.
TEST(GpuWorkspace, WhoGetsNoNewFlagsStays) {
  on_ranks({2, 1}, [](Rank& rank) {
    const std::uint32_t flags = rank.session.options().arrival_flags / 5 / 64 * 64;
    std::vector<std::unique_ptr<Operator>> all;
    for (std::uint64_t i = 1; i <= 4; ++i) {
      all.push_back(Operator::create(rank, i * kMiB, false, kWords, flags - 64));
      ASSERT_NE(nullptr, all.back()) << i;
      rank.expect_bytes(64 * kMiB);  // waits for what goes
    }
    EXPECT_GT(all[0]->moved, all[2]->moved);
    EXPECT_EQ(0, all[2]->moved);
    EXPECT_EQ(&all[0]->turn(), &all[3]->turn());
    EXPECT_NE(&all[2]->turn(), &all[3]->turn());
  });
}

// A rank fails after it has told the others of its part: they hear of it at once, and all
// can go on.
TEST(GpuWorkspace, AFailureOnOneRankIsOneOnAll) {
  for (const Nodes world : {Nodes{2, 1}, Nodes{2, 2}}) {
    for (const bool larger : {false, true}) {
      on_ranks(world, [&](Rank& rank) {
        std::unique_ptr<Operator> first;
        if (larger) first = Operator::create(rank, kMiB);
        if (rank.number == 1) rank.driver.fail_stores_of = std::this_thread::get_id();
        EXPECT_TRUE(rank.session.barrier());
        const auto begin = std::chrono::steady_clock::now();
        const auto refused = Operator::try_to(rank, 4 * kMiB);
        ASSERT_FALSE(refused);
        EXPECT_LT(std::chrono::steady_clock::now() - begin, rank.session.options().timeout / 2);
        EXPECT_NE(std::string::npos, refused.error().message.find("stores nothing"))
            << refused.error().message;
        if (rank.number != 1) {
          EXPECT_NE(std::string::npos, refused.error().message.find("rank 1"))
              << refused.error().message;
        }
        EXPECT_EQ(larger, first != nullptr && first->stayed == 1);
        EXPECT_TRUE(rank.session.barrier());
        rank.driver.fail_stores_of = std::thread::id();
        EXPECT_TRUE(rank.session.barrier());
        const auto next = Operator::create(rank, 4 * kMiB);
        ASSERT_NE(nullptr, next);
        EXPECT_TRUE(first == nullptr || first->data() == next->data());
      });
    }
  }
}

// An operator that one rank holds stays on all: one that has not ended, that is in a graph, or
// whose rows its caller reads. The others move.
TEST(GpuWorkspace, WhoIsHeldStaysWhereItIs) {
  for (const Nodes world : kWorlds) {
    on_ranks(world, [](Rank& rank) {
      std::vector<std::unique_ptr<Operator>> all;
      for (std::uint64_t i = 0; i < 6; ++i) {
        all.push_back(Operator::create(rank, (6 - i) * kMiB));
        ASSERT_NE(nullptr, all.back());
      }
      for (const auto& one : all) one->launch();
      all[1]->capture();
      all[2]->launch(/*ended=*/rank.number != 0);
      all[3]->moves = rank.number != 1;
      std::vector<const std::byte*> words;
      for (const auto& one : all) words.push_back(one->words());
      EXPECT_TRUE(rank.session.barrier());
      const auto larger = Operator::create(rank, 9 * kMiB);
      ASSERT_NE(nullptr, larger);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const bool stays = i >= 1 && i <= 3;
        EXPECT_EQ(stays ? 0 : 1, all[i]->moved) << i;
        EXPECT_EQ(stays, all[i]->words() == words[i]) << i;
        EXPECT_EQ(!stays, all[i]->data() == larger->data()) << i;
        EXPECT_EQ(stays, all[i]->memory().has_launched()) << i;
      }
      EXPECT_NE(&all[1]->turn(), &larger->turn());
      // The old memory goes with the last of them.
      const std::uint64_t both = 16 * kMiB + 8 * kLittle;
      rank.expect_bytes(both);
      for (std::size_t i = 1; i <= 3; ++i) all[i].reset();
      rank.expect_bytes(both - 5 * kMiB);
    });
  }
}

TEST(GpuWorkspace, OneRankThatCannotMoveRefusesOnAllAndMovesNobody) {
  for (const Nodes world : kWorlds) {
    on_ranks(world, [](Rank& rank) {
      const auto first = Operator::create(rank, kMiB);
      const auto second = Operator::create(rank, 2 * kMiB);
      ASSERT_TRUE(first && second);
      EXPECT_EQ(1, first->moved);
      second->can_prepare = rank.number == 0;
      const std::byte* const words = second->words();
      const auto refused =
          OperatorWorkspace::create(*rank.session.impl(), "large", "large",
                                    {kWords, 4 * kMiB, kWords}, kFlags, false, Executor::kCuda);
      ASSERT_FALSE(refused);
      EXPECT_NE(std::string::npos, refused.error().message.find("no kernels"));
      EXPECT_EQ(1, second->stayed);
      EXPECT_EQ(words, second->words());
      second->can_prepare = true;
      const auto larger = Operator::create(rank, 4 * kMiB);
      ASSERT_NE(nullptr, larger);
      EXPECT_EQ(larger->data(), second->data());
      rank.expect_bytes(4 * kMiB + 4 * kLittle);
    });
  }
}

TEST(GpuWorkspace, WhoWantsItsOwnSharesWithNoneAndTakesNoTurns) {
  for (const Nodes world : kWorlds) {
    on_ranks(world, [](Rank& rank) {
      const auto own = Operator::create(rank, kMiB, true);
      const auto first = Operator::create(rank, kMiB);
      const auto larger = Operator::create(rank, 2 * kMiB);
      ASSERT_TRUE(own && first && larger);
      EXPECT_EQ(nullptr, own->context().shared);
      EXPECT_NE(own->data(), first->data());
      EXPECT_EQ(first->data(), larger->data());
      EXPECT_TRUE(own->memory().claim());
      EXPECT_EQ(0, own->moved);
    });
  }
}

// Kernels count from their operator's words, and commands go by the memory's handles. The old flags
// of one that moves show old epochs: it has new ones, and its rail peers know them.
TEST(GpuWorkspace, OverNodesOperatorsKnowWhereTheyAreAtTheirRailPeers) {
  std::mutex mutex;
  std::map<std::pair<std::uint32_t, std::string>, std::uint32_t> flags_of;
  on_ranks({2, 2}, [&](Rank& rank) {
    const auto first = Operator::create(rank, kMiB);
    const auto second = Operator::create(rank, kMiB / 2);
    ASSERT_TRUE(first && second);
    const std::uint32_t old_flags = first->context().flag_base;
    for (Operator* const one : {first.get(), second.get()}) one->launch();
    EXPECT_TRUE(rank.session.barrier());
    const auto larger = Operator::create(rank, 2 * kMiB);
    ASSERT_NE(nullptr, larger);
    EXPECT_EQ(1, first->moved);
    EXPECT_NE(old_flags, first->context().flag_base);
    const std::pair<const char*, Operator*> all[] = {
        {"first", first.get()}, {"second", second.get()}, {"larger", larger.get()}};
    {
      std::lock_guard lock(mutex);
      flags_of[{rank.number, "turns"}] = first->turn().context.flag_base;
      for (const auto& [name, one] : all) flags_of[{rank.number, name}] = one->context().flag_base;
    }
    EXPECT_TRUE(rank.session.barrier());
    const RankContext& memory = first->turn().context;
    const std::uint32_t node = 1 - memory.world.node;
    const std::uint32_t peer = memory.world.rail_peer(node);
    for (const auto& [name, one] : all) {
      const RankContext& context = one->context();
      EXPECT_EQ(&first->turn(), &one->turn()) << name;
      EXPECT_EQ(memory.workspace_handle, context.workspace_handle) << name;
      const kernels::RailPeer& there = context.rail_peers[node];
      EXPECT_EQ(peer, there.rank) << name;
      EXPECT_EQ(memory.rail_peers[node].workspace_handle, there.workspace_handle) << name;
      EXPECT_EQ(context.shared->at, there.begin) << name;
      EXPECT_EQ(memory.workspaces[memory.world.local] + there.begin, one->words()) << name;
      std::lock_guard lock(mutex);
      EXPECT_EQ((flags_of[{peer, name}]), there.flag_base) << name;
    }
    // The kernel of turns finds its rail peers in the memory.
    kernels::RailPeer told[2];
    std::memcpy(told, memory.workspaces[memory.world.local] + WorkspaceTurn::kPeersAt, sizeof told);
    EXPECT_EQ(peer, told[node].rank);
    EXPECT_EQ(memory.rail_peers[node].workspace_handle, told[node].workspace_handle);
    EXPECT_GE(memory.flag_count, WorkspaceTurn::flags(2));
    std::lock_guard lock(mutex);
    EXPECT_EQ((flags_of[{peer, "turns"}]), told[node].flag_base);
  });
}

TEST(GpuWorkspace, NobodyJoinsAfterAFailure) {
  on_ranks({1, 2}, [](Rank& rank) {
    const auto first = Operator::create(rank, kMiB);
    const auto second = Operator::create(rank, kMiB / 2);
    ASSERT_TRUE(first && second);
    EXPECT_TRUE(second->memory().usable());
    EXPECT_TRUE(rank.session.barrier());
    if (rank.number == 1) first->fail_launch();
    EXPECT_TRUE(rank.session.barrier());
    EXPECT_FALSE(second->memory().usable());
    const auto next = Operator::create(rank, kMiB / 4);
    ASSERT_NE(nullptr, next);
    EXPECT_NE(first->data(), next->data());
    EXPECT_TRUE(next->memory().usable());
  });
}

}  // namespace
}  // namespace mk
