#include "daemon/service/unix_gate.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "daemon/service/accept_pause.h"

namespace mk::daemon {
namespace {

constexpr int kFirstNumber = 256;  ///< of a connection's descriptor: above those in daily use

std::vector<gid_t> groups_of(int fd, gid_t primary) {
  std::vector<gid_t> groups(64);
  socklen_t bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  int done = ::getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes);
  if (done != 0 && errno == ERANGE) {
    groups.resize(bytes / sizeof(gid_t));
    done = ::getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes);
  }
  groups.resize(done == 0 ? bytes / sizeof(gid_t) : 0);
  groups.push_back(primary);
  return groups;
}

}  // namespace

UniqueFd ConnectionBook::number(const shm::FrameSocket& socket,
                                const shm::PeerCredentials& caller) {
  std::lock_guard lock(mutex_);
  UniqueFd fd(::fcntl(socket.fd(), F_DUPFD_CLOEXEC, kFirstNumber + next_));
  if (!fd.valid()) fd = UniqueFd(::fcntl(socket.fd(), F_DUPFD_CLOEXEC, 0));  // few are allowed
  if (!fd.valid()) return fd;
  next_ = std::max(0, fd.get() - kFirstNumber + 1) % kNumbers;
  callers_[fd.get()] = caller;
  return fd;
}

std::optional<shm::PeerCredentials> ConnectionBook::caller(std::string_view grpc_peer) const {
  constexpr std::string_view kPrefix = "fd:";
  int number = -1;
  if (grpc_peer.starts_with(kPrefix)) {
    std::from_chars(grpc_peer.data() + kPrefix.size(), grpc_peer.data() + grpc_peer.size(), number);
  }
  std::lock_guard lock(mutex_);
  const auto found = callers_.find(number);
  if (found == callers_.end()) return std::nullopt;
  return found->second;
}

std::string ConnectionBook::who(std::string_view grpc_peer) const {
  const auto found = caller(grpc_peer);
  return found ? fmt::format("uid {}, pid {}", found->uid, found->pid) : "";
}

std::optional<uid_t> ConnectionBook::uid_of(std::string_view grpc_peer) const {
  const auto found = caller(grpc_peer);
  return found ? std::optional(found->uid) : std::nullopt;
}

Result<std::unique_ptr<UnixGate>> UnixGate::open(Options options, ConnectionBook& book,
                                                 Deliver deliver) {
  auto listener = shm::FrameListener::listen(options.path, options.mode);
  if (!listener) return propagate(listener);
  struct stat file {};
  // Only root may give it to any group; others to a group of theirs, if their folder has not.
  if (options.group && ::stat(options.path.c_str(), &file) == 0 && file.st_gid != *options.group &&
      ::chown(options.path.c_str(), static_cast<uid_t>(-1), *options.group) != 0) {
    return fail_errno(errno,
                      "cannot give {} to group {} (admin.group); the daemon's user must be in that "
                      "group (SupplementaryGroups= of its unit)",
                      options.path, *options.group);
  }
  return std::unique_ptr<UnixGate>(
      new UnixGate(std::move(*listener), std::move(options), book, std::move(deliver)));
}

UnixGate::UnixGate(shm::FrameListener listener, Options options, ConnectionBook& book,
                   Deliver deliver)
    : listener_(std::move(listener)),
      options_(std::move(options)),
      book_(book),
      deliver_(std::move(deliver)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { run(); }) {}

UnixGate::~UnixGate() {
  const std::uint64_t one = 1;
  (void)!::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void UnixGate::run() {
  pollfd watched[] = {{stop_.get(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
  while (true) {
    if (::poll(watched, 2, -1) < 0 && errno != EINTR) return;
    if (watched[0].revents != 0) return;
    auto accepted = listener_.try_accept();
    if (!accepted) {
      ::poll(watched, 1, kAcceptPauseMs);
    } else if (*accepted) {
      admit(**accepted);
    }
  }
}

void UnixGate::admit(const shm::FrameSocket& socket) {
  const auto caller = socket.credentials();
  if (!caller) return;
  const bool trust = trusted(socket.fd(), *caller);
  if (!has_room(*caller, trust)) return;
  UniqueFd connection = book_.number(socket, *caller);
  if (!connection.valid()) return;
  const int flags = ::fcntl(connection.get(), F_GETFL);
  if (flags < 0 || ::fcntl(connection.get(), F_SETFL, flags | O_NONBLOCK) != 0) return;
  live_.add(connection.get(), std::to_string(caller->uid));
  deliver_(std::move(connection), trust);
}

bool UnixGate::has_room(const shm::PeerCredentials& caller, bool trust) {
  const UnixGateLimits& most = options_.limits;
  const LiveConnections::Counts counts = live_.count(std::to_string(caller.uid));
  if (trust ? counts.all < most.connections + most.reserve
            : counts.all < most.connections && counts.of_owner < most.of_user) {
    return true;
  }
  if (options_.refused) {
    options_.refused(fmt::format(
        "turned a connection of user {} to {} away: there are {} connections, {} of this user; at "
        "most {} and {}, and {} more for administrators",
        caller.uid, options_.path, counts.all, counts.of_owner, most.connections, most.of_user,
        most.reserve));
  }
  return false;
}

bool UnixGate::trusted(int fd, const shm::PeerCredentials& caller) const {
  if (caller.uid == 0 || caller.uid == ::geteuid()) return true;
  if (!options_.group) return false;
  const std::vector<gid_t> groups = groups_of(fd, caller.gid);
  return std::find(groups.begin(), groups.end(), *options_.group) != groups.end();
}

}  // namespace mk::daemon
