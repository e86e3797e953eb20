#include "daemon/proxy/mailbox.h"

#include <chrono>
#include <iterator>
#include <utility>

namespace mk::daemon {

namespace {

std::unique_ptr<Peer> make_peer(const BindPeer& bind) {
  auto peer = std::make_unique<Peer>();
  peer->rank = bind.peer_rank;
  peer->slot = bind.peer_slot;
  peer->flags = bind.flags;
  peer->flag_count = bind.flag_count;
  peer->arrivals_sent = bind.arrivals_sent;
  return peer;
}

}  // namespace

void Mailbox::put(const ProxyCommand& command) {
  Parcel parcel;
  if (const auto* add = std::get_if<AddSession>(&command)) {
    parcel.session = std::make_unique<Session>(*add);
  } else if (const auto* bind = std::get_if<BindPeer>(&command)) {
    parcel.peer = make_peer(*bind);
    parcel.link = std::make_unique<LinkQueue>(bind->link, link_depth_);
  }
  parcel.command = command;

  std::vector<std::unique_ptr<Session>> retired;  // freed after the lock is given up
  retired.reserve(retired_.capacity());
  {
    const std::lock_guard lock(mutex_);
    retired.swap(retired_);
    incoming_.push_back(std::move(parcel));
    waiting_.store(true, std::memory_order_release);
  }
  changed_.notify_one();
}

void Mailbox::sleep(std::uint64_t ns) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::nanoseconds(ns),
                    [&] { return woken_ || !incoming_.empty(); });
  woken_ = false;
}

void Mailbox::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_one();
}

bool Mailbox::take_waiting(std::vector<Parcel>& parcels) {
  const std::lock_guard lock(mutex_);
  waiting_.store(false, std::memory_order_relaxed);
  parcels.insert(parcels.end(), std::make_move_iterator(incoming_.begin()),
                 std::make_move_iterator(incoming_.end()));
  const bool any = !incoming_.empty();
  incoming_.clear();
  return any;
}

void Mailbox::retire(std::unique_ptr<Session> session) {
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(session));
}

}  // namespace mk::daemon
