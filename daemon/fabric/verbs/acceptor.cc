#include "daemon/fabric/verbs/acceptor.h"

#include <endian.h>

#include <algorithm>
#include <array>
#include <utility>

#include "daemon/fabric/verbs/queue_pair.h"
#include "shm/limits.h"

namespace mk::fabric::verbs {
namespace {

/// Immediates that may come in before the proxy looks; more wait at their senders' NICs.
constexpr std::uint32_t kReceivesMax = 4096;
/// Connections of all peers at most: of every other node, and as many that end.
constexpr std::size_t kAcceptedMax = 2 * shm::kNodesMax;
/// Connections of one peer: past it, its oldest is let go. As many more may be ending.
constexpr std::size_t kAcceptedOfPeerMax = 64;
constexpr std::size_t kReceiveChain = 64;

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::open(std::shared_ptr<const Device> device,
                                                 bool unordered) {
  std::unique_ptr<Acceptor> acceptor(new Acceptor(std::move(device), unordered));
  MK_RETURN_IF_ERROR(acceptor->create());
  return acceptor;
}

Status Acceptor::create() {
  const std::uint32_t receives =
      std::min({kReceivesMax, device_->shared_receives_max(), device_->completions_max()});
  if (unordered_ && receives == 0) {
    return fail(ErrorCode::kUnsupported,
                "RDMA port {} has no shared receive queues, which arrivals by immediate need: set "
                "fabric.verbs.arrival = \"flag\"",
                device_->name());
  }
  ibv_context* const context = device_->context();
  received_.reset(
      ::ibv_create_cq(context, static_cast<int>(unordered_ ? receives : 1), nullptr, nullptr, 0));
  probes_.reset(::ibv_create_cq(
      context,
      static_cast<int>(std::min<std::uint32_t>(4 * kAcceptedMax, device_->completions_max())),
      nullptr, nullptr, 0));
  if (!received_ || !probes_)
    return fail_verb(errno, "RDMA port {} gives no completion queue", device_->name());
  if (!unordered_) return {};
  ibv_srq_init_attr wanted{};
  wanted.attr.max_wr = receives;
  wanted.attr.max_sge = 1;
  receives_.reset(::ibv_create_srq(device_->domain(), &wanted));
  if (!receives_)
    return fail_verb(errno, "RDMA port {} gives no shared receive queue", device_->name());
  return post_receives(receives);
}

Status Acceptor::post_receives(std::uint32_t count) {
  std::array<ibv_recv_wr, kReceiveChain> chain{};
  while (count > 0) {
    const std::size_t now = std::min<std::size_t>(count, chain.size());
    for (std::size_t i = 0; i < now; ++i) chain[i].next = i + 1 < now ? &chain[i + 1] : nullptr;
    ibv_recv_wr* refused = nullptr;
    if (const int error = ::ibv_post_srq_recv(receives_.get(), chain.data(), &refused))
      return fail_verb(error, "the shared receive queue takes no receive");
    count -= static_cast<std::uint32_t>(now);
  }
  return {};
}

Result<AcceptBody> Acceptor::accept(PeerNumber peer, std::uint64_t number, const ConnectBody& body,
                                    const Address& own) {
  for (const auto& known : accepted_) {
    if (known->number == number && known->from.is(peer, body.from.endpoint)) return known->answer;
  }
  if (body.queues == 0 || body.queues > kQueuesMax || body.from.mtu < IBV_MTU_256 ||
      body.from.mtu > IBV_MTU_4096) {
    return fail(ErrorCode::kProtocol, "a connection of {} queues and MTU code {} is none",
                body.queues, body.from.mtu);
  }
  if ((body.from.unordered != 0) != unordered_) {
    return fail(ErrorCode::kInvalidArgument,
                "fabric.verbs.arrival is \"{}\" there and \"{}\" here: it must be the same",
                unordered_ ? "flag" : "immediate", unordered_ ? "immediate" : "flag");
  }
  MK_RETURN_IF_ERROR(make_room(peer));
  auto made = std::make_unique<Accepted>(*senders_);
  made->from = {peer, body.from};
  made->number = number;
  made->serial = ++next_serial_;
  made->answer.queues = body.queues;
  made->answer.from = own;
  for (std::uint32_t i = 0; i < body.queues; ++i) {
    ibv_qp_init_attr wanted{};
    wanted.qp_type = IBV_QPT_RC;
    wanted.send_cq = probes_.get();
    wanted.recv_cq = received_.get();
    wanted.srq = receives_.get();
    wanted.cap.max_send_wr = 2;
    wanted.cap.max_recv_wr = unordered_ ? 0 : 1;
    wanted.cap.max_send_sge = 1;
    wanted.cap.max_recv_sge = 1;
    QueuePairHandle queue(::ibv_create_qp(device_->domain(), &wanted));
    if (!queue) return fail_verb(errno, "no queue pair for another connection");
    MK_ASSIGN_OR_RETURN(const std::uint32_t first, make_first_packet());
    const QueueEnd end{queue->qp_num, first};
    MK_RETURN_IF_ERROR(connect_queue(queue.get(), device_->path(), body.from, end, body.ends[i]));
    made->answer.ends[i] = end;
    const std::uint32_t queue_number = queue->qp_num;
    made->queues.push_back(std::move(queue));
    if (!senders_->add(queue_number, peer)) {
      return fail(ErrorCode::kLimitExceeded, "it has no place for queue pair {}", queue_number);
    }
  }
  accepted_.push_back(std::move(made));
  return accepted_.back()->answer;
}

Status Acceptor::make_room(PeerNumber peer) {
  if (peer != kAnyPeer) {
    const auto of_peer = [peer](const auto& one) { return one->from.peer == peer; };
    const auto has = std::ranges::count_if(accepted_, of_peer);
    if (static_cast<std::size_t>(has) >= kAcceptedOfPeerMax) {
      // The first: they are in the order in which they came.
      const std::uint64_t oldest = (*std::ranges::find_if(accepted_, of_peer))->serial;
      let_go([oldest](const Accepted& one) { return one.serial == oldest; });
    }
    const auto leave = std::ranges::count_if(leaving_, of_peer, &Leaving::connection);
    if (static_cast<std::size_t>(leave) > kAcceptedOfPeerMax) {
      return fail(ErrorCode::kLimitExceeded, "{} connections of this node are still ending there",
                  leave);
    }
  }
  if (accepted_.size() + leaving_.size() < kAcceptedMax) return {};
  return fail(ErrorCode::kLimitExceeded, "it has {} connections already", kAcceptedMax);
}

template <class Which>
void Acceptor::let_go(Which which) {
  if (!unordered_) {
    std::erase_if(accepted_, [&](const auto& one) { return which(*one); });
    return;
  }
  const auto first = std::stable_partition(accepted_.begin(), accepted_.end(),
                                           [&](const auto& one) { return !which(*one); });
  for (auto one = first; one != accepted_.end(); ++one) {
    // In error it takes nothing more, so that what has come is complete.
    for (const QueuePairHandle& queue : (*one)->queues) {
      [[maybe_unused]] const Status stopped = take_step(queue.get(), to_error(), "stopped");
    }
    // The proxy may be in mid-poll now: the one after that has begun later.
    leaving_.push_back({std::move(*one), emptied_.load(std::memory_order_acquire) + 2});
  }
  accepted_.erase(first, accepted_.end());
}

bool Acceptor::bury() {
  const std::uint64_t emptied = emptied_.load(std::memory_order_acquire);
  std::erase_if(leaving_, [emptied](const Leaving& one) { return one.until <= emptied; });
  return leaving_.empty();
}

void Acceptor::release(PeerNumber peer, const Token& from, std::uint64_t number) {
  let_go([&](const Accepted& one) { return one.number == number && one.from.is(peer, from); });
}

void Acceptor::release_all(PeerNumber peer, const Token& from) {
  let_go([&](const Accepted& one) { return one.from.is(peer, from); });
}

void Acceptor::release_queue(std::uint32_t queue) {
  let_go([&](const Accepted& one) {
    return std::any_of(one.queues.begin(), one.queues.end(),
                       [&](const QueuePairHandle& own) { return own->qp_num == queue; });
  });
}

void Acceptor::keep_alive() {
  std::array<ibv_wc, 16> completions;
  int count = 0;
  while ((count = ::ibv_poll_cq(probes_.get(), static_cast<int>(completions.size()),
                                completions.data())) > 0) {
    for (int i = 0; i < count; ++i) {
      const ibv_wc& completion = completions[static_cast<std::size_t>(i)];
      const bool good = completion.status == IBV_WC_SUCCESS;
      let_go([&](Accepted& one) {
        if (one.serial != completion.wr_id) return false;
        one.probing = false;
        return !good;
      });
    }
  }
  let_go([](Accepted& one) {
    if (one.probing) return false;
    ibv_send_wr request{};
    request.wr_id = one.serial;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* refused = nullptr;
    one.probing = true;
    return ::ibv_post_send(one.queues.front().get(), &request, &refused) != 0;
  });
}

std::vector<Remote> Acceptor::peers() const {
  std::vector<Remote> all;
  for (const auto& one : accepted_) {
    const bool known = std::any_of(all.begin(), all.end(), [&](const Remote& other) {
      return other.is(one->from.peer, one->from.address.endpoint);
    });
    if (!known) all.push_back(one->from);
  }
  return all;
}

std::size_t Acceptor::arrivals(std::span<Event> events) {
  if (!unordered_) return 0;
  std::array<ibv_wc, kReceiveChain> completions;
  const std::size_t room = std::min(events.size(), completions.size());
  if (room == 0) return 0;
  const int got = ::ibv_poll_cq(received_.get(), static_cast<int>(room), completions.data());
  if (got < static_cast<int>(room))
    emptied_.store(emptied_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  if (got <= 0) return 0;
  std::size_t count = 0;
  for (int i = 0; i < got; ++i) {
    const ibv_wc& completion = completions[static_cast<std::size_t>(i)];
    // A receive that failed belonged to a connection that is gone: nothing arrived.
    if (completion.status != IBV_WC_SUCCESS || (completion.wc_flags & IBV_WC_WITH_IMM) == 0)
      continue;
    events[count++] = {Event::Kind::kArrival,
                       0,
                       0,
                       be32toh(completion.imm_data),
                       ErrorCode::kOk,
                       senders_->find(completion.qp_num)};
  }
  [[maybe_unused]] const Status posted = post_receives(static_cast<std::uint32_t>(got));
  return count;
}

}  // namespace mk::fabric::verbs
