/// \file
/// Another user than the healthy job's, where the test may be one: CI runs as root.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <string>

#include "tests/daemon/control/socket_client.h"

namespace mk::test {

/// nobody's number, which needs no entry in /etc/passwd.
inline constexpr uid_t kOtherUser = 65534;

/// Whom the hostile clients are.
inline uid_t hostile_user() { return ::geteuid() == 0 ? kOtherUser : ::geteuid(); }

/// While it lives, the calling thread alone is `hostile_user()`: the system call, unlike glibc's
/// function, changes one thread. A socket's credentials are those of the thread that connects.
class AsHostileUser {
 public:
  AsHostileUser() { become(hostile_user()); }
  ~AsHostileUser() { become(before_); }
  AsHostileUser(const AsHostileUser&) = delete;
  AsHostileUser& operator=(const AsHostileUser&) = delete;

 private:
  static void become(uid_t user) { EXPECT_EQ(0, ::syscall(SYS_setresuid, -1, user, -1)); }
  const uid_t before_ = ::geteuid();
};

/// A client of that user.
class HostileClient : public daemon::test::SocketClient {
 public:
  explicit HostileClient(const std::string& path) : SocketClient(connect(path)) {}

 private:
  static shm::FrameSocket connect(const std::string& path) {
    const AsHostileUser user;
    return shm::FrameSocket::connect(path, std::chrono::seconds(60)).value();
  }
};

}  // namespace mk::test
