// Threads that accept connections, when the system gives no descriptor for one: they look away for
// a while, say so, and serve the caller when there is one again. This program replaces accept().
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/control/local_peer_transport.h"
#include "daemon/control/node.h"
#include "daemon/fabric/loopback/endpoint.h"
#include "tests/daemon/control/socket_client.h"

namespace {

using Clock = std::chrono::steady_clock;

/// The system calls that accept, as this program makes them.
struct Accepts {
  std::atomic<bool> refused{false};
  std::mutex mutex;
  std::vector<Clock::time_point> refusals;
};
Accepts& accepts() {
  static auto* const all = new Accepts;
  return *all;
}

int accept_unless_refused(int fd, sockaddr* address, socklen_t* bytes, int flags) {
  Accepts& all = accepts();
  if (!all.refused) return static_cast<int>(::syscall(SYS_accept4, fd, address, bytes, flags));
  const std::lock_guard lock(all.mutex);
  all.refusals.push_back(Clock::now());
  errno = EMFILE;
  return -1;
}

}  // namespace

extern "C" int accept4(int fd, sockaddr* address, socklen_t* bytes, int flags) {
  return accept_unless_refused(fd, address, bytes, flags);
}
extern "C" int accept(int fd, sockaddr* address, socklen_t* bytes) {
  return accept_unless_refused(fd, address, bytes, 0);
}

namespace mk::daemon {
namespace {

using test::eventually;

class AcceptLoops : public testing::Test {
 protected:
  void TearDown() override { accepts().refused = false; }
  /// Hears what the loop says, by any thread.
  auto ear() {
    return [this](const std::string& text) {
      const std::lock_guard lock(mutex_);
      told_.push_back(text);
    };
  }
  /// `call` connects, and answers whether it was served.
  void expect_patience(const std::function<bool()>& call) {
    {
      const std::lock_guard lock(accepts().mutex);
      accepts().refusals.clear();
    }
    accepts().refused = true;
    auto served = std::async(std::launch::async, call);
    std::vector<Clock::time_point> at;
    EXPECT_TRUE(eventually([&] {
      const std::lock_guard lock(accepts().mutex);
      at = accepts().refusals;
      return at.size() >= 5;
    }));
    for (std::size_t i = 1; i < at.size(); ++i)
      EXPECT_GE(at[i] - at[i - 1], std::chrono::milliseconds(100)) << "it spins";
    {
      const std::lock_guard lock(mutex_);
      EXPECT_FALSE(told_.empty()) << "it says nothing";
      EXPECT_LE(told_.size(), at.size() + 2);
      for (const std::string& text : told_)
        EXPECT_TRUE(text.find("open files") != text.npos || text.find("descriptor") != text.npos)
            << text;
    }
    accepts().refused = false;
    EXPECT_TRUE(served.get());
  }

  std::mutex mutex_;
  std::vector<std::string> told_;
};

TEST_F(AcceptLoops, OfClients) {
  NodeOptions options;
  options.loop.socket_path = fmt::format("@mkernel-accept-loops-test-{}", ::getpid());
  options.rails.resize(1);
  options.rails[0].endpoint.fabric = "null";
  options.control.log = [hear = ear()](const LogRecord& record) {
    if (record.level >= LogLevel::kWarning) hear(record.message);
  };
  auto node = Node::create(std::move(options));
  ASSERT_TRUE(node) << node.error().message;
  LocalCluster alone(1);
  ASSERT_TRUE((*node)->start(alone.transport(0)));
  expect_patience([&] {
    test::SocketClient client((*node)->socket_path());
    return client.call<shm::HelloReply>(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"})
        .has_value();
  });
  (*node)->stop(Clock::now());
}

TEST_F(AcceptLoops, OfLoopbackPeers) {
  fabric::EndpointConfig config;
  config.notice = ear();
  fabric::LoopbackOptions options;
  options.share_process_memory = false;
  auto to = fabric::make_loopback_endpoint(config, options);
  config.notice = {};
  config.connect_timeout_ns = 60'000'000'000;
  auto from = fabric::make_loopback_endpoint(config, options);
  ASSERT_TRUE(to && from);
  expect_patience([&] { return (*from)->connect((*to)->address(), "node 1").has_value(); });
}

}  // namespace
}  // namespace mk::daemon
