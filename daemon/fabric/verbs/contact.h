/// \file
/// The endpoint's datagram queue pair: how endpoints reach each other before they have a
/// connection. Unreliable, as the network's datagrams are: who asks asks again.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "daemon/fabric/verbs/device.h"

namespace mk::fabric::verbs {

class Contact {
 public:
  static Result<std::unique_ptr<Contact>> open(std::shared_ptr<const Device> device);

  std::uint32_t number() const { return queue_->qp_num; }
  std::uint32_t key() const { return key_; }

  /// Sends one datagram; returns when the NIC has sent it, which says nothing about its arrival, or
  /// says that it does not. Any thread.
  Status send(const Address& to, const Datagram& datagram);

  /// Becomes readable when a datagram has come. Service thread.
  int fd() const { return arrivals_->fd; }
  /// The next datagram, of whomever; nullopt when there is none. Service thread.
  std::optional<Datagram> receive();
  /// After the file became readable: takes the notice and asks for the next. Service thread.
  void rearm();
  /// Why the file never becomes readable: the NIC refuses to notify, so `receive` has to be called
  /// again and again. Empty: it does. Service thread.
  const std::string& deaf() const { return deaf_; }
  /// After the port's partition got another place: joins it there. Under the same number, but what
  /// has come and was not received is lost. Service thread.
  Status follow();
  /// The queue is in error: nothing more goes or comes until `restart`. Any thread.
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  /// Begins anew, as `follow` does. Service thread.
  Status restart();

 private:
  /// What the network puts before a datagram, and the datagram.
  struct alignas(8) Received {
    std::array<std::byte, 40> route;
    Datagram datagram;
  };
  static constexpr std::uint32_t kReceives = 128;

  explicit Contact(std::shared_ptr<const Device> device) : device_(std::move(device)) {}
  Status create();
  /// From fresh to sending, in the partition that the port is in.
  Status start();
  /// With the sending mutex held.
  Status start_again();
  /// The last datagram's end, if it has come; with the sending mutex held.
  std::optional<ibv_wc_status> take_back();
  void arm();
  Status post_receive(std::uint64_t slot);

  const std::shared_ptr<const Device> device_;
  std::uint32_t key_ = 0;
  std::uint16_t pkey_index_ = 0;
  std::string deaf_;
  ChannelHandle arrivals_;
  CompletionQueueHandle received_queue_;
  CompletionQueueHandle sent_queue_;
  QueuePairHandle queue_;
  std::vector<Received> received_ = std::vector<Received>(kReceives);
  RegionHandle received_region_;
  std::atomic<bool> broken_{false};
  std::mutex send_mutex_;
  // Of the datagram that the NIC has, while it has one.
  bool in_flight_ = false;
  PathHandle outgoing_path_;
  Datagram outgoing_;
  RegionHandle outgoing_region_;
};

}  // namespace mk::fabric::verbs
