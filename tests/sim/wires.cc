#include "tests/sim/wires.h"

#include <fmt/format.h>

#include <algorithm>

namespace mk::sim {

namespace {

constexpr std::uint64_t kNoticeNsMax = 800 * kMillisecond;
constexpr std::uint64_t kDelayNsMin = 5 * kMicrosecond;

}  // namespace

void Wires::join(NodeId node, const std::shared_ptr<WireEnd>& end) {
  ends_[node] = end;
  for (const auto& [other, other_end] : ends_) {
    if (other != node) make_later(node, other, world_.random.scaled(kMicrosecond, kMillisecond));
  }
}

void Wires::leave(NodeId node) {
  ends_.erase(node);
  for (const auto& [other, end] : ends_) {
    stream(node, other).told.erase(node);
    lose(node, other, "connection reset");
  }
}

void Wires::cut(NodeId a, NodeId b, const std::string& reason, std::uint64_t for_ns) {
  Stream& cut = stream(a, b);
  cut.cut_until_ns = std::max(cut.cut_until_ns, world_.now() + for_ns);
  lose(a, b, reason);
  make_later(a, b, for_ns);
}

void Wires::lose(NodeId a, NodeId b, const std::string& reason) {
  Stream& lost = stream(a, b);
  lost.up = false;
  ++lost.number;
  world_.trace([&] { return fmt::format("wire {}-{} breaks: {}", a, b, reason); });
  for (const auto& [who, other] : {std::pair{a, b}, std::pair{b, a}}) {
    if (!lost.told.contains(who)) continue;
    world_.after(world_.random.scaled(kMicrosecond, kNoticeNsMax),
                 [this, who = who, other = other, reason] { notice(who, other, reason); });
  }
}

void Wires::notice(NodeId who, NodeId other, const std::string& reason) {
  Stream& lost = stream(who, other);
  if (lost.up || lost.told.erase(who) == 0) return;
  const auto end = ends_.find(who);
  if (end != ends_.end()) end->second->peer_down(other, reason);
  make_later(who, other, world_.random.scaled(kMillisecond, 500 * kMillisecond));
}

void Wires::make_later(NodeId a, NodeId b, std::uint64_t delay_ns) {
  world_.after(delay_ns, [this, a, b] { make(a, b); });
}

void Wires::make(NodeId a, NodeId b) {
  Stream& made = stream(a, b);
  if (made.up || !made.told.empty() || !ends_.contains(a) || !ends_.contains(b)) return;
  if (world_.now() < made.cut_until_ns) return make_later(a, b, made.cut_until_ns - world_.now());
  made.up = true;
  made.told = {a, b};
  world_.trace([&] { return fmt::format("wire {}-{} is up", a, b); });
  deliver(a, b, ends_.at(a)->hello());
  deliver(b, a, ends_.at(b)->hello());
}

Status Wires::send(NodeId from, NodeId to, const daemon::PeerMessage& message) {
  Stream& used = stream(from, to);
  if (!used.told.contains(from)) {
    return fail(ErrorCode::kUnavailable, "there is no stream from node {} to node {}", from, to);
  }
  if (used.up) deliver(from, to, message);
  return {};
}

void Wires::deliver(NodeId from, NodeId to, daemon::PeerMessage message) {
  Stream& used = stream(from, to);
  InOrder& queue = from < to ? used.to_high : used.to_low;
  const std::uint64_t when =
      queue.arrival(world_.now(), world_.random.scaled(kDelayNsMin, delay_ns_max_));
  world_.at(when, [this, from, to, number = used.number, message = std::move(message)] {
    const Stream& now = stream(from, to);
    const auto end = ends_.find(to);
    if (now.number == number && end != ends_.end()) end->second->peer_message(from, message);
  });
}

}  // namespace mk::sim
