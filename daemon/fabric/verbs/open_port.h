/// \file
/// All that stands on one opening of the device, and the place where an endpoint's threads find the
/// present one. A device that fails takes its opening with it: that is closed as a whole, and
/// another one put in its place when the device is back.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "daemon/fabric/verbs/acceptor.h"
#include "daemon/fabric/verbs/contact.h"
#include "daemon/fabric/verbs/flusher.h"
#include "daemon/fabric/verbs/region.h"

namespace mk::fabric::verbs {

class OpenPort {
 public:
  /// `number`: differs for each opening of one endpoint, which peers know by `endpoint`. `version`:
  /// of its first address, above all that the endpoint has had: peers take the newest for the
  /// truth.
  static Result<std::shared_ptr<OpenPort>> open(const EndpointConfig& config, const Token& endpoint,
                                                std::uint32_t number, std::uint32_t version);

  // -- any thread --
  std::uint32_t number() const { return number_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  Contact& contact() const { return *contact_; }
  Acceptor& acceptor() const { return *acceptor_; }
  const std::shared_ptr<KeyTable>& keys() const { return keys_; }
  /// Null until the first memory of a GPU has come.
  Flusher* flusher() const { return shared_flusher_.load(std::memory_order_acquire); }
  /// Where peers reach the endpoint, as it is now.
  Address address() const;

  // -- control thread --
  Status make_flusher();

 private:
  OpenPort(const Token& endpoint, std::uint32_t number, bool unordered)
      : endpoint_(endpoint), number_(number), unordered_(unordered) {}

  const Token endpoint_;
  const std::uint32_t number_;
  const bool unordered_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<KeyTable> keys_;
  std::unique_ptr<Contact> contact_;
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<Flusher> flusher_;
  std::atomic<Flusher*> shared_flusher_{nullptr};
};

/// Where the present opening is found. One thread replaces it; others that hold a lost one may
/// go on with it until the next call, to no avail. Only then is it closed. The control thread
/// holds it by a shared pointer. The proxy, which is to count no references, says which one it
/// holds.
class PortPlace {
 public:
  explicit PortPlace(std::shared_ptr<OpenPort> first);

  // -- any thread --
  /// Null while the port is lost.
  std::shared_ptr<OpenPort> get() const;
  /// The same, or why there is none.
  Result<std::shared_ptr<OpenPort>> need() const;
  /// Where peers reach the endpoint; while the port is lost, where they last did.
  Address address() const;

  // -- the thread that replaces it --
  /// `why`: a sentence that names the port.
  void lose(const std::string& why);
  void put(std::shared_ptr<OpenPort> next);
  /// Closes lost ones that the proxy has let go of; whether none is left.
  bool bury();

  // -- proxy thread --
  /// What it holds: null, or an opening that stays until `turn`.
  OpenPort* held() const { return held_.load(std::memory_order_relaxed); }
  /// Whether there is another one than that, or none.
  bool stale() const { return shown_.load(std::memory_order_acquire) != held(); }
  /// Lets go of what it holds, for the present one.
  void turn();

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<OpenPort> present_;
  std::string why_;  ///< while lost
  Address last_;     ///< while lost
  std::atomic<OpenPort*> shown_;
  std::atomic<OpenPort*> held_{nullptr};
  std::vector<std::shared_ptr<OpenPort>> lost_;  ///< of the replacing thread
};

}  // namespace mk::fabric::verbs
