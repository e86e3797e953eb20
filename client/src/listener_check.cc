#include "client/src/listener_check.h"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

namespace mk::client {
namespace {

constexpr const char* kVariable = "MKERNEL_DAEMON_UID";
constexpr const char* kDaemonUser = "mkernel";  // systemd/mkernel.sysusers.conf

std::optional<uid_t> uid_of(const char* name) {
  std::vector<char> text(16'384);
  passwd entry{};
  passwd* found = nullptr;
  if (::getpwnam_r(name, &entry, text.data(), text.size(), &found) != 0 || found == nullptr) {
    return std::nullopt;
  }
  return entry.pw_uid;
}

/// The user that the daemon runs as where it is not root; nullopt: this machine has none such.
Result<std::optional<uid_t>> daemon_uid() {
  const char* const text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return uid_of(kDaemonUser);
  uid_t uid = 0;
  const char* const end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, uid);
  if (parsed.ec != std::errc{} || parsed.ptr != end) {
    return fail(ErrorCode::kInvalidArgument, "{}='{}': the number of a user is expected", kVariable,
                text);
  }
  return uid;
}

}  // namespace

Status check_listener(const shm::FrameSocket& socket, const std::string& path) {
  // Of the process that began to listen, as the kernel noted it then.
  MK_ASSIGN_OR_RETURN(const shm::PeerCredentials listener, socket.credentials());
  if (listener.uid == 0 || listener.uid == ::geteuid()) return {};
  MK_ASSIGN_OR_RETURN(const std::optional<uid_t> expected, daemon_uid());
  if (expected == listener.uid) return {};
  return fail(
      ErrorCode::kPermission,
      "user {} listens at '{}' (process {}), and only root, user {} (you) and {} may: another user "
      "may have put a socket there. If mkerneld runs as user {}, set {}={}",
      listener.uid, path, listener.pid, ::geteuid(),
      expected ? fmt::format("user {} (the daemon's)", *expected)
               : fmt::format("the user '{}', which this machine does not have", kDaemonUser),
      listener.uid, kVariable, listener.uid);
}

}  // namespace mk::client
