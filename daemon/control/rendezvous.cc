#include <algorithm>
#include <set>

#include "daemon/control/control_plane_impl.h"
#include "daemon/control/ranks.h"

namespace mk::daemon {

namespace {

/// Reasons of one kind that a sentence holds; of more it holds the number. With their lengths it
/// then fits a message, however many nodes there are.
class Reasons {
 public:
  void add(const std::string& reason) {
    if (++count_ <= kShown) text_ += "; " + reason;
  }
  std::string text() const {
    return count_ <= kShown ? text_
                            : fmt::format("{}; and {} more like it", text_, count_ - kShown);
  }

 private:
  static constexpr std::size_t kShown = 6;
  std::string text_;
  std::size_t count_ = 0;
};

}  // namespace

void ControlPlane::Impl::advance(Job& job) {
  if (job.ending || !job.all_local_here()) return;
  if (job.state == JobState::kGathering) {
    job.state = JobState::kAnnounced;
    announce(job);
    meet_all(job);
  }
  if (job.state == JobState::kAnnounced && !job.ending && job.parts.size() + 1 == job.nodes &&
      bind(job)) {
    job.state = JobState::kBound;
    for (const auto& [rank, part] : job.parts) {
      send_to_part(job, part, JobReady{job.name, job.part_id, part.part.part_id});
    }
  }
  const bool all_ready =
      std::ranges::all_of(job.parts, [](const auto& entry) { return entry.second.ready; });
  if (job.state == JobState::kBound && !job.ending && all_ready) job_up(job);
}

std::shared_ptr<Link> ControlPlane::Impl::link_to(const LinkKey& key) {
  return wait_for([&] {
    return links_.get(key, peers_.at(key.peer).hello.rail_addresses[key.peer_rail],
                      fmt::format("{} rail {}", describe_node(key.peer), key.peer_rail),
                      may_wait());
  });
}

std::string ControlPlane::Impl::describe_link(const LinkKey& key) const {
  const std::string there =
      key.peer_rail == key.rail ? "" : fmt::format("rail {} of ", key.peer_rail);
  return fmt::format("rail {} to {}{}", key.rail, there, describe_node(key.peer));
}

LinkKey ControlPlane::Impl::link_key(const Session& session, const RemotePart& part) {
  return {session.rail, part.node, part.part.sessions[session.attach.local_rank].rail};
}

void ControlPlane::Impl::retry_links() {
  const auto due = links_.retry_due([this](NodeId node) { return peers_.at(node).up; });
  if (due) (void)link_to(*due);
}

bool ControlPlane::Impl::bind(Job& job) {
  // All links first: nothing is bound before everything can be. One that does not come up ends this
  // try; the next goes on with what is there. So does an event that has waited long enough.
  std::map<LinkKey, std::shared_ptr<Link>> links;
  for (const Session* session : job.sessions()) {
    for (const auto& [rank, part] : job.parts) {
      const LinkKey key = link_key(*session, part);
      auto& link = links[key];
      if (link != nullptr) continue;
      link = link_to(key);
      if (link == nullptr) return false;
    }
  }
  for (Session* session : job.sessions()) {
    for (const auto& [rank, part] : job.parts) {
      const auto& link = links.at(link_key(*session, part));
      const auto peer = session->peers.find(part.part.sessions[session->attach.local_rank].rank);
      if (peer != session->peers.end() && peer->second.bound_to(*link)) continue;
      if (!may_wait()) return false;
      const Status bound =
          wait_for([&, &part = part] { return bind_session(*session, part, link); });
      if (bound) continue;
      const std::string text = fmt::format("cannot reach the arrival flags of {}: {}",
                                           describe_node(part.node), bound.error().message);
      fail_job(job, {bound.error().code, text}, {session->attach.rank, bound.error().code, text});
      return false;
    }
  }
  return true;
}

Status ControlPlane::Impl::bind_session(Session& session, const RemotePart& part,
                                        std::shared_ptr<Link> link) {
  const PeerSession& peer = part.part.sessions[session.attach.local_rank];
  fabric::Endpoint& endpoint = proxy_of(session).endpoint();
  PeerBinding& binding = session.peers[peer.rank];
  binding.link = std::move(link);
  binding.node = part.node;
  if (endpoint.capabilities().contract == fabric::DeliveryContract::kOrdered) {
    MK_ASSIGN_OR_RETURN(binding.flags, endpoint.import_region(binding.link->id, peer.flags_key));
  }
  binding.slot = peer.slot;
  binding.flag_count = peer.flag_count;
  if (endpoint.capabilities().contract == fabric::DeliveryContract::kUnordered) {
    binding.arrivals_sent = std::make_unique<Counter[]>(
        shm::round_up(peer.flag_count, shm::kFlagGranule) / shm::kFlagGranule);
  }
  // Before it hears that we are ready: from then on it may be up, and quicker than we are.
  proxy_of(session).apply(AdmitPeer{session.slot, part.node, true});
  return {};
}

void ControlPlane::Impl::open_peers(Session& session) {
  // Not before the job is up. Until a node has said that it is ready with us, it may give up the
  // memory of a part that it has told us of without waiting for us.
  for (const auto& [rank, binding] : session.peers) {
    proxy_of(session).apply(BindPeer{.slot = session.slot,
                                     .peer_rank = static_cast<std::uint16_t>(rank),
                                     .link = binding.link->id,
                                     .link_stats = binding.link->stats.get(),
                                     .peer_slot = binding.slot,
                                     .flags = binding.flags.get(),
                                     .flag_count = binding.flag_count,
                                     .arrivals_sent = binding.arrivals_sent.get()});
  }
}

void ControlPlane::Impl::bind_waiting_regions(Job& job) {
  for (auto& [rank, part] : job.parts) {
    auto& waiting = part.regions_waiting;
    if (part.gone) waiting.clear();
    std::size_t bound = 0;
    while (bound < waiting.size() && may_wait() && !job.failed) {
      const RegionAnnounce& region = waiting[bound++];
      // Twice the same was refused when it came.
      (void)wait_for([&, &part = part] { return bind_peer_buffer(job, part, region); });
    }
    waiting.erase(waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(bound));
    if (job.failed || !waiting.empty()) continue;
    for (ExchangePart& put : std::exchange(part.exchanges_waiting, {})) {
      (void)job.exchange.put_remote(put.rank, put.sequence, put.tag, std::move(put.blob));
    }
  }
}

void ControlPlane::Impl::job_up(Job& job) {
  job.state = JobState::kUp;
  log(LogLevel::kInfo,
      fmt::format("job '{}' is up: {} nodes of {} ranks", job.name, job.nodes, job.local_size),
      {{"job", job.name}}, job.uid);
  for (Session* session : job.sessions()) {
    session->state = SessionState::kUp;
    open_peers(*session);
    tell_network_rate(*session);
    reply(*session->client, 0, shm::JobUp{});
  }
  bind_waiting_regions(job);
  // What was queued goes in the order that Exchange promises: buffers, then blobs.
  for (Session* session : job.sessions()) {
    for (const auto& [handle, buffer] : session->buffers) {
      if (!buffer.withdrawal) announce_buffer(*session, handle);
    }
  }
  for (const ExchangePart& part : std::exchange(job.exchange_unsent, {})) send_to_job(job, part);
  if (!job.failed) answer_exchanges(job);
}

void ControlPlane::Impl::announce_buffer(Session& session, std::uint16_t handle) {
  Job& job = *session.job;
  const Buffer& buffer = session.buffers.at(handle);
  if (buffer.region == nullptr) return;
  for (const auto& [node_rank, part] : job.parts) {
    send_to_part(job, part,
                 RegionAnnounce{job.name, job.part_id, session.attach.rank, handle, buffer.bytes,
                                buffer.region->key_for(part.node)});
  }
}

void ControlPlane::Impl::send_to_job(Job& job, const PeerMessage& message) {
  for (const auto& [node_rank, part] : job.parts) send_to_part(job, part, message);
}

void ControlPlane::Impl::send_to_part(Job& job, const RemotePart& part,
                                      const PeerMessage& message) {
  if (part.gone || job.failed) return;
  const Status sent = transport_.send(part.node, message);
  if (sent) return;
  const std::uint32_t rank = part.part.node_rank * job.local_size;
  const std::string text =
      fmt::format("{} cannot be reached: {}", describe_node(part.node), sent.error().message);
  fail_job(job, lost_error(job, rank, text), {rank, ErrorCode::kPeerLost, text});
}

Error ControlPlane::Impl::rendezvous_timeout(const Job& job) const {
  std::vector<std::uint32_t> missing;
  return {ErrorCode::kTimeout, fmt::format("job '{}' did not come up within {} ms{}", job.name,
                                           job.timeout_ms, obstacles(job, missing))};
}

std::string ControlPlane::Impl::obstacles(const Job& job,
                                          std::vector<std::uint32_t>& missing) const {
  std::string text;
  missing = job.missing_ranks();
  Reasons disagreements, not_ready, not_connected, not_reachable;
  for (const auto& [node, peer] : peers_) {
    const auto found = peer.offers.find(job.name);
    if (found == peer.offers.end()) continue;
    const JobOffer& offer = found->second.offer;
    // Not taken, since ranks of ours are missing: perhaps because the two nodes disagree.
    Status fits = job.check_owner(offer);
    const auto met = job.met.find(node);
    if (fits && met != job.met.end() && !met->second.refused.empty()) {
      fits = fail(ErrorCode::kPermission, "{}", met->second.refused);
    }
    if (fits) fits = job.check_offer(offer);
    if (!fits) {
      disagreements.add(fmt::format("{} disagrees: {}", describe_node(node), fits.error().message));
      continue;
    }
    std::erase_if(missing,
                  [&](std::uint32_t rank) { return rank / job.local_size == offer.node_rank; });
  }
  if (!missing.empty()) {
    text += "; not attached: " + describe_ranks(missing, job.local_size);
  }
  for (const auto& [node_rank, part] : job.parts) {
    if (!part.ready) {
      not_ready.add(
          fmt::format("{} (node rank {}) is not ready", describe_node(part.node), node_rank));
    }
    std::set<LinkKey> wanted;
    if (missing.empty() && part.part.sessions.size() == job.local_size)
      for (const Session* session : job.sessions()) wanted.insert(link_key(*session, part));
    for (const LinkKey& key : wanted) {
      const std::string reason = links_.reason(key);
      if (reason.empty()) continue;
      not_connected.add(fmt::format("{} is not connected: {}", describe_link(key), reason));
    }
  }
  if (job.nodes > 1) {
    for (const auto& [node, peer] : peers_) {
      if (peer.up) continue;
      const std::string trouble = transport_.trouble(node);
      not_reachable.add(fmt::format("the daemon of {} is not reachable: {}", describe_node(node),
                                    trouble.empty() ? peer.down_reason : trouble));
    }
  }
  return text + disagreements.text() + not_ready.text() + not_connected.text() +
         not_reachable.text();
}

}  // namespace mk::daemon
