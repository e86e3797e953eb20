/// \file
/// The endpoint's own thread: answers peers' datagrams, brings answers to whoever asked, and turns
/// the device's events into trouble for links.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "daemon/fabric/verbs/acceptor.h"
#include "daemon/fabric/verbs/contact.h"
#include "daemon/fabric/verbs/directory.h"
#include "daemon/fabric/verbs/region.h"
#include "shm/host/unique_fd.h"

namespace mk::fabric::verbs {

class Service {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  /// What the thread serves; all of it outlives the service.
  struct Parts {
    Device& device;
    Contact& contact;
    Acceptor& acceptor;
    const KeyTable& keys;
    Directory& directory;
    std::function<Address()> self;  ///< this endpoint's address as it is now
    std::function<void()> tend;     ///< called now and then, and after what the device reports
  };
  static Result<std::unique_ptr<Service>> start(const Parts& parts);
  /// Ends the thread and tells every peer that this endpoint is gone.
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // -- control thread --
  /// A number for a question.
  std::uint64_t next_number() { return ++number_; }
  /// Asks, again and again, until the answer or the deadline comes. A refusal is an error with the
  /// peer's sentence and code; kTimeout: nobody answered.
  Result<Datagram> ask(const Address& to, Datagram question, Deadline deadline);
  /// Tells, once, without an answer.
  void tell(const Address& to, Datagram message);

  /// A link to be told of trouble, on the service thread, until `unwatch`.
  struct Watched {
    Address peer;
    std::vector<std::uint32_t> queues;
    std::function<void(std::string_view)> trouble;
  };
  std::uint64_t watch(Watched watched);
  void unwatch(std::uint64_t id);

 private:
  explicit Service(const Parts& parts) : parts_(parts) {}
  void run();
  void take_datagrams();
  void take(const Datagram& datagram);
  void answer(const Datagram& question);
  void learn(const Address& address);
  void reply(const Address& to, const Datagram& question, Result<Datagram> answer);
  void take_events();
  /// The port is elsewhere: says what that means, and has peers told.
  std::string move();
  void announce();
  void trouble(const std::function<bool(const Watched&)>& of, std::string_view reason);
  void say_goodbye();

  const Parts parts_;
  const Token token_ = parts_.self().endpoint;
  UniqueFd stop_;
  int announcements_left_ = 0;  ///< service thread
  std::thread thread_;
  std::uint64_t number_ = 0;

  std::mutex mutex_;
  std::condition_variable answered_;
  std::uint64_t asked_ = 0;  ///< the number of the question that is open; 0: none
  std::optional<Datagram> answer_;
  std::vector<std::pair<std::uint64_t, Watched>> watched_;
  std::uint64_t next_watch_ = 0;
};

}  // namespace mk::fabric::verbs
