/// \file
/// The client's end of the daemon socket: requests matched to replies, and a monitor thread that
/// notices when the daemon hangs up, stops beating, or fails the session.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/src/process_mark.h"
#include "shm/host/protocol.h"
#include "shm/host/result.h"
#include "shm/host/segment.h"
#include "shm/host/unix_socket.h"

namespace mk::client {

class Connection {
 public:
  /// Connects and exchanges Hello. An ABI of another major version is refused, both versions named.
  static Result<std::unique_ptr<Connection>> open(const std::string& socket_path,
                                                  std::chrono::milliseconds timeout);
  ~Connection();

  /// Sends `request` and waits for its reply of type `Reply`. `timeout` covers both; the error
  /// names the request.
  template <class Reply, class Request>
  Result<Reply> call(const Request& request, std::chrono::milliseconds timeout,
                     std::span<const int> fds = {}, std::vector<UniqueFd>* reply_fds = nullptr) {
    MK_ASSIGN_OR_RETURN(shm::Frame frame, call_frame(static_cast<std::uint16_t>(Request::kType),
                                                     shm::encode_message(request), fds, timeout,
                                                     static_cast<std::uint16_t>(Reply::kType)));
    if (reply_fds != nullptr) *reply_fds = std::move(frame.fds);
    return shm::decode_message<Reply>(frame.payload);
  }

  /// Sends `request`, within `timeout`, and does not wait for its reply. `answered` is called once,
  /// on the monitor thread: with the reply, or with why there will be none.
  template <class Request>
  void post(const Request& request, std::chrono::milliseconds timeout,
            std::function<void(Status)> answered) {
    post_frame(static_cast<std::uint16_t>(Request::kType), shm::encode_message(request), timeout,
               std::move(answered));
  }

  /// Waits for the daemon's JobUp or for a failure.
  Status wait_job_up(std::chrono::milliseconds timeout);

  /// From now on a stopped heartbeat of `segment` (which outlives this) counts as the daemon's
  /// loss.
  void watch_heartbeat(const shm::Segment* segment, std::chrono::milliseconds limit);

  /// Why the connection or the session failed; ok while well. In a forked child: that it is one.
  Status status() const;
  /// Non-zero once `status` is an error. A wait inside an operator reads it.
  /// It begins a page on which nothing else lies, so that a GPU may be shown it.
  const std::uint32_t* abort_word() const { return &abort_page_->word; }
  /// The daemon's.
  std::uint16_t abi_minor() const { return abi_minor_; }
  /// The daemon is expected to hang up now; that is no error any more.
  void expect_close() { closing_.store(true); }
  /// Hangs up; nothing is called or answered any more. The abort word stays.
  void close();

 private:
  explicit Connection(shm::FrameSocket socket)
      : socket_(std::move(socket)), closed_in_children_(socket_.fd()) {}
  Result<shm::Frame> call_frame(std::uint16_t type, const std::vector<std::byte>& payload,
                                std::span<const int> fds, std::chrono::milliseconds timeout,
                                std::uint16_t reply_type);
  void post_frame(std::uint16_t type, const std::vector<std::byte>& payload,
                  std::chrono::milliseconds timeout, std::function<void(Status)> answered);
  void monitor();
  void dispatch(shm::Frame frame);
  void fail_all(Error error);
  /// Tells the daemon that this process runs.
  void beat();
  void check_heartbeat();

  const ProcessMark home_;
  shm::FrameSocket socket_;
  const ClosedInChildren closed_in_children_;
  std::thread monitor_thread_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> closing_{false};

  std::mutex send_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_request_ = 1;
  std::map<std::uint64_t, std::optional<shm::Frame>> pending_;
  std::map<std::uint64_t, std::function<void(Status)>> posted_;
  bool job_up_ = false;
  std::optional<Error> error_;
  const shm::Segment* watched_ = nullptr;
  std::chrono::milliseconds heartbeat_limit_{0};
  std::uint16_t abi_minor_ = 0;
  struct alignas(4096) AbortPage {
    std::uint32_t word = 0;
  };
  const std::unique_ptr<AbortPage> abort_page_ = std::make_unique<AbortPage>();
};

}  // namespace mk::client
