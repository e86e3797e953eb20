// Listening and connecting: stale files, live holders, names, modes, and two starts at once.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "shm/host/unix_socket.h"
#include "socket_support.h"

namespace mk::shm {
namespace {

using namespace std::chrono_literals;
using namespace mk::shm::test;

constexpr auto kGenerous = 60s;

std::string self() { return "process " + std::to_string(::getpid()); }

/// A socket file as a daemon that was killed leaves it.
void leave_stale_file(const std::string& path) {
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(fd.get(), 1), 0);
}

void expect_usable(FrameListener& listener, const std::string& path) {
  auto client = FrameSocket::connect(path, kGenerous);
  ASSERT_TRUE(client) << client.error().message;
  auto server = listener.try_accept();
  ASSERT_TRUE(server && *server);
  ASSERT_TRUE(client->send(4, 5, {}, {}, in_seconds(60)));
  EXPECT_EQ((*server)->receive(in_seconds(60))->type, 4);
  EXPECT_EQ((*server)->credentials()->pid, ::getpid());
}

TEST(FrameListener, ConnectsAndRemovesItsFiles) {
  const NoFdLeak no_leak;
  const TempFolder folder;
  {
    auto listener = FrameListener::listen(folder / "socket");
    ASSERT_TRUE(listener) << listener.error().message;
    EXPECT_EQ(listener->path(), folder / "socket");
    EXPECT_FALSE(listener->try_accept()->has_value());
    expect_usable(*listener, folder / "socket");
    EXPECT_FALSE(listener->try_accept()->has_value());
    EXPECT_NE(::fcntl(listener->fd(), F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_TRUE(folder.empty());
  expect_error(FrameSocket::connect(folder / "socket", kGenerous).error(), ErrorCode::kUnavailable,
               "is mkerneld running");
}

TEST(FrameListener, HasTheModeItWasGiven) {
  const TempFolder folder;
  const mode_t mask = ::umask(077);
  for (const mode_t mode : {0666u, 0660u, 0600u}) {
    const auto listener = FrameListener::listen(folder / "socket", mode);
    ASSERT_TRUE(listener);
    struct stat status;
    ASSERT_EQ(::stat((folder / "socket").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, mode);
  }
  ::umask(mask);
}

TEST(FrameListener, AStaleFileIsReplaced) {
  const NoFdLeak no_leak;
  const TempFolder folder;
  leave_stale_file(folder / "socket");
  expect_error(FrameSocket::connect(folder / "socket", kGenerous).error(), ErrorCode::kUnavailable,
               "nobody listens");
  auto listener = FrameListener::listen(folder / "socket");
  ASSERT_TRUE(listener) << listener.error().message;
  expect_usable(*listener, folder / "socket");
}

TEST(FrameListener, AStaleLockFileIsNoObstacle) {
  const TempFolder folder;
  std::ofstream(folder / "socket.lock") << "1\n";
  EXPECT_TRUE(FrameListener::listen(folder / "socket"));
  EXPECT_TRUE(folder.empty());
}

TEST(FrameListener, ALiveHolderInThisProcessIsNamed) {
  const NoFdLeak no_leak;
  const TempFolder folder;
  auto holder = FrameListener::listen(folder / "socket");
  ASSERT_TRUE(holder);
  for (int i = 0; i < 3; ++i) {
    const auto second = FrameListener::listen(folder / "socket");
    ASSERT_FALSE(second);
    expect_error(second.error(), ErrorCode::kAlreadyExists, self());
  }
  expect_usable(*holder, folder / "socket");
}

TEST(FrameListener, ALiveHolderInAnotherProcessIsNamedAndItsDeathFreesTheSocket) {
  const TempFolder folder;
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto listener = FrameListener::listen(folder / "socket");
    const char byte = listener ? 'y' : 'n';
    if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
    ::pause();
    ::_exit(0);
  }
  ::close(ready[1]);
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::close(ready[0]);
  EXPECT_EQ(byte, 'y');
  const auto refused = FrameListener::listen(folder / "socket");
  ASSERT_FALSE(refused);
  expect_error(refused.error(), ErrorCode::kAlreadyExists, "process " + std::to_string(child));
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  auto listener = FrameListener::listen(folder / "socket");
  ASSERT_TRUE(listener) << listener.error().message;
  expect_usable(*listener, folder / "socket");
}

TEST(FrameListener, AHolderThatTakesNoLockIsNamedToo) {
  const TempFolder folder;
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const std::string path = folder / "socket";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(fd.get(), 4), 0);
  const auto refused = FrameListener::listen(path);
  ASSERT_FALSE(refused);
  expect_error(refused.error(), ErrorCode::kAlreadyExists, self());
  EXPECT_TRUE(std::filesystem::exists(path));
  EXPECT_FALSE(std::filesystem::exists(path + ".lock"));
}

TEST(FrameListener, AFileThatIsNoSocketIsLeftAlone) {
  const TempFolder folder;
  std::ofstream(folder / "precious") << "data";
  const auto refused = FrameListener::listen(folder / "precious");
  ASSERT_FALSE(refused);
  expect_error(refused.error(), ErrorCode::kAlreadyExists, "is no socket");
  EXPECT_EQ(std::filesystem::file_size(folder / "precious"), 4u);
}

TEST(FrameListener, ASocketThatAnotherPutInItsPlaceIsLeftAlone) {
  const TempFolder folder;
  {
    auto listener = FrameListener::listen(folder / "socket");
    ASSERT_TRUE(listener);
    ASSERT_EQ(::unlink((folder / "socket").c_str()), 0);
    leave_stale_file(folder / "socket");
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "socket"));
  EXPECT_FALSE(std::filesystem::exists(folder / "socket.lock"));
}

TEST(FrameListener, MovesKeepTheFileAndAssignmentRemovesTheOld) {
  const NoFdLeak no_leak;
  const TempFolder folder;
  auto one = FrameListener::listen(folder / "one");
  auto two = FrameListener::listen(folder / "two");
  ASSERT_TRUE(one && two);
  FrameListener moved = std::move(*one);
  expect_usable(moved, folder / "one");
  moved = std::move(*two);
  EXPECT_FALSE(std::filesystem::exists(folder / "one"));
  EXPECT_FALSE(std::filesystem::exists(folder / "one.lock"));
  expect_usable(moved, folder / "two");
}

TEST(FrameListener, BadPathsAreRefused) {
  const NoFdLeak no_leak;
  const TempFolder folder;
  const std::string no_path[] = {"", "@", std::string(108, 'x'), std::string("a\0b", 3)};
  for (const std::string& path : no_path) {
    EXPECT_EQ(FrameListener::listen(path).error().code, ErrorCode::kInvalidArgument) << path;
    EXPECT_EQ(FrameSocket::connect(path, kGenerous).error().code, ErrorCode::kInvalidArgument)
        << path;
  }
  expect_error(FrameListener::listen(folder / "no/such/folder").error(), ErrorCode::kSystem,
               "does its folder exist");
  expect_error(FrameSocket::connect(folder / "no/such/folder", kGenerous).error(),
               ErrorCode::kUnavailable, "no socket");
  EXPECT_TRUE(folder.empty());
}

TEST(FrameListener, LongestPathWorks) {
  const TempFolder folder;
  const std::string path = folder / std::string(107 - (folder / "").size(), 'p');
  ASSERT_EQ(path.size(), 107u);
  auto listener = FrameListener::listen(path);
  ASSERT_TRUE(listener) << listener.error().message;
  expect_usable(*listener, path);
}

TEST(FrameListener, AbstractNamesNeedNoFile) {
  const NoFdLeak no_leak;
  const std::string name = "@mk-shm-test-" + std::to_string(::getpid());
  {
    auto listener = FrameListener::listen(name);
    ASSERT_TRUE(listener) << listener.error().message;
    expect_usable(*listener, name);
    EXPECT_FALSE(std::filesystem::exists(name));
    EXPECT_FALSE(std::filesystem::exists(name + ".lock"));
    const auto second = FrameListener::listen(name);
    ASSERT_FALSE(second);
    expect_error(second.error(), ErrorCode::kAlreadyExists, self());
  }
  expect_error(FrameSocket::connect(name, kGenerous).error(), ErrorCode::kUnavailable,
               "nobody listens");
  EXPECT_TRUE(FrameListener::listen(name));
}

TEST(FrameListener, OfManyStartsAtOnceOneWins) {
  const NoFdLeak no_leak;
  const TempFolder folder;
  leave_stale_file(folder / "socket");
  std::atomic<int> holders = 0;
  std::atomic<int> wins = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        auto listener = FrameListener::listen(folder / "socket");
        if (!listener) {
          EXPECT_EQ(listener.error().code, ErrorCode::kAlreadyExists) << listener.error().message;
          std::this_thread::yield();
          continue;
        }
        EXPECT_EQ(++holders, 1);
        ++wins;
        EXPECT_TRUE(FrameSocket::connect(folder / "socket", kGenerous));
        --holders;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(wins, 0);
  EXPECT_TRUE(folder.empty());
}

TEST(FrameSocketConnect, NoPermissionIsSaid) {
  const TempFolder folder;
  const auto listener = FrameListener::listen(folder / "socket", 0);
  ASSERT_TRUE(listener);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (::getuid() == 0 && ::setresuid(65534, 65534, 65534) != 0)
      ::_exit(2);  // root may do anything
    const auto socket = FrameSocket::connect(folder / "socket", kGenerous);
    const bool said = !socket && socket.error().code == ErrorCode::kPermission &&
                      socket.error().message.find("no permission") != std::string::npos;
    ::_exit(said ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(FrameSocketConnect, AListenerThatNeverAcceptsIsATimeout) {
  const NoFdLeak no_leak;
  const std::string name = "@mk-shm-hung-" + std::to_string(::getpid());
  const UniqueFd hung(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data() + 1, name.size() - 1);
  ASSERT_EQ(::bind(hung.get(), reinterpret_cast<const sockaddr*>(&address),
                   static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size())),
            0);
  ASSERT_EQ(::listen(hung.get(), 0), 0);
  std::vector<FrameSocket> waiting;
  while (true) {
    auto socket = FrameSocket::connect(name, 20ms);
    if (!socket) {
      expect_error(socket.error(), ErrorCode::kTimeout, "took no connection within 20 ms");
      break;
    }
    waiting.push_back(std::move(*socket));
    ASSERT_LT(waiting.size(), 100u);
  }
}

TEST(FrameListener, OutOfDescriptorsIsAnErrorOfItsOwn) {
  const TempFolder folder;
  auto listener = FrameListener::listen(folder / "socket");
  ASSERT_TRUE(listener);
  auto client = FrameSocket::connect(folder / "socket", kGenerous);
  ASSERT_TRUE(client);
  NoFdsLeft no_fds_left;
  const auto refused = listener->try_accept();
  ASSERT_FALSE(refused);
  expect_error(refused.error(), ErrorCode::kLimitExceeded, "LimitNOFILE");
  no_fds_left.end();
  EXPECT_TRUE(listener->try_accept()->has_value());
}

}  // namespace
}  // namespace mk::shm
