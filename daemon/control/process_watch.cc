#include "daemon/control/process_watch.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "shm/host/process_fd.h"

namespace mk::daemon::control {

namespace {

/// Whether /proc numbers processes as SO_PEERCRED does for us: it may be of another pid namespace.
bool proc_is_ours() {
  const auto own = shm::open_process(::getpid());
  return own && shm::pid_of(own->get()) == ::getpid();
}

/// That `process` is the one at the other end of `client`.
Status check_process(const shm::FrameSocket& client, int process) {
  if (!shm::is_process(process)) {
    return fail(
        ErrorCode::kInvalidArgument,
        "the descriptor that came with attach is no pidfd; send the process's own, or none");
  }
  const auto credentials = client.credentials();
  if (!credentials) return propagate(credentials);
  const auto pid = shm::pid_of(process);
  // One that has been reaped has no pid, and its watch tells at once that it has ended.
  if (!pid || *pid < 0 || *pid == credentials->pid || !proc_is_ours()) return {};
  return fail(ErrorCode::kPermission,
              "the pidfd that came with attach is of process {}, and you are process {}; send the "
              "process's own, or none",
              *pid, credentials->pid);
}

}  // namespace

Result<std::optional<ProcessWatch>> ProcessWatch::start(const shm::FrameSocket& client,
                                                        UniqueFd told, int epoll,
                                                        std::uint64_t token) {
  if (told.valid()) {
    MK_RETURN_IF_ERROR(check_process(client, told.get()));
  } else {
    auto process = shm::peer_process(client.fd());
    if (!process) return std::nullopt;
    told = std::move(*process);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = token;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, told.get(), &event) != 0) {
    return fail_errno(errno, "cannot watch the client's process");
  }
  return ProcessWatch(std::move(told), epoll);
}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  stop();
  process_ = std::move(other.process_);
  epoll_ = other.epoll_;
  return *this;
}

void ProcessWatch::stop() {
  if (!process_.valid()) return;
  // Closing alone would not do: others have the client's descriptor, too, and as long as one is
  // open the instance would go on telling of it.
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, process_.get(), nullptr);
  process_ = UniqueFd();
}

}  // namespace mk::daemon::control
