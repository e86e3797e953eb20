/// \file
/// Control thread -> proxy thread. The memory a message needs at the proxy is made here, on the
/// control thread, and what a drained session leaves is freed here, so that the proxy's thread does
/// neither.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "daemon/proxy/link_queue.h"
#include "daemon/proxy/proxy.h"
#include "daemon/proxy/session_table.h"

namespace mk::daemon {

/// A command with the memory it brings.
struct Parcel {
  ProxyCommand command;
  std::unique_ptr<Session> session;  ///< AddSession
  std::unique_ptr<Peer> peer;        ///< BindPeer
  std::unique_ptr<LinkQueue> link;   ///< BindPeer, in case the proxy does not have the link yet
};

class Mailbox {
 public:
  explicit Mailbox(std::uint32_t link_depth) : link_depth_(link_depth) {
    incoming_.reserve(kReserved);
    retired_.reserve(2 * shm::kSessionsMax);
  }

  /// Control thread.
  void put(const ProxyCommand& command);

  /// Proxy thread: moves everything waiting to the end of `parcels`. Costs one load when there is
  /// nothing.
  bool take(std::vector<Parcel>& parcels) {
    return waiting_.load(std::memory_order_acquire) && take_waiting(parcels);
  }

  /// Proxy thread: waits for mail or `wake`, at most `ns`.
  void sleep(std::uint64_t ns);
  /// Any thread: ends a sleep that is under way, or the next one.
  void wake();

  /// Proxy thread: hands a session back, to be freed by the control thread.
  void retire(std::unique_ptr<Session> session);

  static constexpr std::size_t kReserved = 1024;

 private:
  bool take_waiting(std::vector<Parcel>& parcels);

  const std::uint32_t link_depth_;
  std::atomic<bool> waiting_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
  std::vector<Parcel> incoming_;
  std::vector<std::unique_ptr<Session>> retired_;
};

}  // namespace mk::daemon
