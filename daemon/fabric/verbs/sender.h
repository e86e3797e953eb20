/// \file
/// The data path of one link: writes in, work requests on one or several queues, completions back.
/// Knows neither how its queues came to be nor how they are closed. Proxy thread only.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "daemon/fabric/verbs/work.h"

namespace mk::fabric::verbs {

/// A connected queue pair. Its owner keeps it as long as the Sender.
struct QueueRef {
  ibv_qp* classic = nullptr;
  ibv_qp_ex* extended = nullptr;  ///< null: submit by the classic interface
};

class Sender {
 public:
  struct Options {
    DeliveryContract contract = DeliveryContract::kOrdered;
    std::uint32_t depth = 256;  ///< writes in flight
    std::uint32_t opening = 0;  ///< of the port: whose regions may be sent from
    /// What the port sends as one message: longer writes become several.
    std::uint64_t message_bytes_max = UINT64_MAX;
    std::uint64_t write_timeout_ns = 0;  ///< without a completion, the link is given up
    std::function<void()> stop;          ///< puts all queues into the error state
    std::string peer_name;
  };
  /// `completions`: of all queues and of nothing else, with room for what they can hold.
  Sender(ibv_cq* completions, std::vector<QueueRef> queues, Options options);

  /// Takes as many writes from the front as there is room for. Each queue that gets any is rung
  /// once, and its last request is signalled. Since nothing else is, at most one batch per queue is
  /// ever unsignalled.
  std::size_t post(std::span<const Write> writes);
  /// Takes completions, watches the time-out.
  void progress(std::uint64_t now_ns);
  /// Reports what ended; its place is free then.
  std::size_t report(LinkId link, std::span<Event> events);

  /// Gives the link up: nothing more is posted, and what is outstanding is reported as failed, once
  /// the NIC has let go of it.
  void close(const std::string& reason);
  bool closed() const { return closed_; }
  const std::string& reason() const { return reason_; }

  /// Whether the NIC has work of this link.
  bool busy() const { return outstanding_ != 0; }
  /// Whether everything taken was reported.
  bool empty() const { return free_ == options_.depth; }

 private:
  /// A write, in the order of its queue.
  struct Posted {
    std::uint64_t cookie;
    std::uint64_t last_request;  ///< done when this request is
  };
  struct Lane {
    QueueRef queue;
    Chain chain;  ///< of the batch being posted
    std::vector<Posted> writes;
    std::size_t head = 0, tail = 0;  ///< free-running
    std::uint64_t taken = 0;         ///< requests made so far; ids count from 1
    std::uint64_t posted = 0;        ///< the last id the NIC was given
    std::uint64_t completed = 0;     ///< the last id that came back
  };
  struct Done {
    std::uint64_t cookie;
    ErrorCode code;
  };

  /// Puts what `write` becomes into its lane's chain; false when the queue has no room for it.
  bool place(const Write& write);
  void submit(Lane& lane);
  void take(const ibv_wc& completion);
  void finish(std::uint64_t cookie, ErrorCode code);
  /// Once all queues are flushed, or have had the time to be, fails what is left.
  void end_flush(std::uint64_t now_ns);

  ibv_cq* const completions_;
  const Options options_;
  const std::uint64_t requests_max_;  ///< that a send queue has room for
  std::vector<Lane> lanes_;
  std::vector<Done> done_;
  std::size_t done_head_ = 0, done_tail_ = 0;
  std::uint32_t free_;
  std::uint32_t outstanding_ = 0;
  std::uint64_t progress_ns_ = 0;  ///< when something last came back, or work began
  bool idle_ = true;               ///< nothing was outstanding when last looked at
  bool closed_ = false;
  std::uint64_t closed_ns_ = 0;
  std::string reason_;
};

}  // namespace mk::fabric::verbs
