/// \file
/// One link of the verbs fabric: its queue pairs, its data path, and why it went down.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/fabric/link_table.h"
#include "daemon/fabric/verbs/device.h"
#include "daemon/fabric/verbs/directory.h"
#include "daemon/fabric/verbs/sender.h"

namespace mk::fabric::verbs {

/// What a link is made of, once connected. Closed queues first, then what they complete to.
struct LinkQueues {
  std::shared_ptr<const Device> device;
  CompletionQueueHandle completions;
  std::vector<SendingQueue> sending;

  std::vector<QueueRef> references() const {
    std::vector<QueueRef> all;
    for (const SendingQueue& queue : sending) all.push_back({queue.handle.get(), queue.extended});
    return all;
  }
  /// Ends all work on them: what they hold comes back as flushed. Any thread.
  void stop() const {
    for (const SendingQueue& queue : sending)
      [[maybe_unused]] const Status stopped = take_step(queue.handle.get(), to_error(), "stopped");
  }
};

class Link : public LinkBase {
 public:
  Link(const Remote& peer, std::string peer_name, std::uint64_t connect_number, LinkQueues queues,
       Sender::Options options)
      : peer_(peer),
        peer_name_(std::move(peer_name)),
        connect_number_(connect_number),
        queues_(std::move(queues)),
        sender_(queues_.completions.get(), queues_.references(), [&] {
          options.peer_name = peer_name_;
          options.stop = [this] { queues_.stop(); };
          return std::move(options);
        }()) {}

  const Remote& peer() const { return peer_; }
  const std::string& peer_name() const { return peer_name_; }
  std::uint64_t connect_number() const { return connect_number_; }
  const LinkQueues& queues() const { return queues_; }

  // -- proxy thread --
  Sender& sender() { return sender_; }
  bool down_reported = false;

  // -- any thread --
  /// Brings the link down by the proxy's next poll; the first reason counts, or the root of all.
  void fail(std::string_view reason, bool root = false) {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed) && (!root || rooted_)) return;
    reason_ = reason;
    rooted_ = root;
    failed_.store(true, std::memory_order_release);
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
  }

  std::uint64_t watch = 0;  ///< control thread: its number with the service

 private:
  const Remote peer_;
  const std::string peer_name_;
  const std::uint64_t connect_number_;
  LinkQueues queues_;
  Sender sender_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string reason_;
  bool rooted_ = false;
};

}  // namespace mk::fabric::verbs
