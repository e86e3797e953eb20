#include "daemon/control/link_table.h"

#include <algorithm>

#include "daemon/control/control_plane.h"

namespace mk::daemon::control {

namespace {

constexpr std::uint64_t kBackoffMinNs = 100'000'000;
constexpr std::uint64_t kBackoffMaxNs = 5'000'000'000;
/// Tries that nobody waits for come so many backoffs later: the control thread may block in them.
constexpr std::uint64_t kUnaskedFactor = 5;

}  // namespace

LinkTable::LinkTable(std::vector<fabric::Endpoint*> endpoints,
                     std::function<std::uint64_t()> now_ns)
    : endpoints_(std::move(endpoints)), now_(std::move(now_ns)) {}

std::shared_ptr<Link> LinkTable::get(const LinkKey& key, const Bytes& address,
                                     const std::string& peer_name, bool may_block) {
  Entry& entry = entries_[key];
  fabric::Endpoint& endpoint = *endpoints_[key.rail];
  if (entry.since_ns == 0) entry.since_ns = now_();
  if (entry.link != nullptr) {
    // That it went down may be on its way to us.
    const std::string down = endpoint.link_reason(entry.link->id);
    if (!down.empty()) set_error(entry, down);
  }
  if (entry.link != nullptr && entry.address == address) return entry.link;
  // One to an earlier address stays with the sessions that have it.
  entry.link.reset();
  if (!may_block || now_() < entry.next_try_ns) return nullptr;
  auto id = endpoint.connect_peer(key.peer, address, peer_name);
  if (!id) {
    entry.stats->connect_failures.add(1);
    set_error(entry, id.error().message);
    return nullptr;
  }
  entry.link = std::make_shared<Link>(endpoint, *id, entry.stats);
  entry.address = address;
  entry.stats->connects.add(1);
  entry.reason.clear();
  entry.in_error = false;
  entry.since_ns = now_();
  entry.backoff_ns = 0;
  return entry.link;
}

std::string LinkTable::reason(const LinkKey& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? std::string() : found->second.reason;
}

void LinkTable::on_error(std::uint32_t rail, fabric::LinkId id, const std::string& reason) {
  for (auto& [key, entry] : entries_) {
    // A link that was replaced meanwhile is nobody's here any more; the sessions still have it.
    if (key.rail == rail && entry.link != nullptr && entry.link->id == id) {
      set_error(entry, reason);
    }
  }
}

void LinkTable::on_peer_down(NodeId peer, const std::string& reason) {
  for (auto& [key, entry] : entries_) {
    if (key.peer != peer) continue;
    set_error(entry, reason);
    entry.backoff_ns = 0;
    entry.next_try_ns = 0;
  }
}

void LinkTable::on_moved(NodeId peer, std::uint32_t peer_rail) {
  for (auto& [key, entry] : entries_) {
    if (key.peer != peer || key.peer_rail != peer_rail) continue;
    entry.backoff_ns = 0;
    entry.next_try_ns = 0;
  }
}

void LinkTable::forget(NodeId peer) {
  std::erase_if(entries_, [peer](const auto& entry) { return entry.first.peer == peer; });
}

void LinkTable::set_error(Entry& entry, const std::string& reason) {
  const std::uint64_t now_ns = now_();
  if (!entry.in_error) entry.since_ns = now_ns;
  entry.link.reset();
  entry.in_error = true;
  entry.reason = reason;
  entry.backoff_ns = std::clamp(entry.backoff_ns * 2, kBackoffMinNs, kBackoffMaxNs);
  entry.next_try_ns = now_ns + entry.backoff_ns;
}

std::optional<LinkKey> LinkTable::retry_due(const std::function<bool(NodeId)>& reachable) const {
  const std::uint64_t now_ns = now_();
  for (const auto& [key, entry] : entries_) {
    if (!entry.in_error || !reachable(key.peer)) continue;
    if (now_ns >= entry.next_try_ns + kUnaskedFactor * entry.backoff_ns) return key;
  }
  return std::nullopt;
}

std::vector<LinkInfo> LinkTable::snapshot(
    const std::function<std::string(NodeId)>& describe) const {
  const std::uint64_t now_ns = now_();
  std::vector<LinkInfo> infos;
  for (const auto& [key, entry] : entries_) {
    LinkInfo& info = infos.emplace_back();
    info.rail = key.rail;
    info.peer = key.peer;
    info.peer_rail = key.peer_rail;
    info.peer_name = describe(key.peer);
    info.fabric = endpoints_[key.rail]->capabilities().name;
    const std::string gpu_path = endpoints_[key.rail]->gpu_path();
    if (!gpu_path.empty()) info.fabric += ", GPU memory " + gpu_path;
    info.state = entry.link != nullptr ? "up" : entry.in_error ? "error" : "connecting";
    info.reason = entry.reason;
    info.state_for_ns = now_ns - entry.since_ns;
    if (entry.link != nullptr) info.id = entry.link->id;
    // The proxy's clock may be a little ahead.
    const std::uint64_t progress_ns = entry.stats->progress_ns.value();
    if (entry.stats->outstanding.value() != 0 && now_ns > progress_ns) {
      info.stalled_for_ns = now_ns - progress_ns;
    }
    info.stats = entry.stats;
  }
  return infos;
}

std::size_t LinkTable::up_count() const {
  return static_cast<std::size_t>(std::ranges::count_if(
      entries_, [](const auto& entry) { return entry.second.link != nullptr; }));
}

}  // namespace mk::daemon::control
