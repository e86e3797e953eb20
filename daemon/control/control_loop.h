/// \file
/// ControlLoop runs one ControlPlane on one thread, with real sockets: an epoll loop over the
/// client listener, the client connections, a queue of closures from other threads, and the tick.
///
/// Everything that reaches the control plane does so on that thread. Other threads use `post` and
/// `run_sync`, proxies `proxy_event`, peer transports the PeerSink.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "daemon/control/control_plane.h"
#include "daemon/control/memory_reserve.h"
#include "daemon/control/peer_transport.h"
#include "daemon/proxy/proxy.h"
#include "shm/host/result.h"

namespace mk::daemon {

struct ControlLoopOptions {
  std::string socket_path;  ///< '@name': abstract namespace
  std::uint32_t socket_mode = 0666;
  int listening_fd = -1;  ///< listens at `socket_path` already, and is taken over; -1: bind
  std::uint32_t clients_max = 256;  ///< connections at once
  /// Of them, connections that have no session: not yet, or it has ended. Where there is no place
  /// left, a user who has more of them than another gives one up.
  std::uint32_t clients_unattached_max = 64;
  /// Of those, what one user may hold.
  std::uint32_t user_unattached_max = 32;
  /// Descriptors that clients may hold, in all and of one user: connections, queued replies' and
  /// sessions' together; 0: no limit. See client_limits.
  std::uint64_t descriptors_max = 0, user_descriptors_max = 0;
  /// From the connection to its Attach, and from the end of its session to its own.
  std::chrono::milliseconds handshake_timeout{10'000};
  /// How long what was sent may wait for a client that reads none of it.
  std::chrono::milliseconds unread_timeout{60'000};
  /// Watched when there is one: while it is spent, clients without a session make room. Outlives
  /// the loop.
  MemoryReserve* reserve = nullptr;
  /// Refuses clients of other users: for sockets that no file's mode protects.
  bool same_user_only = false;
};

class ControlLoop final : public PeerSink {
 public:
  /// Binds the client socket (kAlreadyExists names the daemon that holds it); nothing runs yet, but
  /// `proxy_event`, `post` and the PeerSink already queue.
  static Result<std::unique_ptr<ControlLoop>> create(const ControlLoopOptions& options);
  /// Stops the thread if it runs, without draining.
  ~ControlLoop() override;

  /// Says what the control plane will be made of: `proxies` (index = rail) outlive it, see `reset`.
  /// Before `start`.
  void configure(const ControlOptions& options, std::vector<Proxy*> proxies);
  /// Starts the thread. `peers` is used until `stop` has returned.
  Status start(PeerTransport& peers);

  /// Stops accepting attaches, waits until no session is left, at most until `deadline`. Then fails
  /// those that are left (kDraining), gives them a moment to drain, and ends the thread. The
  /// sockets are closed afterwards.
  void stop(std::chrono::steady_clock::time_point deadline);
  /// Destroys the control plane and with it all regions. Only after `stop`, and after the proxies
  /// have been stopped.
  void reset();

  /// Runs `fn` on the control thread, later. Dropped when the loop has stopped. From any thread.
  void post(std::function<void(ControlPlane&)> fn);

  /// Runs `fn` on the control thread and returns what it returned; kUnavailable when the loop does
  /// not run, kTimeout when it did not get to it. `fn` may run after a timeout: it must own what it
  /// uses. Not from the control thread.
  template <class Fn>
  auto run_sync(Fn fn, std::chrono::milliseconds timeout = std::chrono::seconds(5))
      -> Result<std::invoke_result_t<Fn&, ControlPlane&>>;

  /// From any thread (the proxies').
  void proxy_event(std::uint32_t rail, ProxyEvent event);

  // PeerSink
  void peer_message(NodeId node, PeerMessage message, Taken taken) override;
  void peer_down(NodeId node, std::string reason) override;
  void peers_changed() override;
  /// Valid after `configure`.
  const PeerHello& hello() const override;
  PeerHello hello_for(NodeId node) const override;

  const std::string& socket_path() const;

 private:
  class Impl;
  explicit ControlLoop(std::unique_ptr<Impl> impl);
  /// Queues `fn`; calls `abandoned` instead when it will never run. Exactly one of the two happens.
  void submit(std::function<void(ControlPlane&)> fn, std::function<void()> abandoned);

  std::unique_ptr<Impl> impl_;
};

namespace internal {

/// One run_sync under way; shared, because the caller may give up before the loop gets to it.
template <class T>
struct SyncCall {
  std::mutex mutex;
  std::condition_variable changed;
  bool abandoned = false;
  std::optional<T> value;
};

}  // namespace internal

template <class Fn>
auto ControlLoop::run_sync(Fn fn, std::chrono::milliseconds timeout)
    -> Result<std::invoke_result_t<Fn&, ControlPlane&>> {
  using Value = std::invoke_result_t<Fn&, ControlPlane&>;
  using Stored = std::conditional_t<std::is_void_v<Value>, bool, Value>;
  auto call = std::make_shared<internal::SyncCall<Stored>>();
  submit(
      [call, fn = std::move(fn)](ControlPlane& plane) mutable {
        std::optional<Stored> value;
        if constexpr (std::is_void_v<Value>) {
          fn(plane);
          value = true;
        } else {
          value = fn(plane);
        }
        std::lock_guard lock(call->mutex);
        call->value = std::move(value);
        call->changed.notify_all();
      },
      [call] {
        std::lock_guard lock(call->mutex);
        call->abandoned = true;
        call->changed.notify_all();
      });
  std::unique_lock lock(call->mutex);
  if (!call->changed.wait_for(lock, timeout,
                              [&] { return call->abandoned || call->value.has_value(); })) {
    return fail(ErrorCode::kTimeout, "the control thread did not answer within {} ms",
                timeout.count());
  }
  if (!call->value) {
    return fail(ErrorCode::kUnavailable,
                "the control thread has stopped, or has no memory for this: see the daemon's log");
  }
  if constexpr (std::is_void_v<Value>) {
    return {};
  } else {
    return std::move(*call->value);
  }
}

}  // namespace mk::daemon
