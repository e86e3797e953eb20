#include "daemon/control/control_plane_impl.h"

namespace mk::daemon {

namespace {

/// Whether `more` beside `used` exceeds `most`; 0: there is no limit.
bool exceeds(std::uint64_t most, std::uint64_t used, std::uint64_t more) {
  return most != 0 && (used > most || more > most - used);
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
  const std::uint64_t of_user = usage_of(uid).host_bytes, of_all = usage_of({}).host_bytes;
  if (exceeds(options_.user_max.memory_bytes, of_user, bytes)) {
    return fail(ErrorCode::kLimitExceeded,
                "{} would exceed the {} bytes of host memory that user {} may register "
                "(limits.user_registered), with {} there; deregister some",
                what, options_.user_max.memory_bytes, uid, of_user);
  }
  if (exceeds(options_.all_max.memory_bytes, of_all, bytes)) {
    return fail(ErrorCode::kLimitExceeded,
                "{} would exceed the {} bytes of host memory that all clients of this daemon may "
                "register (limits.all_registered), with {} there; wait for others, or run on "
                "another node",
                what, options_.all_max.memory_bytes, of_all);
  }
  return {};
}

Status ControlPlane::Impl::check_session_memory(const Session& session, std::uint64_t bytes,
                                                const std::string& what) const {
  if (exceeds(options_.session_memory_bytes_max, session.host_bytes(), bytes)) {
    return fail(ErrorCode::kLimitExceeded,
                "{} would exceed the {} bytes of host memory that a session may register "
                "(limits.registered), with {} there; deregister some, or raise the daemon's limit",
                what, options_.session_memory_bytes_max, session.host_bytes());
  }
  return check_memory(session.credentials.uid, bytes, what);
}

Status ControlPlane::Impl::check_descriptors(std::uint32_t uid, std::uint64_t count,
                                             const std::string& what) const {
  const std::uint64_t of_user = usage_of(uid).descriptors, of_all = usage_of({}).descriptors;
  if (exceeds(options_.user_max.descriptors, of_user, count)) {
    return fail(ErrorCode::kLimitExceeded,
                "{} would exceed the {} descriptors of this daemon that user {} may hold "
                "(limits.user_descriptors), with {} there; deregister buffers or detach",
                what, options_.user_max.descriptors, uid, of_user);
  }
  if (exceeds(options_.all_max.descriptors, of_all, count)) {
    return fail(ErrorCode::kLimitExceeded,
                "{} would exceed the {} descriptors that all clients of this daemon may hold "
                "(limits.descriptors; systemd: LimitNOFILE), with {} there; wait for others",
                what, options_.all_max.descriptors, of_all);
  }
  return {};
}

Status ControlPlane::Impl::check_buffer_count(const Session& session,
                                              const std::string& name) const {
  const std::uint64_t most = options_.user_max.buffers;
  const std::uint64_t used = usage_of(session.credentials.uid).buffers;
  if (exceeds(most, used, 1)) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: buffer '{}': user {} has {} registered buffers, the most one user may have "
                "(limits.user_buffers); deregister some",
                session.describe(), name, session.credentials.uid, used);
  }
  return check_descriptors(session.credentials.uid, 1,
                           fmt::format("{}: buffer '{}'", session.describe(), name));
}

}  // namespace mk::daemon
