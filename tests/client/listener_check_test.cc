// Whose socket a client attaches to: a stranger's is refused before anything is said.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "mkernel/mkernel.h"
#include "shm/host/unix_socket.h"

namespace mk {
namespace {

using namespace std::chrono_literals;

auto until_given_up() { return std::chrono::steady_clock::now() + 20s; }

/// A process of user 65534 that listens at `path`; says with its exit code how many of the first
/// `connections` had anything to say.
pid_t listen_as_stranger(const std::string& path, int connections) {
  int ready[2];
  EXPECT_EQ(0, ::pipe(ready));
  const pid_t child = ::fork();
  if (child != 0) {
    char byte;
    EXPECT_EQ(1, ::read(ready[0], &byte, 1));
    ::close(ready[0]);
    ::close(ready[1]);
    return child;
  }
  if (::setresgid(65534, 65534, 65534) != 0 || ::setresuid(65534, 65534, 65534) != 0) ::_exit(101);
  auto listener = shm::FrameListener::listen(path);
  if (!listener || ::write(ready[1], "x", 1) != 1) ::_exit(102);
  int talked = 0;
  for (const auto deadline = until_given_up(); connections > 0;) {
    auto accepted = listener->try_accept();
    if (!accepted || std::chrono::steady_clock::now() > deadline) ::_exit(103);
    if (*accepted) {
      talked += (*accepted)->receive(deadline).has_value() ? 1 : 0;
      --connections;
    }
    std::this_thread::sleep_for(1ms);
  }
  ::_exit(talked);
}

TEST(ListenerCheck, ASocketOfAnotherUserIsRefusedBeforeAnythingIsSaid) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  const std::string path = fmt::format("@mk-stranger-{}", ::getpid());
  const pid_t stranger = listen_as_stranger(path, 3);
  AttachOptions options;
  options.socket = path;
  options.job = "job";
  options.job_secret = "not for strangers";
  options.timeout = 10s;
  const auto refused = Session::attach(options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kPermission) << refused.error().message;
  for (const std::string word : {"user 65534", path.c_str(), "MKERNEL_DAEMON_UID=65534"}) {
    EXPECT_NE(refused.error().message.find(word), std::string::npos) << refused.error().message;
  }
  ::setenv("MKERNEL_DAEMON_UID", "nobody", 1);
  EXPECT_EQ(Session::attach(options).error().code, ErrorCode::kInvalidArgument);
  ::setenv("MKERNEL_DAEMON_UID", "65534", 1);
  EXPECT_FALSE(Session::attach(options));  // it hangs up after Hello
  ::unsetenv("MKERNEL_DAEMON_UID");
  int status = 0;
  ASSERT_EQ(stranger, ::waitpid(stranger, &status, 0));
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(1, WEXITSTATUS(status)) << "only the connection that was asked for may have talked";
}

}  // namespace
}  // namespace mk
