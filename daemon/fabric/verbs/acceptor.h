/// \file
/// The receiving side: queue pairs that peers connected to, and, when arrivals come as immediates,
/// the receives they use up.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "daemon/fabric/verbs/device.h"
#include "daemon/fabric/verbs/directory.h"
#include "daemon/fabric/verbs/sender_table.h"

namespace mk::fabric::verbs {

class Acceptor {
 public:
  static Result<std::unique_ptr<Acceptor>> open(std::shared_ptr<const Device> device,
                                                bool unordered);

  // -- service thread --
  /// The receiving ends for connect `number` of `body.from`, which is `peer`'s; the same again when
  /// it asks again. `own`: where the endpoint is.
  Result<AcceptBody> accept(PeerNumber peer, std::uint64_t number, const ConnectBody& body,
                            const Address& own);
  void release(PeerNumber peer, const Token& from, std::uint64_t number);
  void release_all(PeerNumber peer, const Token& from);
  /// A queue pair of ours is in error: its peer broke a rule, or is gone.
  void release_queue(std::uint32_t queue);
  /// Finds out which peers are gone without having said so: an empty write goes to each, and who
  /// does not acknowledge it is let go.
  void keep_alive();

  /// Ends the connections that were let go of, as soon as the proxy has taken what had come over
  /// them; whether none is left. To be called again and again.
  bool bury();

  /// The endpoints that are connected to this one. After the service thread has ended.
  std::vector<Remote> peers() const;

  // -- proxy thread --
  /// Immediates that came in.
  std::size_t arrivals(std::span<Event> events);

 private:
  struct Accepted {
    explicit Accepted(SenderTable& table) : senders(table) {}
    ~Accepted() {
      // Before their numbers may become others'.
      for (const QueuePairHandle& queue : queues) senders.remove(queue->qp_num);
    }
    Accepted(const Accepted&) = delete;
    Accepted& operator=(const Accepted&) = delete;

    SenderTable& senders;
    Remote from;
    std::uint64_t number = 0;
    std::uint64_t serial = 0;
    std::vector<QueuePairHandle> queues;
    AcceptBody answer;
    bool probing = false;  ///< an empty write is under way
  };

  Acceptor(std::shared_ptr<const Device> device, bool unordered)
      : device_(std::move(device)), unordered_(unordered) {}
  Status create();
  Status post_receives(std::uint32_t count);
  /// For one more connection of `peer`, and at no other peer's cost.
  Status make_room(PeerNumber peer);
  /// Lets go of those connections. What has come over them was acknowledged, and a queue pair that
  /// is destroyed takes its completions with it.
  template <class Which>
  void let_go(Which which);

  const std::shared_ptr<const Device> device_;
  const bool unordered_;
  CompletionQueueHandle received_;
  CompletionQueueHandle probes_;
  ReceiveQueueHandle receives_;
  const std::unique_ptr<SenderTable> senders_ = std::make_unique<SenderTable>();
  std::vector<std::unique_ptr<Accepted>> accepted_;
  /// Let go of: taking nothing any more, with completions that the proxy may not have taken yet.
  struct Leaving {
    std::unique_ptr<Accepted> connection;
    std::uint64_t until = 0;  ///< of `emptied_`
  };
  std::vector<Leaving> leaving_;
  std::atomic<std::uint64_t> emptied_{0};  ///< how often the proxy has found nothing more
  std::uint64_t next_serial_ = 0;
};

}  // namespace mk::fabric::verbs
