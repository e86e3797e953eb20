#include "tests/gpu/reflections.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include "kernels/comm/launch_record.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/gather/geometry.h"

namespace mk::test {
namespace {

/// A job's places, as addresses of nothing: each workspace, and each source, in a range of its own.
class Places {
 public:
  static constexpr std::uint64_t kApart = 1ull << 40;

  Places(Op op, std::uint32_t nodes, std::uint32_t locals, std::uint32_t banks = 0) {
    setup.banks = banks;
    setup.op = op;
    setup.nodes = nodes;
    setup.locals = locals;
    setup.m = 2048;
    setup.n = op == Op::kAgGemm ? 256 : 2048;
    setup.k.assign(setup.world(), op == Op::kAgGemm ? 2048 : 256);
    // By the file of a machine, since there may be no GPU here.
    setup.options.job_plan = kernels::cuda::job_plan_for("NVIDIA H100 80GB HBM3", kMultiprocessors);
    plan = make_plan(setup, kMultiprocessors);
    const auto next = [this] { return reinterpret_cast<std::byte*>(kApart * ++ranges_); };
    for (std::uint32_t local = 0; local < locals; ++local) places.workspaces.push_back(next());
    places.arrivals = reinterpret_cast<std::uint32_t*>(next());
    places.arrivals_there = reinterpret_cast<std::uint32_t*>(next());
    places.counters = reinterpret_cast<std::uint32_t*>(next());
    places.told = reinterpret_cast<std::uint32_t*>(next());
    places.header = next();
    places.sums = next();
    first_of_rank_ = ranges_ + 1;
    for (std::uint32_t rank = 0; rank < setup.world(); ++rank) {
      places.rows.push_back(next());
      places.partials.push_back(next());
      places.their_tiles.push_back(next());
    }
  }

  /// The local rank in whose workspace the address is; the number of local ranks: in none.
  std::uint32_t local_of(const void* address) const {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    const std::uint64_t range = at / kApart;
    if (range < 1 || range > setup.locals) return setup.locals;
    EXPECT_LT(at % kApart, plan.workspace_bytes);
    return static_cast<std::uint32_t>(range - 1);
  }

  /// Whose bytes the address holds; 0, who brings nothing: nobody's in particular.
  std::uint32_t bringer_of(const void* source) const {
    const std::uint64_t range = reinterpret_cast<std::uintptr_t>(source) / kApart;
    return range < first_of_rank_ ? 0 : static_cast<std::uint32_t>((range - first_of_rank_) / 3);
  }

  JobSetup setup;
  Plan plan;
  MirroredPlaces places;

 private:
  std::uint64_t ranges_ = 0;
  std::uint64_t first_of_rank_ = 0;
};

struct Case {
  Op op;
  std::uint32_t nodes, locals;
};

class Mirrored : public testing::TestWithParam<Case> {
 protected:
  Mirrored() : places(GetParam().op, GetParam().nodes, GetParam().locals) {}
  std::vector<Reflection> all(std::uint32_t epoch) const {
    const Reflections lists = reflections(places.setup, places.plan, places.places, {}, epoch);
    std::vector<Reflection> joined = lists.first;
    joined.insert(joined.end(), lists.later.begin(), lists.later.end());
    joined.insert(joined.end(), lists.network.begin(), lists.network.end());
    return joined;
  }
  Places places;
};

// What the others bring in a launch is as much as they would: derived from the shapes alone.
TEST_P(Mirrored, EveryByteComes) {
  const auto [op, nodes, locals] = GetParam();
  const std::uint64_t peers = locals - 1;
  const std::uint64_t result = 2048ull * 2048 * 2;  // A of AG+GEMM, C of the others
  const std::uint64_t shard = result / (nodes * locals);
  std::uint64_t bytes = 0;
  for (const Reflection& one : all(1)) bytes += std::uint64_t{one.rows} * one.row_bytes;
  std::uint64_t wanted = 0;
  switch (op) {
    case Op::kAgGemm:
      wanted = (nodes * locals - 1) * (shard + kernels::kGatherHeaderBytes);
      break;
    case Op::kGemmRs:  // partials of its rail's shards, and the other node's sums of its own
      wanted = peers * nodes * shard + (nodes - 1) * (shard + kernels::kBankHeaderBytes);
      break;
    case Op::kGemmAr:  // partials, sums, and the others' results
      wanted = 2 * peers * (result / locals) +
               (nodes - 1) * (result / locals + kernels::kBankHeaderBytes);
      break;
  }
  EXPECT_EQ(bytes, wanted);
}

// Into its workspace, no byte twice.
TEST_P(Mirrored, NothingIsOverwritten) {
  for (const std::uint32_t epoch : {1u, 2u}) {
    std::map<std::uintptr_t, std::uintptr_t> ranges;  // begin, end
    for (const Reflection& one : all(epoch)) {
      for (std::uint32_t row = 0; row < one.rows; ++row) {
        const std::byte* const begin = one.target + row * one.target_stride;
        ASSERT_EQ(places.local_of(begin), 0u);
        const auto at = reinterpret_cast<std::uintptr_t>(begin);
        ASSERT_EQ(at % 16, 0u);
        ASSERT_TRUE(ranges.emplace(at, at + one.row_bytes).second);
      }
    }
    std::uintptr_t end = 0;
    for (const auto& [first, last] : ranges) {
      ASSERT_LE(end, first);
      end = last;
    }
  }
}

// Each flag is the rank's own, and shown once, by one or by all that share it. It is shown when the
// rank shows something to a peer of its node, the one with the turned number, or to its rail peer.
TEST_P(Mirrored, EachFlagAnswersOneThatTheRankShows) {
  const auto [op, nodes, locals] = GetParam();
  std::map<const std::uint32_t*, std::uint32_t> shown;
  std::map<std::uint32_t, std::uint32_t> by_peer;
  for (const Reflection& one : all(1)) {
    ++shown[one.flag];
    const bool over_network = places.local_of(one.flag) == locals;
    const std::uint32_t peer = places.local_of(one.seen);
    EXPECT_NE(peer, 0u);
    EXPECT_EQ(over_network, peer == locals);
    if (!over_network) {
      EXPECT_EQ(places.local_of(one.flag), 0u);
      ++by_peer[peer];
      const std::uint32_t bringer = places.bringer_of(one.source) % locals;
      if (bringer != 0) {
        EXPECT_EQ(peer, locals - bringer);
      }
    }
  }
  for (const Reflection& one : all(1)) EXPECT_EQ(shown[one.flag], one.sharers);
  EXPECT_EQ(by_peer.size(), locals - 1);
  for (const auto& [peer, count] : by_peer) EXPECT_EQ(count, by_peer.begin()->second) << peer;
}

// In as many pieces as the rank itself brings its rows in; headers are small.
TEST_P(Mirrored, RowsComeInTheRanksOwnParts) {
  const auto [op, nodes, locals] = GetParam();
  const RowsOrder order{.shared_parts = 8, .onward = {.parts = 3}};
  const Reflections lists = reflections(places.setup, places.plan, places.places, order, 1);
  const auto pieces = [&](const Reflection& one) {
    return one.row_bytes > kernels::kGatherHeaderBytes ? one.pieces : 0;
  };
  for (const Reflection& one : lists.first) {
    if (one.rows == 0) continue;
    EXPECT_EQ(one.pieces, op == Op::kAgGemm && pieces(one) != 0 ? 8u : 1u);
  }
  for (const Reflection& one : lists.later) {
    EXPECT_EQ(one.pieces, op == Op::kAgGemm && pieces(one) != 0 ? 3u : 1u);
  }
  for (const Reflection& one : lists.network)
    EXPECT_EQ(one.pieces, std::max(one.row_bytes >> 16, 1u));
}

// Nobody has sums, or rows from the network, to bring before rank 0 has the like: all partials of
// its tile of that number, or its own chunk of that number.
TEST_P(Mirrored, WhatFollowsFromOthersWaitsForThem) {
  const auto [op, nodes, locals] = GetParam();
  const Reflections lists = reflections(places.setup, places.plan, places.places, {}, 1);
  std::map<const std::uint32_t*, std::uint32_t> told;
  for (const auto* const list : {&lists.first, &lists.network}) {
    for (const Reflection& one : *list) {
      EXPECT_EQ(one.awaits, nullptr);
      if (one.told != nullptr) ++told[one.told];
    }
  }
  std::map<const std::uint32_t*, std::uint32_t> awaited;
  for (const Reflection& one : lists.later) {
    ASSERT_NE(one.awaits, nullptr);
    EXPECT_EQ(one.told, nullptr);
    EXPECT_EQ(one.awaits_count, told[one.awaits]);
    EXPECT_EQ(one.awaits_count, nodes == 1 ? locals - 1 : 1);
    ++awaited[one.awaits];
  }
  if (lists.later.empty()) return;
  EXPECT_EQ(awaited.size(), told.size());
  for (const auto& [counter, items] : awaited) EXPECT_EQ(items % (locals - 1), 0u);
  // Of the same number, which is that of their flags where these are one rank's.
  using Flags = std::set<const std::uint32_t*>;
  const auto number = [](const Flags& flags, const std::uint32_t* flag) {
    return std::distance(flags.begin(), flags.find(flag));
  };
  const bool one_node = nodes == 1;
  const auto& causes = one_node ? lists.first : lists.network;
  const auto flag_of = [one_node](const Reflection& cause) {
    return one_node ? cause.seen : cause.flag;
  };
  Flags of_causes;
  std::map<const std::uint32_t*, const std::uint32_t*> told_by;
  for (const Reflection& one : causes) {
    // Within a node each peer is shown the like.
    if (one.told == nullptr || (one_node && places.local_of(one.seen) != 1)) continue;
    of_causes.insert(flag_of(one));
    told_by[one.told] = flag_of(one);
  }
  std::map<std::uint32_t, Flags> of_peer;
  for (const Reflection& one : lists.later) of_peer[places.local_of(one.seen)].insert(one.seen);
  for (const Reflection& one : lists.later) {
    ASSERT_TRUE(told_by.contains(one.awaits));
    EXPECT_EQ(number(of_peer[places.local_of(one.seen)], one.seen),
              number(of_causes, told_by[one.awaits]));
  }
}

// Where DMA engines share, the lists have headers and what the network brings; with one bank its
// release as well, which takes the rank's own.
TEST(MirroredByDma, ListsHaveWhatEnginesDoNotBring) {
  const Places places(Op::kAgGemm, 2, 4, 1);
  const RowsOrder order{
      .arrival = kernels::Arrival::kInTurn, .by_dma = true, .onward = {.dma_chunks = 2}};
  const Reflections lists = reflections(places.setup, places.plan, places.places, order, 1);
  const std::uint64_t shard = 2048ull * 2048 * 2 / 8;
  std::uint64_t bytes = 0;
  for (const Reflection& one : lists.network) bytes += one.row_bytes;
  EXPECT_EQ(bytes, shard + kernels::kGatherHeaderBytes);
  EXPECT_EQ(lists.later.size(), 3u);
  for (const Reflection& one : lists.later) EXPECT_EQ(one.row_bytes, kernels::kGatherHeaderBytes);
  for (const Reflection& one : lists.first) EXPECT_EQ(one.rows, 0u);
  std::set<const std::uint32_t*> flags;
  std::uint32_t releases = 0;
  for (const Reflection& one : lists.network) {
    EXPECT_EQ(places.local_of(one.flag), places.setup.locals);
    EXPECT_TRUE(flags.insert(one.flag).second);
    releases += one.rows == 0 ? 1 : 0;
  }
  EXPECT_EQ(releases, 1u);
  EXPECT_EQ(lists.network.back().rows, 0u) << "it comes last";
}

// With a flag, at once, go the eight bytes of which it is the first half.
TEST_P(Mirrored, AWordLiesBehindItsFlag) {
  std::uint32_t words = 0;
  for (const Reflection& one : all(1)) {
    if (!one.has_word) continue;
    ++words;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(one.flag) % 8, 0u);
    EXPECT_EQ(one.word, 2048u);
  }
  EXPECT_EQ(words, GetParam().op == Op::kAgGemm ? 0 : GetParam().locals - 1);
}

// Two launches in a row use different banks of what crosses the network, and of records.
TEST_P(Mirrored, LaunchesTakeTurnsWithTheirBanks) {
  std::set<const std::byte*> odd, even;
  const Reflections one = reflections(places.setup, places.plan, places.places, {}, 1);
  const Reflections two = reflections(places.setup, places.plan, places.places, {}, 2);
  for (const Reflection& item : one.network) odd.insert(item.target);
  for (const Reflection& item : two.network) even.insert(item.target);
  EXPECT_EQ(odd.size(), even.size());
  for (const std::byte* target : odd) EXPECT_FALSE(even.contains(target));
  EXPECT_EQ(odd.empty(), GetParam().nodes == 1);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (const std::uint32_t nodes : {1u, 2u}) {
      for (const std::uint32_t locals : {2u, 4u, 8u}) all.push_back({op, nodes, locals});
    }
  }
  return all;
}
std::string name_of(const testing::TestParamInfo<Case>& info) {
  return std::string(name(info.param.op)) + "_" + std::to_string(info.param.nodes) + "x" +
         std::to_string(info.param.locals);
}
INSTANTIATE_TEST_SUITE_P(Worlds, Mirrored, testing::ValuesIn(cases()), name_of);

}  // namespace
}  // namespace mk::test
