// The client against a daemon that misbehaves: every answer a socket can give at every step of the
// conversation.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <tuple>
#include <utility>

#include "mkernel/mkernel.h"
#include "shm/host/process_fd.h"
#include "shm/host/protocol.h"
#include "shm/host/segment.h"
#include "shm/host/unix_socket.h"

namespace mk {
namespace {

using namespace std::chrono_literals;
using shm::FrameSocket;

auto soon() { return std::chrono::steady_clock::now() + 20s; }

/// One connection of a daemon made of `conversation`.
class FakeDaemon {
 public:
  explicit FakeDaemon(std::function<void(FrameSocket&)> conversation)
      : path_(fmt::format("@mk-fake-{}-{}", ::getpid(), ++counter_)),
        listener_(*shm::FrameListener::listen(path_)) {
    thread_ = std::thread([this, conversation = std::move(conversation)] {
      while (std::chrono::steady_clock::now() < deadline_) {
        auto accepted = listener_.try_accept();
        ASSERT_TRUE(accepted);
        if (*accepted) {
          conversation(**accepted);
          return;
        }
        std::this_thread::sleep_for(1ms);
      }
    });
  }
  ~FakeDaemon() { thread_.join(); }

  AttachOptions options() const {
    AttachOptions options;
    options.socket = path_;
    options.job = "job";
    options.timeout = 10s;
    return options;
  }

 private:
  static inline int counter_ = 0;
  std::string path_;
  shm::FrameListener listener_;
  std::chrono::steady_clock::time_point deadline_ = soon();
  std::thread thread_;
};

template <class Message>
void answer(FrameSocket& socket, const shm::Frame& request, const Message& message,
            std::span<const int> fds = {}) {
  (void)socket.send(static_cast<std::uint16_t>(Message::kType), request.request,
                    shm::encode_message(message), fds, soon());
}

shm::Frame expect(FrameSocket& socket, shm::MessageType type) {
  auto frame = socket.receive(soon());
  EXPECT_TRUE(frame) << frame.error().message;
  if (!frame) return {};
  EXPECT_EQ(static_cast<std::uint16_t>(type), frame->type);
  return std::move(*frame);
}

void say_hello(FrameSocket& socket) {
  const auto hello = expect(socket, shm::MessageType::kHello);
  answer(socket, hello, shm::HelloReply{shm::kAbiMajor, shm::kAbiMinor, 1, "9.9.9"});
}

void wait_for_close(FrameSocket& socket) {
  while (socket.receive(soon())) {
  }
}

shm::Segment a_segment() {
  auto segment =
      shm::Segment::create({.lane_count = 2, .slot_count_log2 = 6, .flag_count = 64}, 1, 1, 0, 0);
  EXPECT_TRUE(segment);
  segment->header().heartbeat_ns = shm::monotonic_ns();
  return std::move(*segment);
}

/// Set by a test once its Session is attached: what happens before that is attach's own answer.
std::atomic<bool> client_attached{false};

Result<Session> attach_to(const AttachOptions& options) {
  auto session = Session::attach(options);
  client_attached.store(true);
  return session;
}

/// Attaches a client and brings its job of one rank up; `after` goes on once the client knows.
std::function<void(FrameSocket&)> attached(std::function<void(FrameSocket&, shm::Segment&)> after) {
  return [after = std::move(after)](FrameSocket& socket) {
    say_hello(socket);
    const auto attach = expect(socket, shm::MessageType::kAttach);
    auto segment = a_segment();
    const int fd = segment.fd();
    answer(socket, attach, shm::AttachReply{1, 0, segment.bytes(), "fake"}, std::span(&fd, 1));
    client_attached.store(false);
    answer(socket, shm::Frame{}, shm::JobUp{});
    while (!client_attached.load()) std::this_thread::sleep_for(1ms);
    after(socket, segment);
  };
}

void expect_attach_error(const FakeDaemon& daemon, ErrorCode code, const std::string& words,
                         std::chrono::milliseconds timeout = 10s) {
  AttachOptions options = daemon.options();
  options.timeout = timeout;
  const auto session = Session::attach(options);
  ASSERT_FALSE(session);
  EXPECT_EQ(code, session.error().code) << session.error().message;
  EXPECT_NE(std::string::npos, session.error().message.find(words)) << session.error().message;
}

TEST(Attach, NobodyListening) {
  AttachOptions options;
  options.socket = fmt::format("@mk-nobody-{}", ::getpid());
  options.job = "job";
  const auto session = Session::attach(options);
  ASSERT_FALSE(session);
  EXPECT_EQ(ErrorCode::kUnavailable, session.error().code) << session.error().message;
  EXPECT_NE(std::string::npos, session.error().message.find(options.socket))
      << session.error().message;
}

TEST(Attach, WrongArgumentsAreRefusedBeforeAnythingIsOpened) {
  const auto refused = [](auto&& change) {
    AttachOptions options;
    options.socket = "@nowhere";
    options.job = "job";
    change(options);
    const auto session = Session::attach(options);
    return !session && (session.error().code == ErrorCode::kInvalidArgument ||
                        session.error().code == ErrorCode::kLimitExceeded);
  };
  EXPECT_FALSE(refused([](AttachOptions&) {}));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.job.clear(); }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.job.assign(shm::kJobNameBytesMax + 1, 'x'); }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.world = 2; }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.nodes = 0; }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.rank = 1; }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.node_rank = 1; }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.local_rank = 1; }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.local_size = o.world = shm::kLocalRanksMax + 1; }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.lanes = 0; }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.lanes = shm::kLanesMax + 1; }));
  EXPECT_TRUE(refused([](AttachOptions& o) { o.timeout = 0ms; }));
}

/// Nodes one after the other; nodes without ranks are refused, as by hand.
TEST(Attach, ThePlaceOfARankIsNodeMajor) {
  for (std::uint32_t nodes = 1; nodes <= 5; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 5; ++locals) {
      std::uint32_t rank = 0;
      for (std::uint32_t node = 0; node < nodes; ++node) {
        for (std::uint32_t local = 0; local < locals; ++local, ++rank) {
          const auto at = AttachOptions::of_rank("job", rank, nodes, locals);
          EXPECT_EQ(std::tie(at.job, at.rank, at.world, at.nodes, at.local_size),
                    std::tuple("job", rank, nodes * locals, nodes, locals));
          EXPECT_EQ(std::pair(at.node_rank, at.local_rank), std::pair(node, local));
          EXPECT_EQ(at.timeout, AttachOptions{}.timeout);
          EXPECT_TRUE(at.socket.empty());
        }
      }
    }
  }
  const auto session = Session::attach(AttachOptions::of_rank("job", 0, 2, 0));
  ASSERT_FALSE(session);
  EXPECT_EQ(session.error().code, ErrorCode::kInvalidArgument);
}

TEST(Attach, WhatDoesNotFitTheWireIsRefusedBeforeAnythingIsOpened) {
  const auto refusal = [](auto&& change) {
    AttachOptions options;
    options.socket = "@nowhere";
    options.job = "job";
    change(options);
    const auto session = Session::attach(options);
    return session ? ErrorCode::kOk : session.error().code;
  };
  const auto of_job = [&](const std::string& name) {
    return refusal([&](AttachOptions& o) { o.job = name; });
  };
  EXPECT_EQ(ErrorCode::kUnavailable, of_job("a~!job/1"));
  EXPECT_EQ(ErrorCode::kUnavailable, of_job(std::string(shm::kJobNameBytesMax, 'x')));
  for (const std::string& name :
       {std::string(), std::string(shm::kJobNameBytesMax + 1, 'x'), std::string("two words"),
        std::string("caf\xe9"), std::string("caf\xc3\xa9"), std::string("line\n"),
        std::string("zero\0", 5), std::string("del\x7f")}) {
    EXPECT_EQ(ErrorCode::kInvalidArgument, of_job(name)) << name;
  }
  const auto of_secret = [&](std::size_t bytes) {
    return refusal([&](AttachOptions& o) { o.job_secret.assign(bytes, '\xff'); });
  };
  EXPECT_EQ(ErrorCode::kUnavailable, of_secret(shm::kJobSecretBytesMax));
  EXPECT_EQ(ErrorCode::kInvalidArgument, of_secret(shm::kJobSecretBytesMax + 1));
  const auto of_socket = [&](std::size_t bytes) {
    return refusal([&](AttachOptions& o) { o.socket = "@" + std::string(bytes - 1, 'x'); });
  };
  EXPECT_EQ(ErrorCode::kUnavailable, of_socket(107));
  EXPECT_EQ(ErrorCode::kInvalidArgument, of_socket(108));
}

TEST(Attach, SaysByItsPidfdWhichProcessItIs) {
  std::atomic<pid_t> said{-2};
  const FakeDaemon daemon([&](FrameSocket& socket) {
    say_hello(socket);
    const auto attach = expect(socket, shm::MessageType::kAttach);
    if (attach.fds.size() == 1 && shm::is_process(attach.fds[0].get())) {
      said = shm::pid_of(attach.fds[0].get()).value_or(-3);
    }
    answer(socket, attach, shm::ErrorReply{ErrorCode::kUnavailable, "enough"});
    wait_for_close(socket);
  });
  expect_attach_error(daemon, ErrorCode::kUnavailable, "enough");
  EXPECT_EQ(::getpid(), said.load());
}

TEST(Attach, SendsNoDescriptorToADaemonThatTakesNone) {
  std::atomic<std::size_t> descriptors{9};
  const FakeDaemon daemon([&](FrameSocket& socket) {
    const auto hello = expect(socket, shm::MessageType::kHello);
    answer(socket, hello, shm::HelloReply{shm::kAbiMajor, 2, 1, "0.1.0"});
    const auto attach = expect(socket, shm::MessageType::kAttach);
    descriptors = attach.fds.size();
    answer(socket, attach, shm::ErrorReply{ErrorCode::kUnavailable, "enough"});
    wait_for_close(socket);
  });
  expect_attach_error(daemon, ErrorCode::kUnavailable, "enough");
  EXPECT_EQ(0u, descriptors.load());
}

/// A daemon that dies on anything that is longer than its wire.
TEST(AttachedSession, NamesThatDoNotFitTheWireAreNotSent) {
  std::atomic<int> asked{0};
  {
    const FakeDaemon daemon(attached([&](FrameSocket& socket, shm::Segment&) {
      while (auto frame = socket.receive(soon())) {
        if (frame->type == static_cast<std::uint16_t>(shm::MessageType::kDetach)) {
          answer(socket, *frame, shm::Done{});
        } else {
          ++asked;
          answer(socket, *frame, shm::ErrorReply{ErrorCode::kUnavailable, "enough"});
        }
      }
    }));
    auto session = attach_to(daemon.options());
    ASSERT_TRUE(session) << session.error().message;
    const auto bad = {std::string(shm::kNameBytesMax + 1, 'x'), std::string("caf\xe9"),
                      std::string("line\n"), std::string("zero\0", 5),
                      std::string("\xed\xa0\x80 is half of a pair")};
    for (const std::string& name : bad) {
      EXPECT_EQ(ErrorCode::kInvalidArgument, session->alloc_buffer(64, name).error().code);
      EXPECT_EQ(ErrorCode::kInvalidArgument, session->exchange(name, {}).error().code);
    }
    const std::vector<std::byte> blob(shm::kExchangeBlobBytesMax + 1);
    EXPECT_EQ(ErrorCode::kInvalidArgument, session->exchange("tag", blob).error().code);
    EXPECT_EQ(ErrorCode::kInvalidArgument, session->exchange("tag", {}, 0ms).error().code);
    EXPECT_EQ(0, asked.load());
    const std::string longest = std::string(shm::kNameBytesMax - 2, 'x') + "\xc3\xa9";
    EXPECT_EQ(ErrorCode::kUnavailable, session->alloc_buffer(64, longest).error().code);
    EXPECT_EQ(ErrorCode::kUnavailable, session->exchange(longest, {}).error().code);
    EXPECT_EQ(ErrorCode::kUnavailable,
              session->exchange("tag", {}, std::chrono::milliseconds::max()).error().code);
    EXPECT_EQ(3, asked.load());
  }
}

TEST(Attach, TheLongestTimesAreNoTimeAtAllToSum) {
  const FakeDaemon daemon(attached([](FrameSocket& socket, shm::Segment&) {
    answer(socket, expect(socket, shm::MessageType::kDetach), shm::Done{});
    wait_for_close(socket);
  }));
  AttachOptions options = daemon.options();
  options.timeout = options.heartbeat_timeout = std::chrono::milliseconds::max();
  auto session = attach_to(options);
  ASSERT_TRUE(session) << session.error().message;
  EXPECT_TRUE(session->status());
  EXPECT_TRUE(session->detach());
}

TEST(Attach, AnotherAbiIsRefusedWithBothVersions) {
  const FakeDaemon daemon([](FrameSocket& socket) {
    const auto hello = expect(socket, shm::MessageType::kHello);
    answer(socket, hello, shm::HelloReply{shm::kAbiMajor + 1, 7, 1, "9.9.9"});
    wait_for_close(socket);
  });
  expect_attach_error(daemon, ErrorCode::kAbiMismatch,
                      fmt::format("ABI {}.{}", shm::kAbiMajor, shm::kAbiMinor));
}

TEST(Attach, TheDaemonsRefusalIsPassedOn) {
  const FakeDaemon daemon([](FrameSocket& socket) {
    say_hello(socket);
    const auto attach = expect(socket, shm::MessageType::kAttach);
    answer(socket, attach, shm::ErrorReply{ErrorCode::kAlreadyExists, "rank 0 is taken by pid 1"});
    wait_for_close(socket);
  });
  expect_attach_error(daemon, ErrorCode::kAlreadyExists, "rank 0 is taken by pid 1");
}

TEST(Attach, ASilentDaemonIsATimeout) {
  const FakeDaemon daemon([](FrameSocket& socket) { wait_for_close(socket); });
  expect_attach_error(daemon, ErrorCode::kTimeout, "did not answer Hello", 200ms);
}

TEST(Attach, AHangUpAfterHelloIsADaemonLost) {
  const FakeDaemon daemon([](FrameSocket& socket) { say_hello(socket); });
  expect_attach_error(daemon, ErrorCode::kDaemonLost, "attach anew");
}

TEST(Attach, AWrongReplyIsAProtocolError) {
  const FakeDaemon daemon([](FrameSocket& socket) {
    say_hello(socket);
    const auto attach = expect(socket, shm::MessageType::kAttach);
    answer(socket, attach, shm::AllocFlagsReply{});
    wait_for_close(socket);
  });
  expect_attach_error(daemon, ErrorCode::kProtocol, "answered attach with");
}

TEST(Attach, AReplyWithoutDescriptorIsAProtocolError) {
  const FakeDaemon daemon([](FrameSocket& socket) {
    say_hello(socket);
    const auto attach = expect(socket, shm::MessageType::kAttach);
    answer(socket, attach, shm::AttachReply{1, 0, 4096, "fake"});
    wait_for_close(socket);
  });
  expect_attach_error(daemon, ErrorCode::kProtocol, "descriptors");
}

TEST(Attach, ARendezvousThatFailsSaysWhy) {
  const FakeDaemon daemon([](FrameSocket& socket) {
    say_hello(socket);
    const auto attach = expect(socket, shm::MessageType::kAttach);
    auto segment = a_segment();
    const int fd = segment.fd();
    answer(socket, attach, shm::AttachReply{1, 0, segment.bytes(), "fake"}, std::span(&fd, 1));
    answer(socket, shm::Frame{},
           shm::SessionFailed{ErrorCode::kTimeout, "ranks 2, 3 of node 1 are missing"});
    wait_for_close(socket);
  });
  expect_attach_error(daemon, ErrorCode::kTimeout, "ranks 2, 3 of node 1 are missing");
}

/// Waits until the session noticed.
Status failed_status(const Session& session) {
  const auto deadline = soon();
  while (session.status() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(1ms);
  return session.status();
}

TEST(AttachedSession, NoticesItsFailure) {
  const FakeDaemon daemon(attached([](FrameSocket& socket, shm::Segment&) {
    answer(socket, shm::Frame{}, shm::SessionFailed{ErrorCode::kPeerLost, "rank 3 died"});
    wait_for_close(socket);
  }));
  auto session = attach_to(daemon.options());
  ASSERT_TRUE(session) << session.error().message;
  const Status status = failed_status(*session);
  ASSERT_FALSE(status);
  EXPECT_EQ(ErrorCode::kPeerLost, status.error().code);
  EXPECT_EQ("rank 3 died", status.error().message);
  EXPECT_EQ(ErrorCode::kPeerLost, session->alloc_buffer(64, "late").error().code);
  EXPECT_EQ(ErrorCode::kPeerLost, session->barrier(1s).error().code);
}

TEST(AttachedSession, NoticesAFailureWrittenToTheSegmentAlone) {
  const FakeDaemon daemon(attached([](FrameSocket& socket, shm::Segment& segment) {
    segment.publish_failure(ErrorCode::kBadCommand, "lane 0: opcode 9");
    wait_for_close(socket);
  }));
  auto session = attach_to(daemon.options());
  ASSERT_TRUE(session);
  const Status status = failed_status(*session);
  ASSERT_FALSE(status);
  EXPECT_EQ(ErrorCode::kBadCommand, status.error().code);
  EXPECT_EQ("lane 0: opcode 9", status.error().message);
}

TEST(AttachedSession, NoticesTheDaemonsDeath) {
  const FakeDaemon daemon(attached([](FrameSocket&, shm::Segment&) {}));
  auto session = attach_to(daemon.options());
  ASSERT_TRUE(session);
  EXPECT_EQ(ErrorCode::kDaemonLost, failed_status(*session).error().code);
}

TEST(AttachedSession, NoticesAStoppedHeartbeat) {
  const FakeDaemon daemon(
      attached([](FrameSocket& socket, shm::Segment&) { wait_for_close(socket); }));
  AttachOptions options = daemon.options();
  options.heartbeat_timeout = 300ms;
  auto session = attach_to(options);
  ASSERT_TRUE(session);
  const Status status = failed_status(*session);
  ASSERT_FALSE(status);
  EXPECT_EQ(ErrorCode::kDaemonLost, status.error().code);
  EXPECT_NE(std::string::npos, status.error().message.find("heartbeat"));
}

TEST(AttachedSession, AHangUpInTheMiddleOfARequestEndsIt) {
  const FakeDaemon daemon(attached(
      [](FrameSocket& socket, shm::Segment&) { expect(socket, shm::MessageType::kExchange); }));
  auto session = attach_to(daemon.options());
  ASSERT_TRUE(session);
  EXPECT_EQ(ErrorCode::kDaemonLost, session->barrier().error().code);
}

TEST(AttachedSession, RepliesOutOfOrderFindTheirRequests) {
  const FakeDaemon daemon(attached([](FrameSocket& socket, shm::Segment&) {
    const auto first = expect(socket, shm::MessageType::kRegisterBuffer);
    const auto second = expect(socket, shm::MessageType::kRegisterBuffer);
    const auto bytes_of = [](const shm::Frame& frame) {
      return shm::decode_message<shm::RegisterBuffer>(frame.payload)->bytes;
    };
    answer(socket, second,
           shm::RegisterBufferReply{static_cast<std::uint16_t>(bytes_of(second) / 4096)});
    answer(socket, first,
           shm::RegisterBufferReply{static_cast<std::uint16_t>(bytes_of(first) / 4096)});
    answer(socket, expect(socket, shm::MessageType::kDetach), shm::Done{});
    wait_for_close(socket);
  }));
  auto session = attach_to(daemon.options());
  ASSERT_TRUE(session);
  std::uint16_t handles[2] = {};
  std::thread other([&] { handles[0] = session->alloc_buffer(4096, "one")->handle; });
  handles[1] = session->alloc_buffer(8192, "two")->handle;
  other.join();
  EXPECT_EQ(1, handles[0]);
  EXPECT_EQ(2, handles[1]);
}

TEST(AttachedSession, DetachIsAskedForOnceAndEndsQuietly) {
  std::atomic<int> detaches{0};
  {
    const FakeDaemon daemon(attached([&](FrameSocket& socket, shm::Segment&) {
      const auto detach = expect(socket, shm::MessageType::kDetach);
      ++detaches;
      answer(socket, detach, shm::Done{});
      while (const auto more = socket.receive(soon())) ++detaches;
    }));
    auto session = attach_to(daemon.options());
    ASSERT_TRUE(session);
    EXPECT_TRUE(session->detach());
    EXPECT_TRUE(session->detach());
  }
  EXPECT_EQ(1, detaches.load());
}

}  // namespace
}  // namespace mk
