#include <algorithm>

#include "daemon/control/control_plane_impl.h"

namespace mk::daemon {

namespace {

/// What somebody may hold of something, and holds.
struct Share {
  std::uint64_t most;  ///< 0: there is no limit
  std::uint64_t used;
  const char* key;  ///< of the configuration
  const char* remedy;

  bool exceeded_by(std::uint64_t more) const {
    return most != 0 && (used > most || more > most - used);
  }
  /// Whether there is room for `more`; `what` wants it, and it is `holder`'s.
  Status check(std::uint64_t more, const std::string& what, const char* unit,
               const std::string& holder) const {
    if (!exceeded_by(more)) return {};
    return fail(ErrorCode::kLimitExceeded,
                "{} would exceed the {} {} that {} may hold ({}), with {} there; {}", what, most,
                unit, holder, key, used, remedy);
  }
};

/// Whether `more` fits into what user `uid` may have, and into what all users together may.
Status check_shares(std::uint32_t uid, std::uint64_t more, const std::string& what,
                    const char* unit, const Share& of_user, const Share& of_all) {
  MK_RETURN_IF_ERROR(of_user.check(more, what, unit, fmt::format("user {}", uid)));
  return of_all.check(more, what, unit, "all clients together");
}

}  // namespace

ControlPlane::Impl::Usage ControlPlane::Impl::usage_of(std::optional<std::uint32_t> uid) const {
  Usage usage;
  for (const auto& [id, session] : sessions_) {
    if (uid && session->credentials.uid != *uid) continue;
    ++usage.sessions;
    usage.rings += session->segment.shape().lane_count;
    usage.buffers += session->buffers.size();
    usage.host_bytes += session->host_bytes();
    usage.descriptors += session->descriptors();
  }
  usage.descriptors += clients_port_.descriptors(uid);
  return usage;
}

std::uint64_t ControlPlane::Impl::session_descriptors(std::optional<std::uint32_t> uid) const {
  std::uint64_t count = 0;
  for (const auto& [id, session] : sessions_) {
    if (!uid || session->credentials.uid == *uid) count += session->descriptors();
  }
  return count;
}

Status ControlPlane::Impl::check_memory(std::uint32_t uid, std::uint64_t bytes,
                                        const std::string& what) const {
  return check_shares(uid, bytes, what, "bytes of host memory",
                      {options_.user_max.memory_bytes, usage_of(uid).host_bytes,
                       "limits.user_registered", "deregister some"},
                      {options_.all_max.memory_bytes, usage_of({}).host_bytes,
                       "limits.all_registered", "wait for others, or run on another node"});
}

Status ControlPlane::Impl::check_descriptors(std::uint32_t uid, std::uint64_t count,
                                             const std::string& what) const {
  return check_shares(uid, count, what, "descriptors of this daemon",
                      {options_.user_max.descriptors, usage_of(uid).descriptors,
                       "limits.user_descriptors", "deregister buffers or detach"},
                      {options_.all_max.descriptors, usage_of({}).descriptors,
                       "limits.descriptors; systemd: LimitNOFILE", "wait for others"});
}

Status ControlPlane::Impl::check_session_memory(const Session& session, std::uint64_t bytes,
                                                const std::string& what) const {
  const Share of_session{options_.session_memory_bytes_max, session.host_bytes(),
                         "limits.registered", "deregister some, or raise the daemon's limit"};
  MK_RETURN_IF_ERROR(of_session.check(bytes, what, "bytes of host memory", "a session"));
  return check_memory(session.credentials.uid, bytes, what);
}

Status ControlPlane::Impl::check_buffer_count(const Session& session,
                                              const std::string& name) const {
  const std::uint32_t uid = session.credentials.uid;
  const std::string what = fmt::format("{}: buffer '{}'", session.describe(), name);
  const Share of_user{options_.user_max.buffers, usage_of(uid).buffers, "limits.user_buffers",
                      "deregister some"};
  MK_RETURN_IF_ERROR(of_user.check(1, what, "registered buffers", fmt::format("user {}", uid)));
  return check_descriptors(uid, 1, what);
}

Status ControlPlane::Impl::check_gpu_buffers(const Session& session,
                                             const std::string& name) const {
  const std::uint64_t most = proxies_[session.rail]->endpoint().capabilities().gpu_regions_max;
  std::uint64_t used = 0;
  for (const auto& [id, other] : sessions_) {
    if (other->rail != session.rail || other->credentials.uid != session.credentials.uid) continue;
    used += static_cast<std::uint64_t>(std::ranges::count_if(other->buffers, [](const auto& entry) {
      return !entry.second.memory && entry.second.region != nullptr;
    }));
  }
  const Share of_user{most * 3 / 4, used, "three quarters of the fabric's",
                      "deregister some, or use fewer and larger ones"};
  return of_user.check(1, fmt::format("{}: GPU buffer '{}'", session.describe(), name),
                       fmt::format("GPU buffers of rail {}", session.rail).c_str(),
                       fmt::format("user {}", session.credentials.uid));
}

}  // namespace mk::daemon
