#include <algorithm>
#include <limits>

#include "daemon/control/control_plane_impl.h"
#include "daemon/control/job_secret.h"
#include "shm/host/text.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::daemon {

namespace {

/// What decided a session's rail, for users.
std::string rail_reason(const shm::Attach& attach, const ControlOptions::ProcessPlace& place,
                        std::size_t rails) {
  if (attach.rail != shm::kAnyRail) return "asked for";
  if (rails == 1) return "the only one";
  if (place.configured) return "configured for GPU " + attach.gpu;
  if (place.rails.empty()) return "in turn";
  return attach.gpu.empty() ? "nearest to CPUs " + place.cpus : "nearest to GPU " + attach.gpu;
}

constexpr std::uint64_t kSessionDescriptors = 2;  ///< its segment, and one on its way to the client
constexpr std::uint32_t kTimeoutMsMax = 24 * 3600 * 1000;

/// The first rule an Attach breaks, as far as it can be seen from it alone.
Status check_shape(const shm::Attach& a) {
  constexpr auto kBad = ErrorCode::kInvalidArgument;
  if (!shm::is_job_name(a.job)) {
    return fail(kBad, "a job name has 1 to {} bytes of printable ASCII without spaces",
                shm::kJobNameBytesMax);
  }
  if (a.nodes == 0 || a.nodes > shm::kNodesMax) {
    return fail(kBad, "job '{}': {} nodes; 1 to {} are possible: split a larger job", a.job,
                a.nodes, shm::kNodesMax);
  }
  if (a.local_size == 0 || a.local_size > shm::kLocalRanksMax) {
    return fail(kBad, "job '{}': {} ranks per node; 1 to {} are possible", a.job, a.local_size,
                shm::kLocalRanksMax);
  }
  if (a.world != a.nodes * a.local_size || a.world > shm::kWorldMax) {
    return fail(kBad,
                "job '{}': world size {} is not {} nodes of {} ranks, or exceeds {}; every node "
                "must run the same number of ranks",
                a.job, a.world, a.nodes, a.local_size, shm::kWorldMax);
  }
  if (a.node_rank >= a.nodes || a.local_rank >= a.local_size) {
    return fail(kBad, "job '{}': node rank {} of {} nodes, local rank {} of {}: out of range",
                a.job, a.node_rank, a.nodes, a.local_rank, a.local_size);
  }
  if (a.rank != a.node_rank * a.local_size + a.local_rank) {
    return fail(kBad,
                "job '{}': rank {} is not node rank {} * {} + local rank {}; ranks are numbered "
                "node by node",
                a.job, a.rank, a.node_rank, a.local_size, a.local_rank);
  }
  if (a.timeout_ms == 0 || a.timeout_ms > kTimeoutMsMax) {
    return fail(kBad, "job '{}': a rendezvous timeout of {} ms; 1 to {} are possible", a.job,
                a.timeout_ms, kTimeoutMsMax);
  }
  if (!a.gpu.empty() && !shm::is_pci_address(a.gpu)) {
    return fail(
        kBad, "job '{}': a GPU's PCI address has the form 0000:1b:00.0, in small letters; got '{}'",
        a.job, shm::plain_text(a.gpu, 2 * shm::kPciAddressBytesMax));
  }
  if (!shm::valid({a.lane_count, a.slot_count_log2, a.flag_count})) {
    return fail(kBad,
                "job '{}': {} lanes of 2^{} slots and {} flags; possible are 1 to {} lanes of {} "
                "to {} slots, and {} to {} flags in steps of {}",
                a.job, a.lane_count, a.slot_count_log2, a.flag_count, shm::kLanesMax,
                shm::kRingSlotsMin, shm::kRingSlotsMax, shm::kFlagGranule, shm::kFlagsMax,
                shm::kFlagGranule);
  }
  return {};
}

}  // namespace

void ControlPlane::Impl::attach(Client& client, std::uint64_t request, shm::Attach& message,
                                shm::Frame& frame) {
  const Status watched = clients_port_.watch_process(
      client.id, frame.fds.empty() ? UniqueFd() : std::move(frame.fds.front()));
  auto created = watched ? create_session(client, message) : propagate(watched);
  if (!created) {
    log(LogLevel::kWarning, fmt::format("refused an attach: {}", created.error().message),
        {{"pid", fmt::format("{}", client.credentials.pid)}}, client.credentials.uid);
    reply_error(client.id, request, created.error());
    return;
  }
  Session& session = **created;
  Job& job = *session.job;
  const int fds[] = {session.segment.fd()};
  reply(client.id, request,
        shm::AttachReply{session.id, session.slot, session.segment.bytes(),
                         proxy_of(session).endpoint().capabilities().name},
        fds);
  log(LogLevel::kInfo,
      fmt::format("{} attached to job '{}' of {} nodes with {} ranks each", session.describe(),
                  job.name, job.nodes, job.local_size),
      session);
  advance(job);
}

Status ControlPlane::Impl::check_attach(const shm::Attach& attach) const {
  MK_RETURN_IF_ERROR(check_shape(attach));
  if (draining_) {
    return fail(ErrorCode::kDraining,
                "the daemon of node {} {} and takes no new ranks; attach again when it is back, or "
                "run on another node",
                options_.node, drain_reason_);
  }
  if (attach.nodes > peers_.size() + 1 && !transport_.discovers()) {
    return fail(ErrorCode::kInvalidArgument,
                "job '{}' has {} nodes, but this daemon knows {} other daemons; add the missing "
                "peers to its configuration",
                attach.job, attach.nodes, peers_.size());
  }
  return {};
}

Status ControlPlane::Impl::check_join(const Job& job, const shm::Attach& attach,
                                      const Client& client) const {
  const Session& other = *job.sessions().front();  // a job that is not ending has one
  if (client.credentials.uid != other.credentials.uid) {
    return fail(ErrorCode::kPermission,
                "job '{}' on this node belongs to user {} ({}), and you are user {}; choose "
                "another job name",
                job.name, other.credentials.uid, other.describe(), client.credentials.uid);
  }
  if (job_secret_digest(attach.job, attach.secret) != job.secret_digest) {
    return fail(ErrorCode::kPermission,
                "job '{}' on this node ({}) was attached with {}; give all its ranks the same "
                "(AttachOptions::job_secret, MKERNEL_JOB_SECRET), or choose another job name",
                job.name, other.describe(),
                job.secret_digest.empty() ? "no secret, and you have one" : "another secret");
  }
  if (attach.nodes != job.nodes || attach.local_size != job.local_size) {
    return fail(ErrorCode::kInvalidArgument,
                "rank {} says that job '{}' has {} nodes of {} ranks; {} says {} nodes of {}; "
                "choose another job name if these are two jobs",
                attach.rank, job.name, attach.nodes, attach.local_size, other.describe(), job.nodes,
                job.local_size);
  }
  if (attach.node_rank != job.node_rank) {
    return fail(ErrorCode::kInvalidArgument,
                "rank {} of job '{}' says that this is node rank {}; {} says {}", attach.rank,
                job.name, attach.node_rank, other.describe(), job.node_rank);
  }
  if (const Session* holder = job.locals[attach.local_rank]; holder != nullptr) {
    return fail(ErrorCode::kAlreadyExists, "rank {} of job '{}' is held by process {}", attach.rank,
                job.name, holder->credentials.pid);
  }
  return {};
}

Status ControlPlane::Impl::check_user(std::uint32_t uid, const shm::Attach& attach) const {
  const auto& most = options_.user_max;
  const Usage usage = usage_of(uid);
  if (most.sessions != 0 && usage.sessions >= most.sessions) {
    return fail(ErrorCode::kLimitExceeded,
                "user {} has {} sessions at this daemon, the most one user may have "
                "(limits.user_sessions)",
                uid, usage.sessions);
  }
  if (most.rings != 0 && attach.lane_count > most.rings - std::min(most.rings, usage.rings)) {
    return fail(ErrorCode::kLimitExceeded,
                "{} command rings would exceed the {} that user {} may have together "
                "(limits.user_rings), with {} there; attach with fewer lanes",
                attach.lane_count, most.rings, uid, usage.rings);
  }
  const shm::SegmentShape shape{attach.lane_count, attach.slot_count_log2, attach.flag_count};
  const std::uint64_t bytes = shm::layout_of(shape).segment_bytes;
  const std::string what = fmt::format("a session with {} bytes of rings and flags", bytes);
  if (options_.session_memory_bytes_max != 0 && bytes > options_.session_memory_bytes_max) {
    return fail(ErrorCode::kLimitExceeded,
                "{} exceeds the {} bytes of host memory that a session may have "
                "(limits.registered); attach with fewer or smaller rings",
                what, options_.session_memory_bytes_max);
  }
  MK_RETURN_IF_ERROR(check_memory(uid, bytes, what));
  return check_descriptors(uid, kSessionDescriptors, what);
}

JobShare ControlPlane::Impl::session_share(const Job& job) const {
  JobShare share;
  if (options_.job_share) share = options_.job_share(job.name);
  share.limit.bytes_per_second /= job.local_size;
  share.limit.commands_per_second /= job.local_size;
  return share;
}

std::uint32_t ControlPlane::Impl::refresh_shares(const std::string& job) {
  std::uint32_t here = 0;
  for (const auto& [id, session] : sessions_) {
    if (session->fenced) continue;
    const JobShare share = session_share(*session->job);
    proxy_of(*session).apply(SetShare{session->slot, share.weight, share.limit});
    if (session->job->name == job) ++here;
  }
  return here;
}

Result<control::RailChoice> ControlPlane::Impl::choose_rail(
    const shm::Attach& attach, const Job* job, std::span<const std::uint32_t> near) const {
  const auto rails = static_cast<std::uint32_t>(proxies_.size());
  if (attach.rail != shm::kAnyRail) {
    if (attach.rail < rails) return control::RailChoice{attach.rail, std::nullopt};
    return fail(ErrorCode::kInvalidArgument,
                "rank {} of job '{}' wants rail {}, but this node has {} (AttachOptions::rail, "
                "MKERNEL_RAIL; mkctl topology shows them)",
                attach.rank, attach.job, attach.rail, rails);
  }
  std::vector<std::uint32_t> load(rails, 0);
  for (const auto& [id, session] : sessions_)
    if (!session->fenced) ++load[session->rail];
  return control::choose_rail({.local_rank = attach.local_rank,
                               .local_size = attach.local_size,
                               .load = load,
                               .near = near,
                               .first = job != nullptr ? job->first_rail : std::nullopt});
}

Result<std::uint32_t> ControlPlane::Impl::find_slot() const {
  const std::uint32_t most = std::clamp(options_.sessions_max, 1u, shm::kSessionsMax);
  if (by_slot_.size() - free_slots_.size() >= most) {
    return fail(ErrorCode::kLimitExceeded,
                "this daemon has {} sessions, its limit (sessions that end keep their place until "
                "nothing of them is in flight); `mkctl session list` shows them",
                most);
  }
  std::uint64_t soonest_ns = std::numeric_limits<std::uint64_t>::max();
  for (const FreeSlot& one : free_slots_) {
    if (one.from_ns <= now_()) return one.slot;
    soonest_ns = std::min(soonest_ns, one.from_ns);
  }
  return fail(
      ErrorCode::kLimitExceeded,
      "all free session slots of this daemon rest, the first for {} s more: other nodes "
      "were lost, and writes of theirs to earlier sessions may still arrive; try again then",
      (soonest_ns - now_()) / 1'000'000'000 + 1);
}

Result<Session*> ControlPlane::Impl::create_session(Client& client, const shm::Attach& attach) {
  MK_RETURN_IF_ERROR(check_attach(attach));
  const auto existing = by_name_.find(attach.job);
  if (existing != by_name_.end()) {
    MK_RETURN_IF_ERROR(check_join(*existing->second, attach, client));
  }
  MK_RETURN_IF_ERROR(check_user(client.credentials.uid, attach));
  MK_ASSIGN_OR_RETURN(const std::uint32_t slot, find_slot());
  ControlOptions::ProcessPlace place;
  if (!attach.gpu.empty()) {
    const auto configured = options_.gpu_rails.find(attach.gpu);
    if (configured != options_.gpu_rails.end()) {
      place.rails = {configured->second};
      place.configured = true;
    } else if (options_.rails_near) {
      place.rails = options_.rails_near(attach.gpu);
    }
  } else if (options_.place_of && client.credentials.pid > 0) {
    place = options_.place_of(client.credentials.pid);
  }
  MK_ASSIGN_OR_RETURN(
      const control::RailChoice rail,
      choose_rail(attach, existing != by_name_.end() ? existing->second : nullptr, place.rails));
  auto segment = shm::Segment::create(
      {attach.lane_count, attach.slot_count_log2, attach.flag_count}, hello_.generation,
      next_session_id_, slot,
      shm::kFeatureCommitTime | shm::kFeatureProgress | shm::kFeatureLaunchBegins);
  if (!segment) return propagate(segment);
  shm::Attach kept = attach;
  kept.secret.clear();  // the job has its digest, and nobody needs more
  auto session = std::make_unique<Session>(kept, std::move(*segment));
  session->id = next_session_id_;
  session->slot = slot;
  session->rail = rail.rail;
  session->rail_why = rail_reason(attach, place, proxies_.size());
  session->cpus = std::move(place.cpus);
  session->credentials = client.credentials;
  session->attached_ns = now_();
  session->client = client.id;
  session->retires = client.abi_minor >= shm::kRetireAbiMinor;
  const shm::Segment& memory = session->segment;
  auto flags = proxy_of(*session).endpoint().register_memory(
      {.address = reinterpret_cast<std::byte*>(memory.flags()),
       .bytes = std::uint64_t{attach.flag_count} * sizeof(std::uint32_t),
       .fd = memory.fd(),
       .fd_offset = memory.layout().flags_offset,
       .strictly_ordered = true});
  if (!flags) {
    return fail(flags.error().code, "cannot register the arrival flags of {}: {}",
                session->describe(), flags.error().message);
  }
  session->flags_region = std::move(*flags);

  // All that may fail for want of memory, the proxy's part last: then it is undone.
  Session* const raw = session.get();
  const bool first = existing == by_name_.end();
  Job* job = first ? nullptr : existing->second;
  sessions_.emplace(raw->id, std::move(session));
  try {
    if (first) {
      job = jobs_
                .emplace_back(
                    std::make_unique<Job>(attach, client.credentials.uid, random_(), make_nonce()))
                .get();
      job->deadline_ns = now_() + std::uint64_t{attach.timeout_ms} * 1'000'000;
      by_name_.emplace(attach.job, job);
    }
    raw->heartbeat = heartbeats_.add(&memory.header().heartbeat_ns, now_());
    const JobShare share = session_share(*job);
    proxy_of(*raw).apply(AddSession{.slot = slot,
                                    .segment = &raw->segment,
                                    .stats = raw->stats.get(),
                                    .outstanding_max = options_.outstanding_max,
                                    .weight = share.weight,
                                    .limit = share.limit,
                                    .world = attach.world,
                                    .nodes = attach.nodes});
  } catch (...) {
    if (first) by_name_.erase(attach.job);
    if (first && job != nullptr) jobs_.pop_back();
    sessions_.erase(raw->id);
    throw;
  }
  // Nothing fails from here on.
  raw->job = job;
  if (rail.first) job->first_rail = rail.first;
  job->locals[attach.local_rank] = raw;
  std::erase_if(free_slots_, [slot](const FreeSlot& one) { return one.slot == slot; });
  by_slot_[slot] = raw;
  ++next_session_id_;
  client.state = Client::State::kAttached;
  client.session = raw;
  return raw;
}

}  // namespace mk::daemon
