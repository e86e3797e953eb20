#include "daemon/control/control_plane.h"

#include <algorithm>
#include <utility>

#include "daemon/control/control_plane_impl.h"
#include "daemon/plant.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::daemon {

namespace {

/// How long another daemon's offer waits for our ranks without being made again.
constexpr std::uint64_t kOfferExpiryNs = 120'000'000'000;

std::uint64_t random_word() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

std::vector<fabric::Endpoint*> endpoints_of(std::span<Proxy* const> proxies) {
  std::vector<fabric::Endpoint*> endpoints;
  for (Proxy* proxy : proxies) endpoints.push_back(&proxy->endpoint());
  return endpoints;
}

}  // namespace

PeerHello make_hello(const ControlOptions& options, std::span<Proxy* const> proxies) {
  PeerHello hello;
  hello.node = options.node;
  hello.generation = options.generation != 0 ? options.generation : random_word();
  hello.abi_major = shm::kAbiMajor;
  hello.abi_minor = shm::kAbiMinor;
  hello.version = options.version;
  hello.fabric = proxies.front()->endpoint().capabilities().name;
  hello.protocol = kPeerProtocol;
  for (Proxy* proxy : proxies) {
    hello.rail_addresses.push_back(proxy->endpoint().address());
    hello.rail_devices.push_back(proxy->endpoint().capabilities().device);
  }
  return hello;
}

ControlPlane::Impl::Impl(const ControlOptions& options, ClientPort& clients, PeerTransport& peers,
                         std::span<Proxy* const> proxies, std::function<std::uint64_t()> now_ns,
                         PeerHello hello)
    : options_(options),
      clients_port_(clients),
      transport_(peers),
      proxies_(proxies.begin(), proxies.end()),
      now_(std::move(now_ns)),
      hello_(std::move(hello)),
      rail_addresses_(hello_.rail_addresses),
      random_(options.random_seed != 0 ? options.random_seed : random_word()),
      links_(endpoints_of(proxies), now_) {
  for (const NodeId node : transport_.nodes()) peers_[node].down_reason = "never seen";
  for (std::uint32_t slot = 0; slot < by_slot_.size(); ++slot) free_slots_.push_back({slot});
}

void ControlPlane::Impl::client_connected(ClientId id, const shm::PeerCredentials& credentials) {
  Client& client = clients_[id];
  client.id = id;
  client.credentials = credentials;
}

void ControlPlane::Impl::client_closed(ClientId id, const std::string& reason) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  if (Session* session = found->second.session) {
    session->client.reset();
    fail_session(*session,
                 {ErrorCode::kPeerLost, fmt::format("{} ended: {}", session->describe(), reason)});
    fence(*session);  // one that was leaving has nobody left to send for
  }
  clients_.erase(id);  // last: when there is no memory for the rest, this is called again
}

void ControlPlane::Impl::proxy_event(std::uint32_t rail, ProxyEvent event) {
  const auto session_at = [&](SessionSlot slot) {
    Session* session = slot < by_slot_.size() ? by_slot_[slot] : nullptr;
    return session != nullptr && session->rail == rail ? session : nullptr;
  };
  if (const auto* fault = std::get_if<SessionFault>(&event)) {
    if (Session* session = session_at(fault->slot)) on_session_fault(*session, *fault);
  } else if (const auto* drained = std::get_if<Drained>(&event)) {
    if (Session* session = session_at(drained->slot)) on_drained(*session);
  } else if (const auto* released = std::get_if<BufferReleased>(&event)) {
    Session* session = session_at(released->slot);
    if (session == nullptr) return;
    const auto buffer = session->buffers.find(released->handle);
    if (buffer == session->buffers.end() || !buffer->second.withdrawal) return;
    buffer->second.withdrawal->proxy_released = true;
    advance_withdrawal(*session, released->handle);
  } else if (const auto* peer = std::get_if<PeerBufferReleased>(&event)) {
    if (Session* session = session_at(peer->slot)) {
      on_peer_buffer_released(*session, peer->peer_rank, peer->handle);
    }
  } else if (const auto* reset = std::get_if<FlagsReset>(&event)) {
    if (Session* session = session_at(reset->slot)) on_flags_reset(*session, reset->base);
  } else if (const auto* down = std::get_if<LinkDown>(&event)) {
    on_link_down(rail, *down);
  }
}

void ControlPlane::Impl::on_session_fault(Session& session, const SessionFault& fault) {
  std::string text = fmt::format("{}: {}", session.describe(), fault.reason);
  const auto peer = fault.peer_rank ? session.peers.find(*fault.peer_rank) : session.peers.end();
  if (peer != session.peers.end()) {
    text += fmt::format("; rank {} is on {}", peer->first, describe_node(peer->second.node));
    const std::string why = link_reason(session.rail, peer->second.link->id);
    if (!why.empty()) text += "; " + why;
  }
  if (fault.code == ErrorCode::kLinkDown) {
    // Not this rank's doing: all ranks get the same error.
    fail_job(*session.job, {fault.code, fmt::format("job '{}': {}", session.attach.job, text)},
             {session.attach.rank, fault.code, text});
  } else {
    fail_session(session, {fault.code, text});
  }
  fence(session);
}

std::string ControlPlane::Impl::link_reason(std::uint32_t rail, fabric::LinkId link) const {
  return proxies_[rail]->endpoint().link_reason(link);
}

void ControlPlane::Impl::on_link_down(std::uint32_t rail, const LinkDown& event) {
  std::string reason = link_reason(rail, event.link);
  if (reason.empty()) reason = fmt::format("the network reports {}", error_code_name(event.code));
  links_.on_error(rail, event.link, reason);
  for (Job* job : jobs()) {
    if (job->failed || !job->has_active()) continue;
    for (const Session* session : job->sessions()) {
      const auto peer = std::ranges::find_if(session->peers, [&](const auto& entry) {
        return session->rail == rail &&
               (entry.second.link->id == event.link || MK_PLANT(any_link_fails_all));
      });
      if (peer == session->peers.end()) continue;
      const std::string text = fmt::format("the link of rail {} to {} is in error: {}", rail,
                                           describe_node(peer->second.node), reason);
      fail_job(*job, {ErrorCode::kLinkDown, fmt::format("job '{}': {}", job->name, text)},
               {peer->first, ErrorCode::kLinkDown, text});
      break;
    }
  }
}

void ControlPlane::Impl::tick() {
  heartbeats_.turn(now_());
  beat();
  tell_rails();
  for (const auto& [id, session] : sessions_) tick_session(*session);
  // In turn: the first may use up what a tick may wait.
  std::vector<Job*> in_turn = jobs();
  if (!in_turn.empty()) {
    const auto first = static_cast<std::ptrdiff_t>(ticks_++ % in_turn.size());
    std::rotate(in_turn.begin(), in_turn.begin() + first, in_turn.end());
  }
  for (Job* job : in_turn) tick_job(*job);
  if (!draining_) retry_links();
  for (auto& [node, peer] : peers_) {
    std::erase_if(peer.offers, [&](const auto& entry) {
      return now_() - entry.second.received_ns > kOfferExpiryNs;
    });
  }
}

void ControlPlane::Impl::tell_network_rate(Session& session) {
  session.tell_network_rate({proxy_of(session).endpoint().capabilities().link_bytes_per_second,
                             session_share(*session.job).limit.bytes_per_second});
}

void ControlPlane::Impl::watch_client(Session& session) {
  const OperatorCounts counts =
      session.watch_client(now_(), session.job->exchange.awaited_by(session.attach.rank));
  const RankProgress progress = session.progress.seen(now_());
  if (progress.op.empty() || (counts.launches == 0 && counts.launch_ns == 0)) return;
  operator_totals_.add({session.attach.job, std::to_string(session.credentials.uid), progress.op,
                        std::to_string(progress.tag)},
                       counts, now_());
}

void ControlPlane::Impl::tick_session(Session& session) {
  watch_client(session);
  if (session.state == SessionState::kUp) tell_network_rate(session);
  if (session.state == SessionState::kLeaving && session.progresses()) {
    session.leave_deadline_ns = now_() + kLeavingStallNs;
  }
  if (session.state == SessionState::kLeaving &&
      (session.rings_done() || now_() >= session.leave_deadline_ns)) {
    fence(session);
  }
  for (auto& [handle, buffer] : session.buffers) {
    if (!buffer.withdrawal || buffer.withdrawal->answered || !session.client ||
        now_() < buffer.withdrawal->deadline_ns) {
      continue;
    }
    std::string who = buffer.withdrawal->proxy_released ? "" : " our own transfers";
    for (const NodeId node : buffer.withdrawal->nodes_left) who += " " + describe_node(node);
    buffer.withdrawal->answered = true;
    reply_error(*session.client, buffer.withdrawal->request,
                {ErrorCode::kTimeout,
                 fmt::format("buffer '{}' ({}) is still in use by:{}", buffer.name, handle, who)});
  }
}

void ControlPlane::Impl::tick_job(Job& job) {
  if (!job.ending && job.state != JobState::kUp && now_() >= job.deadline_ns) {
    const Error error = rendezvous_timeout(job);
    fail_job(job, error, {job.first_local_rank(), error.code, error.message});
    return;
  }
  check_leavers(job);
  if (job.state == JobState::kAnnounced && !job.ending) announce(job);
  advance(job);
  if (job.state == JobState::kUp) bind_waiting_regions(job);
  if (!job.failed) answer_exchanges(job);
}

void ControlPlane::Impl::drain(const std::string& reason) {
  drain_reason_ = reason;
  if (std::exchange(draining_, true)) return;
  log(LogLevel::kInfo, fmt::format("draining: {} sessions are left", sessions_.size()));
  for (Job* job : jobs()) {
    // Its missing ranks cannot attach any more.
    if (job->state != JobState::kGathering || job->ending) continue;
    const std::string text = fmt::format("job '{}' cannot come up: the daemon of node {} {}",
                                         job->name, options_.node, drain_reason_);
    fail_job(*job, {ErrorCode::kDraining, text},
             {job->first_local_rank(), ErrorCode::kDraining, text});
  }
}

void ControlPlane::Impl::resume() {
  if (std::exchange(draining_, false)) log(LogLevel::kInfo, "taking new jobs again");
}

void ControlPlane::Impl::fail_all(ErrorCode code, const std::string& reason) {
  for (Job* job : jobs()) {
    fail_job(*job, {code, fmt::format("job '{}' ends: {}", job->name, reason)},
             {job->first_local_rank(), code, reason});
  }
}

Result<std::uint32_t> ControlPlane::Impl::terminate_job(const std::string& name,
                                                        const std::string& reason) {
  for (Job* job : jobs()) {
    if (job->name != name || job->failed || !job->has_active()) continue;
    const auto ranks = static_cast<std::uint32_t>(std::ranges::count_if(
        job->sessions(), [](const Session* session) { return session->active(); }));
    const std::string text = fmt::format("it was terminated by an administrator on node {}{}{}",
                                         options_.node, reason.empty() ? "" : ": ", reason);
    fail_job(*job, {ErrorCode::kAborted, fmt::format("job '{}': {}", name, text)},
             {job->first_local_rank(), ErrorCode::kAborted, text}, LogLevel::kWarning);
    return ranks;
  }
  return fail(ErrorCode::kNotFound, "no rank of a job '{}' is attached to the daemon of node {}",
              name, options_.node);
}

std::vector<Job*> ControlPlane::Impl::jobs() const {
  std::vector<Job*> all;
  for (const auto& job : jobs_) all.push_back(job.get());
  return all;
}

std::string ControlPlane::Impl::describe_node(NodeId node) const {
  return transport_.describe(node);
}

void ControlPlane::Impl::log(LogLevel level, std::string message,
                             std::vector<std::pair<std::string, std::string>> fields,
                             std::optional<std::uint32_t> user, SourceLine where) const {
  if (options_.log) options_.log({level, std::move(message), std::move(fields), user, where});
}

void ControlPlane::Impl::log(LogLevel level, std::string message, const Session& session,
                             SourceLine where) const {
  log(level, std::move(message),
      {{"job", session.attach.job},
       {"rank", fmt::format("{}", session.attach.rank)},
       {"session", fmt::format("{}", session.id)},
       {"pid", fmt::format("{}", session.credentials.pid)}},
      session.credentials.uid, where);
}

// -- the public face ------------------------------------------------------------------------------

ControlPlane::ControlPlane(const ControlOptions& options, ClientPort& clients, PeerTransport& peers,
                           std::span<Proxy* const> proxies, std::function<std::uint64_t()> now_ns,
                           std::optional<PeerHello> hello)
    : impl_(std::make_unique<Impl>(options, clients, peers, proxies, std::move(now_ns),
                                   hello ? std::move(*hello) : make_hello(options, proxies))) {}

ControlPlane::~ControlPlane() = default;

void ControlPlane::on_client_connected(ClientId client, const shm::PeerCredentials& credentials) {
  impl_->client_connected(client, credentials);
}

void ControlPlane::on_client_frame(ClientId client, shm::Frame frame) {
  impl_->client_frame(client, std::move(frame));
  impl_->reap();
}

void ControlPlane::on_client_closed(ClientId client, const std::string& reason) {
  impl_->client_closed(client, reason);
  impl_->reap();
}

std::uint64_t ControlPlane::descriptors(std::optional<std::uint32_t> uid) const {
  return impl_->session_descriptors(uid);
}

PeerHello ControlPlane::hello() const { return impl_->hello(); }

Status ControlPlane::on_peer_message(NodeId node, PeerMessage message) {
  const Status status = impl_->peer_message(node, std::move(message));
  impl_->reap();
  return status;
}

void ControlPlane::on_peer_down(NodeId node, const std::string& reason) {
  impl_->peer_down(node, reason);
  impl_->reap();
}
void ControlPlane::on_peers_changed() {
  impl_->peers_changed();
  impl_->reap();
}

void ControlPlane::on_proxy_event(std::uint32_t rail, ProxyEvent event) {
  impl_->proxy_event(rail, std::move(event));
  impl_->reap();
}

void ControlPlane::beat() { impl_->beat(); }

void ControlPlane::on_tick() {
  impl_->tick();
  impl_->reap();
}

void ControlPlane::resume() { impl_->resume(); }
void ControlPlane::drain(const std::string& reason) {
  impl_->drain(reason);
  impl_->reap();
}

bool ControlPlane::idle() const { return impl_->idle(); }

void ControlPlane::fail_all(ErrorCode code, const std::string& reason) {
  impl_->fail_all(code, reason);
  impl_->reap();
}

Result<std::uint32_t> ControlPlane::terminate_job(const std::string& name,
                                                  const std::string& reason) {
  auto ranks = impl_->terminate_job(name, reason);
  impl_->reap();
  return ranks;
}

std::uint32_t ControlPlane::refresh_shares(const std::string& job) {
  return impl_->refresh_shares(job);
}
ControlSnapshot ControlPlane::snapshot() const { return impl_->snapshot(); }
ControlCounts ControlPlane::counts() const { return impl_->counts(); }

}  // namespace mk::daemon
