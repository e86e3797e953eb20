// The proxy on its own thread, with producers and a control thread of their own. No timing decides
// anything here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/fabric/null_fabric.h"
#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

#ifdef MK_SANITIZED
constexpr std::uint64_t kCommands = 100'000;
#else
constexpr std::uint64_t kCommands = 2'000'000;
#endif
constexpr auto kDeadline = std::chrono::seconds(100);

/// Events from the proxy's thread, with waits that end.
class EventLog {
 public:
  void add(ProxyEvent event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    changed_.notify_all();
  }
  /// Waits until `count` events of type T are there.
  template <class T>
  std::vector<T> wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    std::vector<T> found;
    changed_.wait_for(lock, kDeadline, [&] {
      found.clear();
      for (const auto& event : events_) {
        if (const T* one = std::get_if<T>(&event)) found.push_back(*one);
      }
      return found.size() >= count;
    });
    return found;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ProxyEvent> events_;
};

std::vector<std::string> thread_names() {
  std::vector<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    names.emplace_back();
    std::getline(file, names.back());
  }
  return names;
}

class ProxyThread : public testing::Test {
 protected:
  void make(const ProxyOptions& options = {}) {
    proxy_ = std::make_unique<Proxy>(fabric::make_null_endpoint({}), options,
                                     [this](ProxyEvent event) { log_.add(std::move(event)); });
  }
  /// Lives until the proxy is gone, whatever way the test ends.
  TestSession& make_session(SessionSlot slot, const SessionShape& shape) {
    sessions_.push_back(std::make_unique<TestSession>(slot, shape));
    return *sessions_.back();
  }
  void add(TestSession& session) {
    proxy_->apply(
        AddSession{session.slot, &session.segment, &session.stats, session.shape.outstanding_max});
    proxy_->apply(BindBuffer{session.slot, kHandle, &local_, kBufferBytes});
    for (std::uint16_t rank = 1; rank <= 2; ++rank) {
      proxy_->apply(BindPeer{session.slot, rank, rank, &link_stats_[rank], 0, &remote_, kFlags});
      proxy_->apply(BindPeerBuffer{session.slot, rank, kHandle, &remote_, kBufferBytes});
    }
  }
  /// Pushes `count` commands on one lane and waits until all have completed; false when the
  /// deadline passed.
  static bool produce(TestSession& session, std::uint32_t lane, std::uint64_t count) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    shm::RingProducer& producer = session.producers[lane];
    const std::uint64_t target = producer.produced + count;
    while (producer.completed() != target) {
      bool pushed = false;
      for (int i = 0; i < 32 && producer.produced != target; ++i) {
        const auto peer = static_cast<std::uint16_t>(1 + producer.produced % 2);
        if (!producer.try_push(write_command(peer, producer.produced % 1000))) break;
        pushed = true;
      }
      if (pushed) continue;
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }

  EventLog log_;
  FakeLocalRegion local_;
  FakeRemoteRegion remote_;
  std::vector<LinkStats> link_stats_ = std::vector<LinkStats>(3);
  std::vector<std::unique_ptr<TestSession>> sessions_;
  std::unique_ptr<Proxy> proxy_;
};

TEST_F(ProxyThread, MovesMillionsOfCommandsOfTwoProducers) {
  TestSession& first = make_session(0, {.lanes = 2});
  TestSession& second = make_session(1, {.slot_count_log2 = 6, .outstanding_max = 32});
  make();
  add(first);
  add(second);
  ASSERT_TRUE(proxy_->start());
  std::atomic<int> done{0};
  std::jthread other([&] { done += produce(second, 0, kCommands / 4) ? 1 : 0; });
  done += produce(first, 0, kCommands / 2) ? 1 : 0;
  done += produce(first, 1, kCommands / 4) ? 1 : 0;
  other.join();
  EXPECT_EQ(done, 3);
  for (SessionSlot slot = 0; slot < 2; ++slot) proxy_->apply(FenceSession{slot});
  EXPECT_EQ(log_.wait_for<Drained>(2).size(), 2u);
  proxy_->stop();
  EXPECT_TRUE(log_.wait_for<SessionFault>(0).empty());
  EXPECT_EQ(link_stats_[1].messages.value() + link_stats_[2].messages.value(), kCommands);
  EXPECT_EQ(link_stats_[1].outstanding.value() + link_stats_[2].outstanding.value(), 0u);
  EXPECT_EQ(first.lane_stats(0).completed.value(), kCommands / 2);
}

TEST_F(ProxyThread, SessionsComeAndGoWhileOthersWork) {
  TestSession& steady = make_session(0, {});
  make();
  add(steady);
  ASSERT_TRUE(proxy_->start());
  std::atomic<bool> steady_done{false};
  std::jthread worker([&] { steady_done = produce(steady, 0, kCommands / 10); });
  constexpr std::size_t kGenerations = 30;
  for (std::size_t generation = 0; generation < kGenerations; ++generation) {
    TestSession& session = make_session(1, {});
    add(session);
    ASSERT_TRUE(produce(session, 0, 100));
    session.push(1, 20);
    proxy_->apply(UnbindBuffer{1, kHandle});
    proxy_->apply(FenceSession{1});
    // Drained: its memory is ours again, and goes with the next turn.
    ASSERT_EQ(log_.wait_for<Drained>(generation + 1).size(), generation + 1);
    ASSERT_EQ(log_.wait_for<BufferReleased>(generation + 1).size(), generation + 1);
  }
  worker.join();
  EXPECT_TRUE(steady_done);
}

TEST_F(ProxyThread, ABrokenSessionDoesNotStopTheThread) {
  TestSession& bad = make_session(0, {});
  TestSession& good = make_session(1, {});
  make();
  add(bad);
  add(good);
  ASSERT_TRUE(proxy_->start());
  bad.push(9);
  const auto faults = log_.wait_for<SessionFault>(1);
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_THAT(faults[0].reason, testing::HasSubstr("peer is rank 9"));
  EXPECT_TRUE(produce(good, 0, 1'000));
}

TEST_F(ProxyThread, CarriesItsNameAndSleepsWhenIdle) {
  ProxyOptions options;
  options.rail = 3;
  options.spin_ns = 0;
  make(options);
  ASSERT_TRUE(proxy_->start());
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (proxy_->stats().sleeps.value() < 10 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  EXPECT_GE(proxy_->stats().sleeps.value(), 10u);
  EXPECT_THAT(thread_names(), testing::Contains("mk-proxy/3"));
}

/// Were it not woken, each answer would take an hour.
// A thread that has slept for long would take the first command of a launch milliseconds late.
TEST_F(ProxyThread, PollsWhereCommandsAreExpected) {
  ProxyRig rig;
  rig.add_session(0);
  rig.settle();
  EXPECT_FALSE(rig.proxy->step());
  rig.proxy->apply(ExpectCommands{0});
  EXPECT_TRUE(rig.proxy->step()) << "as if there had been work";
  EXPECT_FALSE(rig.proxy->step());
}

TEST_F(ProxyThread, MessagesAndStopWakeASleeper) {
  ProxyOptions options;
  options.spin_ns = 0;
  options.sleep_ns_max = 3'600'000'000'000;
  // A clock on which the pause before was long enough for the longest sleep.
  static std::atomic<std::uint64_t> now_ns{1ull << 50};
  options.clock_ns = [] { return now_ns.load(); };
  make(options);
  ASSERT_TRUE(proxy_->start());
  for (SessionSlot slot = 0; slot < 20; ++slot) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    proxy_->apply(FenceSession{slot});
    ASSERT_EQ(log_.wait_for<Drained>(slot + 1).size(), slot + 1);
    now_ns += 1ull << 50;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  proxy_->stop();
}

TEST_F(ProxyThread, StartsOnceStopsTwiceAndStartsAgain) {
  TestSession& session = make_session(0, {});
  make();
  add(session);
  ASSERT_TRUE(proxy_->start());
  const Status again = proxy_->start();
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, ErrorCode::kAlreadyExists);
  proxy_->stop();
  proxy_->stop();
  ASSERT_TRUE(proxy_->start());
  EXPECT_TRUE(produce(session, 0, 100));
}

TEST_F(ProxyThread, RefusesACpuThatIsNotThere) {
  ProxyOptions options;
  options.cpu = CPU_SETSIZE - 1;
  make(options);
  const Status started = proxy_->start();
  ASSERT_FALSE(started);
  EXPECT_THAT(started.error().message, testing::HasSubstr("CPU 1023"));
  options.cpu = 1 << 20;
  make(options);
  EXPECT_EQ(proxy_->start().error().code, ErrorCode::kInvalidArgument);
}

TEST_F(ProxyThread, RunsPinned) {
  ProxyOptions options;
  options.cpu = ::sched_getcpu();
  make(options);
  TestSession& session = make_session(0, {});
  add(session);
  ASSERT_TRUE(proxy_->start());
  EXPECT_TRUE(produce(session, 0, 1'000));
}

}  // namespace
}  // namespace mk::daemon::test
