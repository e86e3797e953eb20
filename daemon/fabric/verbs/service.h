/// \file
/// The endpoint's own thread: answers peers' datagrams, brings answers to the callers, turns the
/// device's events into trouble for links, and opens a port that was lost again.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "daemon/fabric/verbs/directory.h"
#include "daemon/fabric/verbs/open_port.h"
#include "daemon/fabric/verbs/passes.h"
#include "shm/host/unique_fd.h"

namespace mk::fabric::verbs {

class Service {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  using PortPointer = std::shared_ptr<OpenPort>;

  /// What the thread serves; all of it outlives the service.
  struct Parts {
    PortPlace& ports;
    Directory& directory;
    const Passes& passes;
    std::function<Result<PortPointer>()> reopen;     ///< the lost port, if it is back
    std::function<void(const std::string&)> notice;  ///< EndpointConfig::notice; may be empty
  };
  static Result<std::unique_ptr<Service>> start(Parts parts);
  /// Ends the thread and tells every peer that this endpoint is gone.
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // -- control thread --
  /// A number for a question.
  std::uint64_t next_number() { return ++number_; }
  // Both go to where the peer has last said that it is.
  /// Asks, again and again, until the answer or the deadline comes, or the port is lost. A refusal
  /// is an error with the peer's sentence and code; kTimeout: nobody answered.
  Result<Datagram> ask(const Remote& to, Datagram question, Deadline deadline);
  /// Tells, once, without an answer.
  void tell(const Remote& to, Datagram message);

  /// Takes in where a peer says that it is; its links of before fail when that is news. Any thread.
  void learn(const Remote& remote);
  /// Where `peer` reaches this endpoint, with what only that peer is told. Any thread.
  Address address_for(PeerNumber peer) const;

  /// A link to be told of trouble, by any thread, until `unwatch`.
  struct Watched {
    Remote peer;
    std::vector<std::uint32_t> queues;
    /// `root`: it explains whatever else the link has run into.
    std::function<void(std::string_view, bool root)> trouble;
  };
  std::uint64_t watch(Watched watched);
  void unwatch(std::uint64_t id);

 private:
  explicit Service(Parts parts) : parts_(std::move(parts)) {}
  void run();
  /// Until something happens, `until`, or the end, which is false.
  bool wait(const PortPointer& port, Deadline until);
  void serve(OpenPort& port);
  void take_datagrams(OpenPort& port);
  /// `peer`: who sent it, by the pass on it. What it says counts for that peer alone.
  void take(OpenPort& port, PeerNumber peer, const Datagram& datagram);
  void answer(OpenPort& port, PeerNumber peer, const Datagram& question);
  void reply(const Remote& to, const Datagram& question, Result<Datagram> answer);
  void take_events(OpenPort& port);
  /// The port was looked for again, with this result: says what that means, and has peers told.
  void move(OpenPort& port, const std::string& what, Result<bool> moved);
  void announce();
  /// Makes the thread look around now. Any thread.
  void wake();
  /// The queue of datagrams is in error.
  void restart_contact(OpenPort& port, std::string_view what);
  /// What stands on the port has ended: links fail, memory is forgotten, and it is to be opened
  /// anew.
  void lose(OpenPort& port, const std::string& what);
  void reopen();
  void trouble(const std::function<bool(const Watched&)>& of, std::string_view reason,
               bool root = false);
  void say_goodbye();
  void notice(const std::string& text) const {
    if (parts_.notice) parts_.notice(text);
  }

  const Parts parts_;
  const Token token_ = parts_.ports.address().endpoint;
  UniqueFd wake_;
  std::atomic<bool> ending_{false};
  std::thread thread_;

  // The service thread's.
  int announcements_left_ = 0;
  Deadline next_probe_{};                  ///< of peers and the device
  Deadline next_look_{};                   ///< for where the port is, while it has no place
  Deadline next_open_{};                   ///< of a lost port
  Deadline opened_{};                      ///< when the last try succeeded
  std::chrono::milliseconds patience_{0};  ///< after the next try that fails
  std::string lost_;                       ///< what happened to the port
  bool deaf_said_ = false;

  std::uint64_t number_ = 0;

  std::mutex mutex_;
  std::condition_variable answered_;
  std::uint64_t asked_ = 0;           ///< the number of the question that is open; 0: none
  PeerNumber asked_peer_ = kAnyPeer;  ///< and whom it was put to
  std::optional<Datagram> answer_;
  std::vector<std::pair<std::uint64_t, Watched>> watched_;
  std::uint64_t next_watch_ = 0;
};

}  // namespace mk::fabric::verbs
