// Descriptors beside frames, and peers that send what they should not or go away.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "shm/host/unix_socket.h"
#include "shm/limits.h"
#include "socket_support.h"

namespace mk::shm {
namespace {

using namespace mk::shm::test;

TEST(FrameSocketFds, EveryAllowedNumberArrivesInOrderCloexec) {
  const NoFdLeak no_leak;
  for (const bool queued : {false, true}) {
    for (std::size_t count = 0; count <= kFrameFdsMax; ++count) {
      Pair pair;
      std::vector<BufferFile> files;
      std::vector<int> fds;
      for (std::size_t i = 0; i < count; ++i) {
        files.push_back(numbered(static_cast<std::uint8_t>(10 + i)));
        fds.push_back(files.back().fd());
      }
      ASSERT_TRUE(queued ? pair.a.queue_send(1, 1, pattern(10), fds)
                         : pair.a.send(1, 1, pattern(10), fds, in_seconds(kGenerousSeconds)));
      files.clear();  // what was sent no longer depends on the sender's own
      const auto frame = pair.b.receive(in_seconds(kGenerousSeconds));
      ASSERT_TRUE(frame);
      ASSERT_EQ(frame->fds.size(), count);
      for (std::size_t i = 0; i < count; ++i) {
        EXPECT_EQ(number_of(frame->fds[i]), 10 + i);
        EXPECT_NE(::fcntl(frame->fds[i].get(), F_GETFD) & FD_CLOEXEC, 0);
      }
    }
  }
}

TEST(FrameSocketFds, EachFrameKeepsItsOwn) {
  const NoFdLeak no_leak;
  Pair pair;
  const BufferFile one = numbered(1);
  const BufferFile two = numbered(2);
  const int fds[] = {one.fd(), two.fd()};
  const auto deadline = in_seconds(kGenerousSeconds);
  ASSERT_TRUE(pair.a.send(1, 1, pattern(5), {}, deadline));
  ASSERT_TRUE(pair.a.send(2, 2, pattern(6), std::span(fds, 1), deadline));
  ASSERT_TRUE(pair.a.send(3, 3, {}, {}, deadline));
  ASSERT_TRUE(pair.a.send(4, 4, {}, std::span(fds + 1, 1), deadline));
  ASSERT_TRUE(pair.a.send(5, 5, {}, std::span(fds, 2), deadline));
  for (const std::vector<int>& expected : std::vector<std::vector<int>>{{}, {1}, {}, {2}, {1, 2}}) {
    const auto frame = pair.b.receive(deadline);
    ASSERT_TRUE(frame);
    ASSERT_EQ(frame->fds.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_EQ(number_of(frame->fds[i]), expected[i]);
  }
}

TEST(FrameSocketFds, AFrameSentInManyPiecesCarriesThemOnce) {
  const NoFdLeak no_leak;
  Pair pair;
  const int fds[] = {0, 1};
  const Bytes payload = pattern(kMessageBytesMax);
  std::thread sender(
      [&] { EXPECT_TRUE(pair.a.send(1, 1, payload, fds, in_seconds(kGenerousSeconds))); });
  const auto frame = pair.b.receive(in_seconds(kGenerousSeconds));
  sender.join();
  ASSERT_TRUE(frame) << frame.error().message;
  EXPECT_EQ(frame->fds.size(), 2u);
  EXPECT_EQ(frame->payload, payload);
}

TEST(FrameSocketFds, TooManyAreRefusedBeforeTheyAreSent) {
  const NoFdLeak no_leak;
  Pair pair;
  const std::vector<int> fds(kFrameFdsMax + 1, 0);
  expect_error(pair.a.send(1, 1, {}, fds, in_seconds(1)).error(), ErrorCode::kInvalidArgument,
               "at most 4");
  expect_error(pair.a.queue_send(1, 1, {}, fds).error(), ErrorCode::kInvalidArgument, "at most 4");
}

TEST(FrameSocketFds, ABadDescriptorIsAnErrorAndLosesNothing) {
  const NoFdLeak no_leak;
  Pair pair;
  const int fds[] = {0, -1};
  EXPECT_FALSE(pair.a.send(1, 1, {}, fds, in_seconds(1)));
  EXPECT_FALSE(pair.a.queue_send(1, 1, {}, fds));
  EXPECT_FALSE(pair.a.has_queued());
  ASSERT_TRUE(pair.a.send(2, 1, {}, {}, in_seconds(kGenerousSeconds)));
  EXPECT_EQ(pair.b.receive(in_seconds(kGenerousSeconds))->type, 2);
}

TEST(FrameSocketFds, SurplusFromAPeerIsAnErrorAndIsClosed) {
  for (const std::size_t count :
       {kFrameFdsMax + 1, kFrameFdsMax + 2, std::size_t{100}, std::size_t{253}}) {
    const NoFdLeak no_leak;
    Pair pair;
    const std::vector<int> fds(count, 0);
    send_raw(pair.a.fd(), raw_frame(0, 1, 0, 0), fds);
    const std::size_t before = test::open_fd_count();
    const auto frame = pair.b.receive(in_seconds(kGenerousSeconds));
    ASSERT_FALSE(frame);
    expect_error(frame.error(), ErrorCode::kProtocol, "more than 4 descriptors");
    EXPECT_EQ(test::open_fd_count(), before) << "descriptors of a refused frame are still open";
  }
}

TEST(FrameSocketFds, SurplusInPortionsIsAnErrorAndIsClosed) {
  const NoFdLeak no_leak;
  Pair pair;
  const int fds[] = {0, 1, 2};
  const Bytes bytes = raw_frame(100, 1, 0, 100);
  const std::size_t before = test::open_fd_count();
  send_raw(pair.a.fd(), std::span(bytes).first(20), fds);
  ASSERT_TRUE(pair.b.try_receive());
  send_raw(pair.a.fd(), std::span(bytes).subspan(20), fds);
  expect_error(pair.b.try_receive().error(), ErrorCode::kProtocol, "more than 4 descriptors");
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(FrameSocketFds, OneThatCannotBeOpenedHereIsNotLostSilently) {
  const NoFdLeak no_leak;
  Pair pair;
  const int fds[] = {0, 1};
  ASSERT_TRUE(pair.a.send(1, 1, {}, fds, in_seconds(kGenerousSeconds)));
  NoFdsLeft no_fds_left;
  const auto frame = pair.b.receive(in_seconds(kGenerousSeconds));
  no_fds_left.end();
  ASSERT_FALSE(frame);
  expect_error(frame.error(), ErrorCode::kProtocol, "may open no more files");
}

TEST(FrameSocketFds, AClosedSocketReleasesWhatWasReceivedAndQueued) {
  const NoFdLeak no_leak;
  Pair pair;
  const int fds[] = {0, 1};
  send_raw(pair.a.fd(), raw_frame(100, 1, 0, 0), fds);
  ASSERT_FALSE(pair.b.try_receive()->has_value());  // half a frame with descriptors
  const Bytes large(kMessageBytesMax);
  ASSERT_TRUE(pair.b.queue_send(1, 1, large, fds));
  ASSERT_TRUE(pair.b.queue_send(1, 1, {}, fds));
  EXPECT_TRUE(pair.b.has_queued());
}

TEST(FrameSocketHostile, MalformedHeadersAreRefusedForGood) {
  for (const Bytes& bytes : {raw_frame(kMessageBytesMax + 1, 1, 0, 0), raw_frame(~0u, 1, 0, 0),
                             raw_frame(0, 1, 1, 0), raw_frame(0, 1, 0x8000, 0)}) {
    const NoFdLeak no_leak;
    Pair pair;
    const int fds[] = {0, 1};
    send_raw(pair.a.fd(), bytes, fds);
    expect_error(pair.b.receive(in_seconds(kGenerousSeconds)).error(), ErrorCode::kProtocol,
                 "malformed header");
    send_raw(pair.a.fd(), raw_frame(0, 1, 0, 0));
    expect_error(pair.b.receive(in_seconds(kGenerousSeconds)).error(), ErrorCode::kProtocol,
                 "malformed header");
    expect_error(pair.b.try_receive().error(), ErrorCode::kProtocol, "malformed header");
  }
}

TEST(FrameSocketHostile, APeerThatClosesIsNamedAndWhere) {
  const NoFdLeak no_leak;
  const std::string self = "process " + std::to_string(::getpid());
  for (const std::size_t sent : {0u, 1u, 15u, 16u, 17u, 115u}) {
    Pair pair;
    const int fd = 0;
    const Bytes half = raw_frame(100, 1, 0, 100);
    if (sent > 0) send_raw(pair.a.fd(), std::span(half).first(sent), std::span(&fd, 1));
    { const FrameSocket gone = std::move(pair.a); }
    const auto frame = pair.b.receive(in_seconds(kGenerousSeconds));
    ASSERT_FALSE(frame);
    expect_error(frame.error(), ErrorCode::kUnavailable, "closed by peer");
    expect_error(frame.error(), ErrorCode::kUnavailable, self);
    EXPECT_EQ(frame.error().message.find("middle of a message") != std::string::npos, sent > 0);
    expect_error(pair.b.try_receive().error(), ErrorCode::kUnavailable, "closed by peer");
  }
}

TEST(FrameSocketHostile, WholeFramesBeforeTheCloseStillArrive) {
  Pair pair;
  ASSERT_TRUE(pair.a.send(1, 1, pattern(1000), {}, in_seconds(kGenerousSeconds)));
  { const FrameSocket gone = std::move(pair.a); }
  EXPECT_EQ(pair.b.receive(in_seconds(kGenerousSeconds))->payload, pattern(1000));
  EXPECT_EQ(pair.b.receive(in_seconds(kGenerousSeconds)).error().code, ErrorCode::kUnavailable);
}

TEST(FrameSocketHostile, SendingToAClosedPeerIsAnErrorAndNoSignal) {
  Pair pair;
  { const FrameSocket gone = std::move(pair.b); }
  expect_error(pair.a.send(1, 1, {}, {}, in_seconds(1)).error(), ErrorCode::kUnavailable,
               "closed by peer");
  expect_error(pair.a.queue_send(1, 1, {}, {}).error(), ErrorCode::kUnavailable, "closed by peer");
  EXPECT_FALSE(pair.a.has_queued());
}

}  // namespace
}  // namespace mk::shm
