/// \file
/// Notices in an epoll instance that a client's process has ended, even if others hold its socket.
#pragma once

#include <cstdint>
#include <optional>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"
#include "shm/host/unix_socket.h"

namespace mk::daemon::control {

class ProcessWatch {
 public:
  /// `told` is the descriptor by which the client says who it is, and may be invalid. Then the
  /// kernel is asked (SO_PEERPIDFD). Where it can't tell, nothing is watched (nullopt).
  /// kInvalidArgument when `told` is no pidfd; kPermission when it is of another process than the
  /// one that connected `client`, as far as pids can be compared. `token` comes with EPOLLIN.
  static Result<std::optional<ProcessWatch>> start(const shm::FrameSocket& client, UniqueFd told,
                                                   int epoll, std::uint64_t token);
  ProcessWatch(ProcessWatch&&) noexcept = default;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ~ProcessWatch() { stop(); }

 private:
  ProcessWatch(UniqueFd process, int epoll) : process_(std::move(process)), epoll_(epoll) {}
  void stop();

  UniqueFd process_;
  int epoll_;
};

}  // namespace mk::daemon::control
