// Framed messages: whole, in pieces, queued, late, from several threads.
#include "shm/host/unix_socket.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "shm/limits.h"
#include "socket_support.h"

namespace mk::shm {
namespace {

using namespace std::chrono_literals;
using namespace mk::shm::test;

class RoundTrip : public testing::TestWithParam<std::size_t> {};

TEST_P(RoundTrip, Blocking) {
  const NoFdLeak no_leak;
  Pair pair;
  const Bytes payload = pattern(GetParam());
  std::thread sender([&] {
    for (std::uint16_t i = 1; i <= 3; ++i) {
      const auto status = pair.a.send(i, 1000u + i, payload, {}, in_seconds(kGenerousSeconds));
      EXPECT_TRUE(status) << status.error().message;
    }
  });
  for (std::uint16_t i = 1; i <= 3; ++i) {
    const auto frame = pair.b.receive(in_seconds(kGenerousSeconds));
    ASSERT_TRUE(frame) << frame.error().message;
    EXPECT_EQ(frame->type, i);
    EXPECT_EQ(frame->request, 1000u + i);
    EXPECT_EQ(frame->payload, payload);
    EXPECT_TRUE(frame->fds.empty());
  }
  sender.join();
}

TEST_P(RoundTrip, EventLoop) {
  const NoFdLeak no_leak;
  Pair pair;
  const Bytes payload = pattern(GetParam(), 7);
  ASSERT_TRUE(pair.a.queue_send(9, ~0ull, payload, {}));
  ASSERT_TRUE(pair.a.queue_send(10, 0, payload.size() > 100 ? Bytes{} : payload, {}));
  std::vector<Frame> frames;
  const auto deadline = in_seconds(kGenerousSeconds);
  while (frames.size() < 2 && std::chrono::steady_clock::now() < deadline) {
    ASSERT_TRUE(pair.a.flush());
    auto frame = pair.b.try_receive();
    ASSERT_TRUE(frame) << frame.error().message;
    if (*frame) frames.push_back(std::move(**frame));
  }
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_FALSE(pair.a.has_queued());
  EXPECT_EQ(frames[0].type, 9);
  EXPECT_EQ(frames[0].request, ~0ull);
  EXPECT_EQ(frames[0].payload, payload);
  EXPECT_EQ(frames[1].type, 10);
}

INSTANTIATE_TEST_SUITE_P(Sizes, RoundTrip,
                         testing::Values(0, 1, 15, 16, 17, 4095, 4096, 256 * 1024 - 1, 256 * 1024,
                                         256 * 1024 + 1, 1024 * 1024, kMessageBytesMax));

TEST(FrameSocket, OneByteTooManyIsRefusedBeforeItIsSent) {
  Pair pair;
  const Bytes payload(kMessageBytesMax + 1);
  expect_error(pair.a.send(1, 1, payload, {}, in_seconds(1)).error(), ErrorCode::kLimitExceeded,
               "4194305");
  expect_error(pair.a.queue_send(1, 1, payload, {}).error(), ErrorCode::kLimitExceeded, "4194305");
  EXPECT_FALSE(pair.a.has_queued());
  ASSERT_TRUE(pair.a.send(2, 2, {}, {}, in_seconds(kGenerousSeconds)));
  EXPECT_EQ(pair.b.receive(in_seconds(kGenerousSeconds))->type, 2);
}

TEST(FrameSocket, AFrameThatArrivesByteByByteIsTakenWhenWhole) {
  const NoFdLeak no_leak;
  Pair pair;
  const BufferFile file = numbered(77);
  const int fd = file.fd();
  Bytes bytes = raw_frame(40, 3, 0, 40);
  const Bytes payload = pattern(40);
  std::copy(payload.begin(), payload.end(), bytes.begin() + 16);
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      auto frame = pair.b.try_receive();
      ASSERT_TRUE(frame);
      ASSERT_FALSE(frame->has_value()) << i;
      send_raw(pair.a.fd(), std::span(bytes).subspan(i, 1),
               i == 0 ? std::span(&fd, 1) : std::span<const int>());
    }
    auto frame = pair.b.try_receive();
    ASSERT_TRUE(frame && *frame);
    EXPECT_EQ((*frame)->payload, payload);
    ASSERT_EQ((*frame)->fds.size(), 1u);
    EXPECT_EQ(number_of((*frame)->fds[0]), 77);
  }
}

TEST(FrameSocket, ManyFramesInOnePieceAreTakenOneByOne) {
  Pair pair;
  Bytes bytes;
  for (std::uint16_t i = 0; i < 100; ++i) {
    const Bytes frame = raw_frame(i, i, 0, i);
    bytes.insert(bytes.end(), frame.begin(), frame.end());
  }
  send_raw(pair.a.fd(), bytes);
  for (std::uint16_t i = 0; i < 100; ++i) {
    auto frame = pair.b.try_receive();
    ASSERT_TRUE(frame && *frame);
    EXPECT_EQ((*frame)->type, i);
    EXPECT_EQ((*frame)->payload.size(), i);
  }
  EXPECT_FALSE(pair.b.try_receive()->has_value());
}

TEST(FrameSocketDeadline, ReceiveTimesOutAndCanBeContinued) {
  Pair pair;
  expect_error(pair.b.receive(std::chrono::steady_clock::now() - 1h).error(), ErrorCode::kTimeout,
               "no message from");
  expect_error(pair.b.receive(std::chrono::steady_clock::now() + 5ms).error(), ErrorCode::kTimeout,
               "no message from");
  const Bytes bytes = raw_frame(20, 6, 0, 20);
  send_raw(pair.a.fd(), std::span(bytes).first(18));
  expect_error(pair.b.receive(std::chrono::steady_clock::now() + 5ms).error(), ErrorCode::kTimeout,
               "no message from");
  send_raw(pair.a.fd(), std::span(bytes).subspan(18));
  const auto frame = pair.b.receive(std::chrono::steady_clock::time_point::max());
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->type, 6);
}

TEST(FrameSocketDeadline, ASendCutShortEndsTheConnection) {
  const NoFdLeak no_leak;
  Pair pair;
  const int fd = 0;
  const auto status = pair.a.send(1, 1, Bytes(kMessageBytesMax), std::span(&fd, 1),
                                  std::chrono::steady_clock::now() + 20ms);
  ASSERT_FALSE(status);
  expect_error(status.error(), ErrorCode::kTimeout, "did not read in time");
  EXPECT_EQ(pair.a.send(1, 1, {}, {}, in_seconds(kGenerousSeconds)).error().code,
            ErrorCode::kUnavailable);
  expect_error(pair.b.receive(in_seconds(kGenerousSeconds)).error(), ErrorCode::kUnavailable,
               "middle of a message");
}

TEST(FrameSocketDeadline, ASendThatNeverBeganLeavesTheConnectionWhole) {
  Pair pair;
  int sent = 0;
  while (true) {  // fill the kernel's buffer with whole frames
    const auto status = pair.a.send(1, 1, {}, {}, std::chrono::steady_clock::now());
    if (!status) {
      expect_error(status.error(), ErrorCode::kTimeout, "did not read in time");
      break;
    }
    ASSERT_LT(++sent, 1'000'000);
  }
  for (int i = 0; i < sent; ++i) ASSERT_TRUE(pair.b.receive(in_seconds(kGenerousSeconds)));
  ASSERT_TRUE(pair.a.send(2, 1, {}, {}, in_seconds(kGenerousSeconds)));
  EXPECT_EQ(pair.b.receive(in_seconds(kGenerousSeconds))->type, 2);
}

TEST(FrameSocketDeadline, SendFirstSendsWhatIsQueued) {
  Pair pair;
  ASSERT_TRUE(pair.a.queue_send(1, 1, Bytes(kMessageBytesMax), {}));
  ASSERT_TRUE(pair.a.has_queued());
  expect_error(pair.a.send(2, 1, {}, {}, std::chrono::steady_clock::now() + 5ms).error(),
               ErrorCode::kTimeout, "did not read");
  std::thread sender([&] { EXPECT_TRUE(pair.a.send(3, 1, {}, {}, in_seconds(kGenerousSeconds))); });
  EXPECT_EQ(pair.b.receive(in_seconds(kGenerousSeconds))->type, 1);
  EXPECT_EQ(pair.b.receive(in_seconds(kGenerousSeconds))->type, 3);
  sender.join();
}

TEST(FrameSocketQueue, IsBoundedAndUsableAgainWhenThePeerReads) {
  const NoFdLeak no_leak;
  Pair pair;
  const Bytes payload = pattern(1024 * 1024);
  int accepted = 0;
  Status status;
  const int fd = 0;
  while ((status = pair.a.queue_send(1, 1, payload, std::span(&fd, 1)))) ASSERT_LT(++accepted, 100);
  expect_error(status.error(), ErrorCode::kLimitExceeded, "does not read");
  EXPECT_GE(accepted, 7);
  int received = 0;
  const auto deadline = in_seconds(kGenerousSeconds);
  while (received < accepted && std::chrono::steady_clock::now() < deadline) {
    ASSERT_TRUE(pair.a.flush());
    auto frame = pair.b.try_receive();
    ASSERT_TRUE(frame);
    if (!*frame) continue;
    EXPECT_EQ((*frame)->payload, payload);
    EXPECT_EQ((*frame)->fds.size(), 1u);
    ++received;
  }
  EXPECT_EQ(received, accepted);
  EXPECT_FALSE(pair.a.has_queued());
  EXPECT_TRUE(pair.a.queue_send(1, 1, payload, {}));
}

TEST(FrameSocketThreads, OneSendsWhileAnotherReceives) {
  Pair pair;
  constexpr std::uint64_t kFrames = 3000;
  const auto deadline = in_seconds(kGenerousSeconds);
  const auto send_all = [&](FrameSocket& socket) {
    for (std::uint64_t i = 0; i < kFrames; ++i) {
      ASSERT_TRUE(
          socket.send(static_cast<std::uint16_t>(i), i, pattern(i * 7 % 5000, 3), {}, deadline));
    }
  };
  const auto receive_all = [&](FrameSocket& socket) {
    for (std::uint64_t i = 0; i < kFrames; ++i) {
      const auto frame = socket.receive(deadline);
      ASSERT_TRUE(frame) << frame.error().message;
      ASSERT_EQ(frame->request, i);
      ASSERT_EQ(frame->payload, pattern(i * 7 % 5000, 3));
    }
  };
  std::vector<std::thread> threads;
  threads.emplace_back([&] { send_all(pair.a); });
  threads.emplace_back([&] { send_all(pair.b); });
  threads.emplace_back([&] { receive_all(pair.a); });
  receive_all(pair.b);
  for (auto& thread : threads) thread.join();
}

TEST(FrameSocketThreads, ShutdownWakesAReceiver) {
  Pair pair;
  std::thread receiver([&] {
    const auto frame = pair.a.receive(in_seconds(kGenerousSeconds));
    ASSERT_FALSE(frame);
    EXPECT_EQ(frame.error().code, ErrorCode::kUnavailable);
  });
  std::this_thread::sleep_for(10ms);
  pair.a.shutdown();
  receiver.join();
}

TEST(FrameSocketThreads, SignalsInterruptNothing) {
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) {};  // and no SA_RESTART
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  Pair pair;
  const Bytes payload = pattern(kMessageBytesMax);
  std::atomic<bool> done = false;
  std::thread sender([&] {
    for (int i = 0; i < 4; ++i)
      EXPECT_TRUE(pair.a.send(1, 1, payload, {}, in_seconds(kGenerousSeconds)));
  });
  std::thread receiver([&] {
    for (int i = 0; i < 4; ++i)
      EXPECT_EQ(pair.b.receive(in_seconds(kGenerousSeconds))->payload, payload);
    done = true;
  });
  while (!done) {
    ::pthread_kill(sender.native_handle(), SIGUSR1);
    ::pthread_kill(receiver.native_handle(), SIGUSR1);
    std::this_thread::sleep_for(100us);
  }
  sender.join();
  receiver.join();
  ASSERT_EQ(::sigaction(SIGUSR1, &before, nullptr), 0);
}

TEST(FrameSocket, CredentialsAreThePeers) {
  Pair pair;
  const auto credentials = pair.a.credentials();
  ASSERT_TRUE(credentials);
  EXPECT_EQ(credentials->pid, ::getpid());
  EXPECT_EQ(credentials->uid, ::getuid());
  EXPECT_EQ(credentials->gid, ::getgid());
}

TEST(FrameSocket, NoSocketIsAnErrorEverywhere) {
  const NoFdLeak no_leak;
  FrameSocket nothing{UniqueFd()};
  EXPECT_FALSE(nothing.receive(in_seconds(1)));
  EXPECT_FALSE(nothing.try_receive());
  EXPECT_FALSE(nothing.send(1, 1, {}, {}, in_seconds(1)));
  EXPECT_FALSE(nothing.credentials());
}

}  // namespace
}  // namespace mk::shm
