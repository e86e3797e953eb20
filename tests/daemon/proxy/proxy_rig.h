/// \file
/// A proxy driven by `step` on a clock of the test's own, over a ScriptedEndpoint, and sessions
/// with their producers.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/proxy/completion_tracker.h"
#include "daemon/proxy/proxy.h"
#include "shm/host/segment.h"
#include "shm/ring.h"
#include "tests/daemon/proxy/scripted_endpoint.h"

namespace mk::daemon::test {

inline constexpr std::uint16_t kHandle = 7;  ///< of every test session's buffer, and of its peers'
inline constexpr std::uint64_t kBufferBytes = 1 << 20;
inline constexpr std::uint32_t kFlags = 256;  ///< of every session and peer

struct SessionShape {
  std::uint32_t lanes = 1;
  std::uint32_t slot_count_log2 = 10;
  std::uint32_t outstanding_max = 256;
  std::uint32_t weight = 1;
};

/// One client: its segment and the producer side of its lanes.
struct TestSession {
  TestSession(SessionSlot number, const SessionShape& wanted)
      : slot(number),
        shape(wanted),
        segment(shm::Segment::create({wanted.lanes, wanted.slot_count_log2, kFlags}, 1,
                                     100 + number, number, 0)
                    .value()) {
    for (std::uint32_t i = 0; i < wanted.lanes; ++i) producers.push_back({segment.ring(i)});
  }

  std::uint64_t consumed(std::uint32_t lane = 0) const {
    return producers[lane].ring.control->consumed;
  }
  std::uint64_t completed(std::uint32_t lane = 0) const { return producers[lane].completed(); }
  LaneStats& lane_stats(std::uint32_t lane = 0) { return stats.lanes[lane]; }

  /// Pushes `count` writes to `peer`; each names its place in its lane by its source offset.
  void push(std::uint16_t peer, std::uint32_t count = 1, std::uint32_t lane = 0,
            std::uint32_t bytes = 64);
  /// Writes raw words, with the right commit parity, as the lane's next command.
  void push_words(std::uint64_t words[shm::kCommandWords], std::uint32_t lane = 0);

  SessionSlot slot;
  SessionShape shape;
  shm::Segment segment;
  SessionStats stats;
  std::vector<shm::RingProducer> producers;
};

/// A valid write of 64 bytes to `peer`.
inline shm::Command write_command(std::uint16_t peer, std::uint64_t offset = 0,
                                  std::uint32_t bytes = 64) {
  shm::Command command;
  command.opcode = shm::Opcode::kWrite;
  command.peer = peer;
  command.src_handle = kHandle;
  command.dst_handle = kHandle;
  command.src_offset = offset;
  command.bytes = bytes;
  command.epoch = 1;
  return command;
}

inline shm::Command flag_command(std::uint16_t peer, std::uint32_t flag_index = 0,
                                 std::uint32_t epoch = 1) {
  shm::Command command;
  command.opcode = shm::Opcode::kWriteFlag;
  command.peer = peer;
  command.flag_index = flag_index;
  command.epoch = epoch;
  return command;
}

inline void TestSession::push(std::uint16_t peer, std::uint32_t count, std::uint32_t lane,
                              std::uint32_t bytes) {
  for (std::uint32_t i = 0; i < count; ++i) {
    ASSERT_TRUE(producers[lane].try_push(write_command(peer, producers[lane].produced, bytes)));
  }
}

inline void TestSession::push_words(std::uint64_t words[shm::kCommandWords], std::uint32_t lane) {
  shm::RingProducer& producer = producers[lane];
  ASSERT_TRUE(producer.has_credit());
  shm::CommandSlot& place = producer.ring.slot(producer.produced);
  for (std::uint32_t i = 0; i < shm::kCommitWord; ++i)
    shm::store_relaxed(&place.words[i], words[i]);
  const std::uint64_t commit = (words[shm::kCommitWord] & ~shm::kParityBit) |
                               shm::lap_parity(producer.produced, producer.ring.slot_count_log2);
  shm::store_release(&place.words[shm::kCommitWord], commit);
  ++producer.produced;
}

class ProxyRig {
 public:
  explicit ProxyRig(ProxyOptions options = {},
                    fabric::Capabilities caps = {.name = "scripted", .link_depth = 1024}) {
    auto scripted = std::make_unique<ScriptedEndpoint>();
    scripted->caps = std::move(caps);
    endpoint = scripted.get();
    options.clock_ns = [this] { return now_ns; };
    proxy = std::make_unique<Proxy>(std::move(scripted), options, [this](ProxyEvent event) {
      events.push_back(std::move(event));
    });
  }

  /// Adds a session with its buffer; bind its peers before pushing.
  TestSession& add_session(SessionSlot slot, const SessionShape& shape = {}) {
    sessions.push_back(std::make_unique<TestSession>(slot, shape));
    add_again(*sessions.back());
    return *sessions.back();
  }
  /// Adds the session of slot 0, with rank 1 at link 0.
  TestSession& add_bound_session(const SessionShape& shape = {}) {
    TestSession& session = add_session(0, shape);
    bind_peer(session, 1, 0);
    return session;
  }
  /// Adds a session whose slot was drained before.
  void add_again(TestSession& session) {
    proxy->apply(AddSession{session.slot, &session.segment, &session.stats,
                            session.shape.outstanding_max, session.shape.weight});
    proxy->apply(BindBuffer{session.slot, kHandle, &local, kBufferBytes});
  }
  /// Binds a rail peer that has one buffer.
  void bind_peer(const TestSession& session, std::uint16_t rank, fabric::LinkId link,
                 std::uint32_t peer_slot = 0) {
    proxy->apply(
        BindPeer{session.slot, rank, link, &link_stats[link], peer_slot, &remote_flags, kFlags});
    proxy->apply(BindPeerBuffer{session.slot, rank, kHandle, &remote, kBufferBytes});
  }

  /// `count` passes, the clock standing still.
  void steps(int count) {
    for (int i = 0; i < count; ++i) proxy->step();
  }
  /// Passes until one has nothing to do.
  void run() {
    for (int i = 0; i < 100'000; ++i) {
      if (!proxy->step()) return;
    }
    FAIL() << "the proxy found work for 100000 passes";
  }
  /// As `run`, but the window of a partial submission passes too.
  void settle() {
    run();
    now_ns += 1'000'000;
    run();
  }

  template <class T>
  std::vector<T> events_of() const {
    std::vector<T> found;
    for (const auto& event : events) {
      if (const T* one = std::get_if<T>(&event)) found.push_back(*one);
    }
    return found;
  }

  std::uint64_t now_ns = 1'000'000'000;
  FakeLocalRegion local;
  FakeRemoteRegion remote;
  FakeRemoteRegion remote_flags;
  std::vector<LinkStats> link_stats = std::vector<LinkStats>(8);
  std::vector<ProxyEvent> events;
  std::vector<std::unique_ptr<TestSession>>
      sessions;  // before the proxy: it holds pointers into them
  ScriptedEndpoint* endpoint = nullptr;
  std::unique_ptr<Proxy> proxy;
};

}  // namespace mk::daemon::test
