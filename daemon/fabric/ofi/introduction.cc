#include "daemon/fabric/ofi/introduction.h"

#include <algorithm>
#include <utility>

namespace mk::fabric::ofi {
namespace {

void* descriptor(const Fid<fid_mr>& region) {
  return region ? ::fi_mr_desc(region.get()) : nullptr;
}

}  // namespace

// -- the sender -----------------------------------------------------------------------------------

Result<std::unique_ptr<Introduction>> Introduction::prepare(const Domain& domain, const Port& port,
                                                            fi_addr_t peer, const Address& to) {
  std::unique_ptr<Introduction> made(new Introduction);
  made->endpoint_ = port.endpoint.get();
  made->peer_ = peer;
  Messages& messages = *made->messages_;
  messages.greeting.to = to.endpoint;
  messages.greeting.tag = to.tag;
  std::size_t bytes = sizeof(messages.greeting.name);
  if (const int rc = ::fi_getname(&made->endpoint_->fid, messages.greeting.name, &bytes)) {
    return fail_fi(rc, "provider {} does not tell its endpoint's address", domain.provider());
  }
  messages.greeting.name_bytes = static_cast<std::uint32_t>(bytes);
  MK_ASSIGN_OR_RETURN(made->region_,
                      domain.register_local(&messages, sizeof messages, FI_SEND | FI_RECV));
  return made;
}

long Introduction::progress(const SenderName& from) {
  if (sent_) return 0;
  if (!receiving_) {
    const long rc = ::fi_recv(endpoint_, &messages_->answer, sizeof messages_->answer,
                              descriptor(region_), FI_ADDR_UNSPEC, &messages_->receiving);
    if (rc != 0) return rc;
    receiving_ = true;
  }
  messages_->greeting.from = from;
  const long rc = ::fi_send(endpoint_, &messages_->greeting, sizeof messages_->greeting,
                            descriptor(region_), peer_, &messages_->sending);
  sent_ = rc == 0;
  return rc;
}

bool Introduction::completed(const void* context) {
  if (context == &messages_->sending) return true;
  if (context != &messages_->receiving) return false;
  // Nobody else knows this endpoint, so an answer that is not to this greeting is a broken peer's;
  // the deadline tells.
  done_ =
      messages_->answer.magic == Answer::kMagic && messages_->answer.to == messages_->greeting.from;
  return true;
}

// -- the receiver ---------------------------------------------------------------------------------

Result<std::unique_ptr<Reception>> Reception::open(const Domain& domain, const Port& port,
                                                   const Token& own, const SenderTags& tags) {
  std::unique_ptr<Reception> made(new Reception(port, own, tags));
  MK_ASSIGN_OR_RETURN(made->region_,
                      domain.register_local(made->slots_.data(), made->slots_.size() * sizeof(Slot),
                                            FI_SEND | FI_RECV));
  made->waiting_ = made->slots_.size();
  made->progress();
  if (made->waiting_ == made->slots_.size()) {
    return fail(ErrorCode::kUnavailable, "provider {} takes no receives", domain.provider());
  }
  return made;
}

Reception::Slot* Reception::find(const void* context) {
  const auto found = std::find_if(slots_.begin(), slots_.end(),
                                  [context](const Slot& slot) { return &slot.context == context; });
  return found == slots_.end() ? nullptr : &*found;
}

bool Reception::completed(const void* context) {
  Slot* const slot = find(context);
  if (slot == nullptr) return false;
  slot->state =
      slot->state == State::kReceiving && take(*slot) ? State::kToAnswer : State::kToReceive;
  ++waiting_;
  advance(*slot);
  return true;
}

bool Reception::failed(const void* context) {
  Slot* const slot = find(context);
  if (slot == nullptr) return false;
  // A sender that went before it was answered.
  slot->state = State::kToReceive;
  ++waiting_;
  advance(*slot);
  return true;
}

bool Reception::take(Slot& slot) {
  // How long a message was is not asked for: what it does not fill was cleared before.
  const Greeting greeting = std::exchange(slot.greeting, Greeting{.magic = 0});
  if (greeting.magic != Greeting::kMagic || !same_token(greeting.to, own_) ||
      greeting.name_bytes == 0 || greeting.name_bytes > sizeof greeting.name)
    return false;
  // Nobody was told a tag that is not ours.
  const std::optional<PeerNumber> peer = tags_.peer(greeting.tag);
  if (!peer) return false;
  const std::pair name(*peer, greeting.from);
  if (const auto known = senders_.find(name); known != senders_.end()) forget(known);
  if (senders_.size() >= kSendersMax) forget(one_too_many());
  // Whose address is not taken is not answered, and says so itself when its time is over.
  if (::fi_av_insert(addresses_, greeting.name, 1, &slot.sender, 0, nullptr) != 1) return false;
  // An address that another peer has introduced stays that peer's.
  if (const auto [at, fresh] = peers_.emplace(slot.sender, *peer); !fresh && at->second != *peer)
    return false;
  senders_[name] = {slot.sender, next_number_++};
  slot.answer.to = greeting.from;
  return true;
}

void Reception::forget(Senders::iterator which) {
  [[maybe_unused]] const int ignored =
      ::fi_av_remove(addresses_, &which->second.address, 1, 0);  // it is of no use either way
  peers_.erase(which->second.address);
  senders_.erase(which);
}

Reception::Senders::iterator Reception::one_too_many() {
  // Sorted by peer.
  std::map<PeerNumber, std::size_t> counts;
  for (const auto& [name, sender] : senders_) ++counts[name.first];
  const PeerNumber most =
      std::ranges::max_element(counts, {}, [](const auto& one) { return one.second; })->first;
  auto first = senders_.lower_bound({most, SenderName{}});
  for (auto one = first; one != senders_.end() && one->first.first == most; ++one) {
    if (one->second.number < first->second.number) first = one;
  }
  return first;
}

void Reception::advance(Slot& slot) {
  if (slot.state == State::kToReceive) {
    slot.greeting.magic = 0;
    if (::fi_recv(endpoint_, &slot.greeting, sizeof slot.greeting, descriptor(region_),
                  FI_ADDR_UNSPEC, &slot.context) != 0)
      return;
    slot.state = State::kReceiving;
  } else if (slot.state == State::kToAnswer) {
    if (::fi_send(endpoint_, &slot.answer, sizeof slot.answer, descriptor(region_), slot.sender,
                  &slot.context) != 0)
      return;
    slot.state = State::kAnswering;
  } else {
    return;
  }
  --waiting_;
}

void Reception::progress() {
  if (waiting_ == 0) return;
  for (Slot& slot : slots_) advance(slot);
}

}  // namespace mk::fabric::ofi
