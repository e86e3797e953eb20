// A rank lives as long as its process, not its socket: pidfds over real sockets, right
// and wrong ones.
#include "daemon/control/process_watch.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "daemon/control/control_loop.h"
#include "shm/host/process_fd.h"
#include "shm/host/unix_address.h"
#include "tests/daemon/control/fake_network.h"
#include "tests/daemon/control/rig.h"
#include "tests/daemon/control/socket_client.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

class NoPeers final : public PeerTransport {
 public:
  std::vector<NodeId> nodes() const override { return {}; }
  Status send(NodeId, const PeerMessage&) override { return {}; }
  std::string describe(NodeId node) const override { return fmt::format("node {}", node); }
  void disconnect(NodeId, const std::string&) override {}
};

/// A process that has connected to the daemon, and of whose socket this one has a copy. It does
/// nothing more.
class OtherProcess {
 public:
  explicit OtherProcess(const std::string& socket) {
    const auto address = shm::unix_address(socket).value();
    int pair[2];
    EXPECT_EQ(0, ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    const UniqueFd near(pair[0]);
    pid_ = ::fork();
    if (pid_ == 0) {
      // System calls only: this was a process with threads.
      const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(fd, address.get(), address.bytes) != 0) ::_exit(1);
      char byte = 0;
      iovec part{&byte, 1};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* entry = CMSG_FIRSTHDR(&message);
      entry->cmsg_level = SOL_SOCKET;
      entry->cmsg_type = SCM_RIGHTS;
      entry->cmsg_len = CMSG_LEN(sizeof fd);
      std::memcpy(CMSG_DATA(entry), &fd, sizeof fd);
      if (::sendmsg(pair[1], &message, 0) != 1) ::_exit(1);
      while (true) ::pause();
    }
    ::close(pair[1]);
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    EXPECT_EQ(1, ::recvmsg(near.get(), &message, MSG_CMSG_CLOEXEC));
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    client.emplace(shm::FrameSocket(UniqueFd(fd)));
    process = shm::open_process(pid_).value();
  }
  ~OtherProcess() { kill(); }

  /// And leaves nobody to be reaped.
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  pid_t pid() const { return pid_; }

  std::optional<SocketClient> client;  ///< speaks by its socket
  UniqueFd process;

 private:
  pid_t pid_ = -1;
};

class ProcessWatching : public testing::Test {
 protected:
  ProcessWatching()
      : loop_(
            ControlLoop::create({.socket_path = fmt::format("@mkernel-watch-test-{}", ::getpid())})
                .value()),
        proxy_(std::make_unique<FakeEndpoint>(std::make_shared<FakeMemory>(),
                                              std::make_shared<FakeNic>()),
               {}, [this](ProxyEvent event) { loop_->proxy_event(0, std::move(event)); }) {
    loop_->configure({}, {&proxy_});
    EXPECT_TRUE(proxy_.start());
    EXPECT_TRUE(loop_->start(peers_));
  }
  ~ProcessWatching() override {
    loop_->stop(std::chrono::steady_clock::now());
    proxy_.stop();
    loop_->reset();
  }

  const std::string& path() const { return loop_->socket_path(); }

  /// Attaches rank 0 by a process of its own with `fds`, rank 1 by this one. Ends that process, and
  /// expects that rank 1 hears of it and that rank 0's place is free, while its socket is held.
  void expect_death_is_seen(bool with_pidfd) {
    OtherProcess other(path());
    const int told = other.process.get();
    ASSERT_TRUE(
        other.client->attach(rank_of("job", 1, 2, 0), std::span(&told, with_pidfd ? 1 : 0)));
    SocketClient survivor(path());
    ASSERT_TRUE(survivor.attach(rank_of("job", 1, 2, 1)));
    ASSERT_TRUE(survivor.await<shm::JobUp>());
    const std::string name = fmt::format("pid {}", other.pid());
    other.kill();
    const auto failure = survivor.await<shm::JobUp>();
    ASSERT_FALSE(failure);
    EXPECT_EQ(failure.error().code, ErrorCode::kPeerLost);
    EXPECT_THAT(failure.error().message, HasSubstr("lost rank 0"));
    EXPECT_THAT(failure.error().message, HasSubstr(name));
    SocketClient again(path());
    EXPECT_TRUE(again.attach(rank_of("job", 1, 2, 0)));
  }

  static std::size_t open_descriptors() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return static_cast<std::size_t>(std::distance(begin(all), end(all)));
  }
  /// What all epoll instances of this process watch.
  static std::size_t watched() {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fdinfo")) {
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) count += line.starts_with("tfd:") ? 1 : 0;
    }
    return count;
  }

  NoPeers peers_;
  std::unique_ptr<ControlLoop> loop_;
  Proxy proxy_;
};

TEST_F(ProcessWatching, ARankEndsWithItsProcessThoughItsSocketIsHeld) {
  expect_death_is_seen(/*with_pidfd=*/true);
}

TEST_F(ProcessWatching, TheKernelSaysWhoConnectedWhenTheClientDoesNot) {
  {
    const auto pair = shm::FrameSocket::pair();
    if (!shm::peer_process(pair->first.fd())) GTEST_SKIP() << "no SO_PEERPIDFD: Linux before 6.5";
  }
  expect_death_is_seen(/*with_pidfd=*/false);
}

TEST_F(ProcessWatching, AHangUpCountsWhileTheProcessLives) {
  OtherProcess other(path());
  const int told = other.process.get();
  ASSERT_TRUE(other.client->attach(rank_of("job", 1, 2, 0), std::span(&told, 1)));
  SocketClient survivor(path());
  ASSERT_TRUE(survivor.attach(rank_of("job", 1, 2, 1)));
  ASSERT_TRUE(survivor.await<shm::JobUp>());
  other.client->shut();
  EXPECT_EQ(survivor.await<shm::JobUp>().error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(0, ::kill(other.pid(), 0));
}

TEST_F(ProcessWatching, WhatIsNoPidfdIsRefusedAndClosed) {
  const UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  const UniqueFd folder(::open("/proc/self", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  SocketClient client(path());
  ASSERT_TRUE(client.call<shm::HelloReply>(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"}));
  const std::size_t open = open_descriptors();
  const std::size_t watching = watched();
  for (const int fd : {event.get(), null.get(), epoll.get(), folder.get()}) {
    const auto refused = client.attach_again(rank_of("job", 1, 1, 0), std::span(&fd, 1));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr("no pidfd"));
  }
  EXPECT_EQ(open_descriptors(), open);
  EXPECT_EQ(watched(), watching);
  EXPECT_TRUE(client.attach_again(rank_of("job", 1, 1, 0)));
}

TEST_F(ProcessWatching, APidfdOfAnotherProcessIsRefused) {
  OtherProcess other(path());
  const UniqueFd init = shm::open_process(1).value();
  SocketClient client(path());
  ASSERT_TRUE(client.call<shm::HelloReply>(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"}));
  for (const auto& [fd, pid] : {std::pair(other.process.get(), other.pid()), {init.get(), 1}}) {
    const auto refused = client.attach_again(rank_of("job", 1, 1, 0), std::span(&fd, 1));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kPermission);
    EXPECT_THAT(refused.error().message, HasSubstr(fmt::format("process {}", pid)));
    EXPECT_THAT(refused.error().message, HasSubstr(fmt::format("process {}", ::getpid())));
  }
  const UniqueFd own = shm::open_process(::getpid()).value();
  const int told = own.get();
  EXPECT_TRUE(client.attach_again(rank_of("job", 1, 1, 0), std::span(&told, 1)));
}

TEST_F(ProcessWatching, AClientHoldsOneHoweverOftenItTries) {
  const UniqueFd own = shm::open_process(::getpid()).value();
  const int told = own.get();
  const std::size_t watching = watched();
  {
    SocketClient client(path());
    ASSERT_TRUE(client.call<shm::HelloReply>(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"}));
    const std::size_t open = open_descriptors();
    for (int round = 0; round < 100; ++round) {
      EXPECT_FALSE(client.attach_again(rank_of("no name", 1, 1, 0), std::span(&told, 1)));
    }
    EXPECT_LE(open_descriptors(), open + 1);
    EXPECT_LE(watched(), watching + 2) << "the connection and its process";
    const int two[] = {told, told};
    EXPECT_THAT(client.attach_again(rank_of("job", 1, 1, 0), two).error().message,
                HasSubstr("none or 1"));
  }
  // The process lives on with the same pidfd open; nothing may go on watching it.
  EXPECT_TRUE(eventually([&] { return watched() == watching; }));
}

}  // namespace
}  // namespace mk::daemon::test
