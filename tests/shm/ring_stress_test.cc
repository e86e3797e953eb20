// Producer and consumer at the same time: as two threads and as two processes over a real segment.
// Every command's content is checked, and the payload it names, and that source bytes are reused
// only when completed.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "shm/flag.h"
#include "shm/host/segment.h"
#include "support.h"
#include "test_ring.h"

namespace mk::shm {
namespace {

using test::in_seconds;
using test::TestRing;

constexpr int kDeadlineSeconds = 250;

/// The same under sanitizers; MK_STRESS_COMMANDS sets it for a longer or shorter run.
std::uint64_t command_count() {
  const char* text = std::getenv("MK_STRESS_COMMANDS");
  return text == nullptr ? 20'000'000 : std::strtoull(text, nullptr, 10);
}

/// A cheaper command than command_of, yet every word depends on the number.
Command quick_command(std::uint64_t number) {
  Command command;
  command.opcode = static_cast<Opcode>(number & 0xff);
  command.peer = static_cast<std::uint16_t>(number * 3);
  command.src_handle = static_cast<std::uint16_t>(number * 5);
  command.dst_handle = static_cast<std::uint16_t>(number * 7);
  command.src_offset = (number * 0x9e3779b97f4a7c15ull) & kOffsetMask;
  command.dst_offset = (number ^ 0x5555'5555'5555ull) & kOffsetMask;
  command.bytes = static_cast<std::uint32_t>(number * 11);
  command.flag_index = static_cast<std::uint32_t>(number * 13);
  command.epoch = static_cast<std::uint32_t>(number);
  command.commit_time_ns = static_cast<std::uint32_t>(~number);
  return command;
}

/// Spins for a while, then yields: the tests also run on one busy core. Ends the process when
/// nothing happens for long.
class Waiter {
 public:
  void progress() { spins_ = 0; }
  void wait() {
    if (++spins_ % 64 != 0) return;
    ::sched_yield();
    if (spins_ % kSpinsPerLook != 0) return;
    // The clock starts when a wait turns out to be long: on a busy machine the whole test is.
    if (spins_ == kSpinsPerLook) {
      deadline_ = in_seconds(kDeadlineSeconds);
    } else if (std::chrono::steady_clock::now() > deadline_) {
      std::fprintf(stderr, "ring stress: no progress\n");
      std::abort();
    }
  }

 private:
  static constexpr std::uint64_t kSpinsPerLook = 64 * 1024;
  std::uint64_t spins_ = 0;
  std::chrono::steady_clock::time_point deadline_;
};

/// Payload words behind the commands: plain memory that the ring's ordering alone must protect.
/// Word n is written before command n and again only when command n has completed.
struct Payload {
  std::uint64_t* words;
  std::uint64_t mask;
};

void produce(RingProducer producer, Payload payload, std::uint64_t count) {
  const std::uint64_t first = producer.produced;
  std::uint64_t completed = producer.completed();
  Waiter waiter;
  for (std::uint64_t n = 0; n < count; ++n) {
    while (first + n - completed > payload.mask) {
      completed = producer.completed();
      waiter.wait();
    }
    payload.words[n & payload.mask] = n * 0x2545f4914f6cdd1dull;
    const Command command = quick_command(n);
    while (!producer.try_push(command)) waiter.wait();
    waiter.progress();
  }
}

/// The same, up to 20 commands written before the first of them is committed, in two commits.
void produce_batches(RingProducer producer, Payload payload, std::uint64_t count) {
  const std::uint64_t first = producer.produced;
  Waiter waiter;
  for (std::uint64_t n = 0; n < count;) {
    const std::uint64_t most = std::min(producer.ring.slot_count(), payload.mask + 1);
    const std::uint64_t batch = std::min({1 + n % 20, most, count - n});
    while (!producer.has_credits(batch) ||
           first + n + batch - producer.completed() > payload.mask + 1)
      waiter.wait();
    for (std::uint64_t i = 0; i < batch; ++i) producer.write(i, quick_command(n + i));
    const std::uint64_t part = n % (batch + 1);
    for (std::uint64_t i = 0; i < batch; ++i) {
      if (i == part) producer.commit(part);
      payload.words[(n + i) & payload.mask] = (n + i) * 0x2545f4914f6cdd1dull;
    }
    producer.commit(part == batch ? batch : batch - part);
    n += batch;
    waiter.progress();
  }
}

/// Returns the number of wrong commands; batches like the proxy, publishing at uneven intervals.
std::uint64_t consume(RingConsumer consumer, Payload payload, std::uint64_t count) {
  std::uint64_t wrong = 0;
  std::uint64_t unpublished = 0;
  Waiter waiter;
  for (std::uint64_t n = 0; n < count;) {
    std::uint64_t words[kCommandWords];
    if (!consumer.try_take(words)) {
      consumer.publish_consumed();
      consumer.publish_completed(std::exchange(unpublished, 0));
      waiter.wait();
      continue;
    }
    waiter.progress();
    wrong += !(decode(words) == quick_command(n)) || !reserved_bits_clear(words) ||
             !consumer.sequence_matches(words);
    wrong += payload.words[n & payload.mask] != n * 0x2545f4914f6cdd1dull;
    ++n;
    ++unpublished;
    if (n % 7 == 0) consumer.publish_consumed();
    if (n % 13 == 0) consumer.publish_completed(std::exchange(unpublished, 0));
  }
  consumer.publish_consumed();
  consumer.publish_completed(unpublished);
  return wrong;
}

void run_threads(std::uint32_t log2, std::uint64_t first, std::uint64_t count,
                 void (*produce_all)(RingProducer, Payload, std::uint64_t) = produce) {
  SCOPED_TRACE(testing::Message() << "2^" << log2 << " slots from " << first);
  TestRing ring(log2, first);
  std::vector<std::uint64_t> words(64);
  const Payload payload{words.data(), words.size() - 1};
  std::thread producer([&] { produce_all(ring.producer, payload, count); });
  EXPECT_EQ(consume(ring.consumer, payload, count), 0u);
  producer.join();
  EXPECT_EQ(ring.view().control->produced, first + count);
  EXPECT_EQ(ring.view().control->consumed, first + count);
  EXPECT_EQ(ring.view().control->completed, first + count);
}

TEST(RingThreads, TensOfMillionsOfCommands) { run_threads(10, 0, command_count()); }

TEST(RingThreads, SmallestRing) { run_threads(4, 0, command_count() / 8); }

TEST(RingThreads, ManyCommandsWrittenAheadOfTheirCommit) {
  run_threads(10, 0, command_count() / 4, produce_batches);
  run_threads(4, (1ull << 32) - 1000, command_count() / 16, produce_batches);
}

TEST(RingThreads, OverTheWrapOfTheSequence) {
  const std::uint64_t count = command_count() / 8;
  run_threads(6, (1ull << 32) - count / 2, count);
}

TEST(RingProcesses, TensOfMillionsOfCommandsOverASegment) {
  const std::uint64_t count = command_count();
  auto made = Segment::create({2, 8, 128}, 1, 1, 0, 0);
  ASSERT_TRUE(made) << made.error().message;
  // The payload is in the segment too: the second lane's slots, as plain words.
  const Payload payload{made->ring(1).slots[0].words, 255};
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {  // the client: maps the descriptor it was handed
    auto mapped = Segment::map(UniqueFd(::dup(made->fd())));
    if (!mapped || mapped->ring(0).slots == made->ring(0).slots) ::_exit(2);
    produce(RingProducer{mapped->ring(0)}, Payload{mapped->ring(1).slots[0].words, 255}, count);
    // Waits for the daemon's verdict as a kernel would wait for a flag.
    Waiter waiter;
    while (!flag_reached(&mapped->flags()[64], 1)) waiter.wait();
    ::_exit(mapped->ring(0).control->completed == count ? 0 : 3);
  }
  EXPECT_EQ(consume(RingConsumer{made->ring(0)}, payload, count), 0u);
  flag_publish(&made->flags()[64], 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(load_acquire(&made->ring(0).control->produced), count);
}

TEST(RingProcesses, AProducerKilledInTheMiddleLeavesWholeCommands) {
  auto made = Segment::create({1, 16, 64}, 1, 1, 0, 0);
  ASSERT_TRUE(made) << made.error().message;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RingProducer producer{made->ring(0)};
    for (std::uint64_t n = 0;; ++n) {
      while (!producer.try_push(quick_command(n))) ::sched_yield();
    }
  }
  RingConsumer consumer{made->ring(0)};
  std::uint64_t n = 0;
  std::uint64_t words[kCommandWords];
  Waiter waiter;
  const auto check_until = [&](std::uint64_t end) {
    for (; n < end && consumer.try_take(words); ++n) {
      ASSERT_EQ(decode(words), quick_command(n));
      ASSERT_TRUE(consumer.sequence_matches(words));
      consumer.publish_consumed();
    }
  };
  while (n < 100'000 && !testing::Test::HasFatalFailure()) {
    check_until(100'000);
    waiter.wait();
  }
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  check_until(~std::uint64_t{0});
  EXPECT_GE(n, 100'000u);
}

}  // namespace
}  // namespace mk::shm
