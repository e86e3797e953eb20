/// \file
/// The service thread of a loopback endpoint: it answers peers that ask for regions, and notices
/// peers that go away.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/fabric/loopback/connection.h"
#include "daemon/fabric/loopback/region.h"
#include "shm/host/unix_socket.h"

namespace mk::fabric::loopback {

class Service {
 public:
  /// Listens and starts the thread. `notice`: EndpointConfig::notice.
  static Result<std::unique_ptr<Service>> start(const Token& endpoint,
                                                std::shared_ptr<RegionTable> regions,
                                                std::function<void(const std::string&)> notice);
  /// Ends the thread; every connection closes, by which the peers see that this endpoint is gone.
  ~Service();

  /// Calls `on_gone` on the service thread, once, when the other end of `fd` hangs up. Unwatch
  /// before closing `fd`.
  std::uint64_t watch(int fd, std::function<void()> on_gone);
  /// After it returns, the callback neither runs nor will run.
  void unwatch(std::uint64_t id);

 private:
  struct Watch {
    std::uint64_t id;
    int fd;
    std::function<void()> on_gone;
  };
  using Clock = std::chrono::steady_clock;

  Service(const Token& endpoint, std::shared_ptr<RegionTable> regions, shm::FrameListener listener,
          UniqueFd wake, std::function<void(const std::string&)> notice);
  void run();
  void accept_some();
  /// Takes and answers what has arrived; false when the connection is to be closed.
  bool serve(shm::FrameSocket& peer);
  Status answer(shm::FrameSocket& peer, const shm::Frame& question);
  void wake();

  const Token endpoint_;
  const std::shared_ptr<RegionTable> regions_;
  shm::FrameListener listener_;
  UniqueFd wake_;
  const std::function<void(const std::string&)> notice_;
  std::atomic<bool> stop_{false};
  std::mutex watches_mutex_;
  std::vector<Watch> watches_;
  std::uint64_t next_watch_ = 1;
  // The service thread's.
  std::vector<std::unique_ptr<shm::FrameSocket>> peers_;
  Clock::time_point accepts_from_{};  ///< later than now: accept has failed
  bool accept_failing_ = false;
  std::thread thread_;
};

}  // namespace mk::fabric::loopback
