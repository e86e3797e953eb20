// The channel of a send worker: chunks go in their order, each as soon as it is complete and its
// peer's bank is free, and no sooner; what signals, releases and a flush tell the daemon.
#include "kernels/comm/channel.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

namespace mk::kernels {
namespace {

constexpr std::uint32_t kEpoch = 9;
constexpr std::uint32_t kSlotsLog2 = 4;
constexpr std::uint32_t kNodes = 4;
constexpr std::uint32_t kChunksMax = 40;
constexpr std::uint32_t kFirstFlag = 5;  // of the map, in the operator's range

/// Time passes by one at a pause, and `at_pause` may change the world. Looks at up to three flags
/// at a time.
struct Executor {
  std::function<void()> at_pause;
  std::uint64_t now = 0;
  std::uint32_t seen = 0;

  std::uint64_t now_ns() { return now; }
  bool pause(std::uint32_t) {
    ++now;
    if (at_pause) at_pause();
    return true;
  }
  void stores_done() {}
  void loads_begin() {}
  template <class Flag>
  std::uint32_t first_missing(std::uint32_t begin, std::uint32_t end, std::uint32_t wanted,
                              Flag&& flag) {
    seen = *flag(begin);
    end = std::min(end, begin + 3);
    while (begin < end && shm::epoch_reached(*flag(begin), wanted)) ++begin;
    return begin;
  }
  std::uint32_t first_seen() const { return seen; }
};

/// Send worker 1 of rank 3: node 1 of four, local rank 1 of two.
struct Sender {
  explicit Sender(std::uint32_t banks) : flags{kNodes, banks, kChunksMax, kFirstFlag} {
    rings[1].ring = {slots.data(), &ring_control, kSlotsLog2};
    consumer.ring = rings[1].ring;
    launch.context.world = {kNodes, 2, 1, 1};
    launch.context.rail_peers = peers;
    launch.context.lanes = rings;
    launch.context.lane_count = 2;
    arrivals.assign(flags.first + flags.count(), 0);
    launch.context.arrival_flags = arrivals.data();
    launch.local = &local;
    launch.control.stop = &local.stop;
    launch.control.record = &local.failure;
    launch.control.timeout_ns = 2000;
    launch.banks = banks;
    launch.epoch = kEpoch;
  }
  OperatorBlock<Executor> block() { return {executor, launch, Role::kSend, 1, totals}; }
  /// What the daemon sees by now.
  std::vector<shm::Command> take() {
    std::vector<shm::Command> taken;
    std::uint64_t words[shm::kCommandWords];
    while (consumer.try_take(words)) {
      taken.push_back(shm::decode(words));
      consumer.publish_consumed();
    }
    return taken;
  }

  const RailPeer peers[kNodes] = {{1, 21, 1000}, {}, {5, 22, 2000}, {7, 23, 3000}};
  const FlagMap flags;
  std::vector<shm::CommandSlot> slots = std::vector<shm::CommandSlot>(1u << kSlotsLog2);
  shm::LaneControl ring_control{};
  shm::RingProducer rings[2];
  shm::RingConsumer consumer;
  std::vector<std::uint32_t> arrivals;
  LocalWords local;
  Launch launch;
  BlockTotals totals;
  Executor executor;
};

// --- Send when ready ---

struct Case {
  std::uint64_t seed = 0;
  std::uint32_t banks = 2;
  ChunkRun run;
  std::uint32_t peers = 1;  ///< nodes 2, 3 and 0, in this order
  std::uint64_t chunk_bytes = 0;
};

std::uint32_t node_of(std::uint32_t peer) { return (2 + peer) % kNodes; }
Route route_to(const Sender& sender, std::uint32_t peer) {
  const std::uint32_t node = node_of(peer);
  return {node, 4096, 100000 * node, sender.flags.arrival(kEpoch % sender.flags.banks, node, 1, 0)};
}
ByteRange range_of(std::uint32_t chunk) { return {1000 * chunk, 300 + chunk}; }

/// Sends a run while chunks become complete and peers release their banks. The daemon takes what it
/// sees before each such event, so that it sees what was committed too early.
class Race {
 public:
  /// `in_turn`: an event comes only when everything has gone that the ones before let go.
  Race(const Case& of, bool in_turn)
      : case_(of), in_turn_(in_turn), random_(of.seed), sender_(of.banks) {
    ready_.assign(of.run.end() + 1, 0);
    for (std::uint32_t i = 0; i < of.run.count; ++i) events_.push_back({false, i});
    if (sender_.flags.has_releases()) {
      for (std::uint32_t peer = 0; peer < of.peers; ++peer) events_.push_back({true, peer});
    }
    if (in_turn) {
      // As the commands need them.
      std::stable_sort(events_.begin(), events_.end(), [](const Event& a, const Event& b) {
        const auto key = [](const Event& e) { return e.release ? 1 : 2 * (e.index != 0); };
        return key(a) < key(b);
      });
    } else {
      std::shuffle(events_.begin(), events_.end(), random_);
    }
  }

  void run() {
    sender_.executor.at_pause = [this] { pause(); };
    bool sent = false;
    {
      auto block = sender_.block();
      Channel<Executor> channel(block);
      sent = channel.send_when_ready(
          {case_.run, case_.peers, case_.chunk_bytes, 1, &sender_.flags},
          [&](std::uint32_t peer) { return route_to(sender_, peer); }, range_of,
          [&](std::uint32_t chunk, std::uint32_t count) {
            return block.await_run(
                0, 1, count, kEpoch,
                [&](std::uint32_t i) { return &ready_[chunk + i * case_.run.step]; },
                [&](std::uint32_t i) { return block.site(FlagKind::kChunkReduced, 3, i, 0, 0); });
          });
      channel.note_sent();
    }
    check_taken();
    ASSERT_TRUE(sent);
    ASSERT_EQ(taken_, case_.run.count * case_.peers);
    ASSERT_EQ(sender_.totals.commands, taken_);
    ASSERT_EQ(sender_.totals.network_bytes, bytes_);
    ASSERT_EQ(sender_.local.sent_in(kEpoch)[1], taken_);
  }

 private:
  struct Event {
    bool release;
    std::uint32_t index;  ///< of the peer, or of the chunk in the run
  };

  void pause() {
    check_taken();
    if (at_ == events_.size()) return;
    if (in_turn_ ? taken_ != allowed() : random_() % 3 == 0) return;
    const Event event = events_[at_++];
    if (event.release) {
      sender_.arrivals[sender_.flags.release(1, node_of(event.index))] = kEpoch - 1;
    } else {
      ready_[case_.run.chunk(event.index)] = kEpoch;
    }
  }
  bool is_free(std::uint32_t peer) const {
    if (!sender_.flags.has_releases()) return true;
    return sender_.arrivals[sender_.flags.release(1, node_of(peer))] == kEpoch - 1;
  }
  /// How many commands may have gone.
  std::uint32_t allowed() const {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i < case_.run.count; ++i) {
      if (ready_[case_.run.chunk(i)] != kEpoch) return count;
      for (std::uint32_t peer = 0; peer < case_.peers; ++peer, ++count) {
        if (!is_free(peer)) return count;
      }
    }
    return count;
  }
  void check_taken() {
    for (const shm::Command& command : sender_.take()) {
      const std::uint32_t chunk = case_.run.chunk(taken_ / case_.peers);
      const std::uint32_t peer = taken_ % case_.peers;
      ASSERT_LT(taken_, allowed()) << "too early";
      const Route route = route_to(sender_, peer);
      const ByteRange range = range_of(chunk);
      ASSERT_EQ(command.opcode, shm::Opcode::kWrite);
      ASSERT_EQ(command.peer, sender_.peers[route.node].rank);
      ASSERT_EQ(command.src_offset, route.source + range.begin);
      ASSERT_EQ(command.dst_offset, route.target + range.begin);
      ASSERT_EQ(command.bytes, range.bytes);
      ASSERT_EQ(command.flag_index, sender_.peers[route.node].flag_base + route.flag + chunk);
      ASSERT_EQ(command.epoch, kEpoch);
      ++taken_;
      bytes_ += range.bytes;
    }
  }

  const Case case_;
  const bool in_turn_;
  std::mt19937_64 random_;
  Sender sender_;
  std::vector<std::uint32_t> ready_;  ///< by chunk
  std::vector<Event> events_;
  std::size_t at_ = 0;  ///< the next of them
  std::uint32_t taken_ = 0;
  std::uint64_t bytes_ = 0;
};

Case random_case(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Case made;
  made.seed = seed;
  made.banks = static_cast<std::uint32_t>(1 + random() % 2);
  const auto step = static_cast<std::uint32_t>(1 + random() % 3);
  made.run = ChunkRun::below(static_cast<std::uint32_t>(random() % kChunksMax),
                             static_cast<std::uint32_t>(random() % 4), step);
  made.peers = static_cast<std::uint32_t>(1 + random() % (kNodes - 1));
  made.chunk_bytes = random() % 2 == 0 ? 32 << 10 : 256 << 10;
  return made;
}

void race_all(bool in_turn) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    const Case of = random_case(seed);
    SCOPED_TRACE(fmt::format("seed {}: {} chunks to {} peers, {} banks", seed, of.run.count,
                             of.peers, of.banks));
    Race(of, in_turn).run();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Channel, SendsEachChunkOnceInOrderAndNoSoonerThanItIsComplete) { race_all(false); }

// Whatever comes next waits for the commands that may go before: none of them is held back by a
// chunk that is not complete, or by a peer that it is not for.
TEST(Channel, NothingHoldsBackWhatMayGo) { race_all(true); }

TEST(Channel, TheChunksOfARunAreThoseBelowTheirNumber) {
  for (std::uint32_t chunks = 0; chunks < 12; ++chunks) {
    for (std::uint32_t first = 0; first < 14; ++first) {
      for (std::uint32_t step = 1; step < 5; ++step) {
        const ChunkRun run = ChunkRun::below(chunks, first, step);
        std::uint32_t turn = 0;
        for (std::uint32_t chunk = first; chunk < chunks; chunk += step)
          ASSERT_EQ(run.chunk(turn++), chunk);
        ASSERT_EQ(run.count, turn);
        ASSERT_EQ(run.end(), first + turn * step);
      }
    }
  }
}

TEST(Channel, APeerThatNeverReleasesItsBankIsNamed) {
  Sender sender(1);
  sender.arrivals[sender.flags.release(1, 2)] = kEpoch - 1;  // node 3 does not
  {
    auto block = sender.block();
    Channel<Executor> channel(block);
    EXPECT_FALSE(channel.send_when_ready(
        {{0, 1, 6}, 2, 1 << 18, 1, &sender.flags},
        [&](std::uint32_t peer) { return route_to(sender, peer); }, range_of,
        [](std::uint32_t, std::uint32_t count) { return count; }));
  }
  EXPECT_EQ(sender.local.failure.end, WaitEnd::kTimeout);
  EXPECT_EQ(sender.local.failure.site.kind, FlagKind::kRelease);
  EXPECT_EQ(sender.local.failure.site.rank, 7u);
  ASSERT_EQ(sender.take().size(), 1u) << "the first chunk, to node 2";
  EXPECT_EQ(sender.totals.commands, 1u);
}

TEST(Channel, AChunkThatNeverComesEndsTheLaunch) {
  Sender sender(2);
  auto block = sender.block();
  Channel<Executor> channel(block);
  EXPECT_FALSE(channel.send_when_ready(
      {{0, 1, 6}, 1, 1 << 18, 1, nullptr},
      [&](std::uint32_t peer) { return route_to(sender, peer); }, range_of,
      [](std::uint32_t chunk, std::uint32_t) -> std::uint32_t { return chunk < 2 ? 1 : 0; }));
  EXPECT_EQ(sender.take().size(), 2u);
}

// --- Signal, release, flush ---

TEST(Channel, SignalsGoAtTheFlush) {
  Sender sender(1);
  auto block = sender.block();
  Channel<Executor> channel(block);
  ASSERT_TRUE(channel.signal(2, 11));
  ASSERT_TRUE(channel.release(sender.flags, 3));
  EXPECT_TRUE(sender.take().empty());
  channel.flush();
  const std::vector<shm::Command> taken = sender.take();
  ASSERT_EQ(taken.size(), 2u);
  for (const shm::Command& command : taken) {
    EXPECT_EQ(command.opcode, shm::Opcode::kWriteFlag);
    EXPECT_EQ(command.epoch, kEpoch);
  }
  EXPECT_EQ(taken[0].peer, 5u);
  EXPECT_EQ(taken[0].flag_index, 2000u + 11u);
  EXPECT_EQ(taken[1].peer, 7u);
  // One bank of three senders' arrivals, 64 flags each; this node's release is the second of node
  // 3's three.
  EXPECT_EQ(taken[1].flag_index, 3000u + kFirstFlag + 3 * sender.flags.stride() + 1);
}

// The first flag of each granule that a launch of so many chunks does not reach, and no other.
TEST(Channel, IdleGranulesAreSignalledOnce) {
  Sender sender(2);
  const FlagMap flags{kNodes, 2, 3 * shm::kFlagGranule + 8, kFirstFlag};
  for (std::uint32_t chunks = 0; chunks <= flags.chunks_max; ++chunks) {
    {
      auto block = sender.block();
      Channel<Executor> channel(block);
      ASSERT_TRUE(channel.signal_idle(flags, 2, 1, chunks));
      channel.flush();
    }
    std::vector<std::uint32_t> expected;
    for (std::uint32_t chunk = chunks; chunk < flags.stride(); ++chunk) {
      if (chunk % shm::kFlagGranule == 0)
        expected.push_back(2000 + flags.arrival(kEpoch % 2, 2, 1, chunk));
    }
    std::vector<std::uint32_t> signalled;
    for (const shm::Command& command : sender.take()) signalled.push_back(command.flag_index);
    ASSERT_EQ(signalled, expected) << chunks;
  }
}

}  // namespace
}  // namespace mk::kernels
