#include "daemon/config/limits_section.h"

#include <type_traits>

#include "daemon/config/units.h"

namespace mk::daemon {
namespace {

constexpr std::int64_t kDescriptorsMax = 1 << 30;

/// A size, or "auto": none.
auto take_auto_size(std::optional<std::uint64_t>& into) {
  return [&into](std::string_view text) -> Status {
    if (text == "auto") {
      into.reset();
      return {};
    }
    const auto size = parse_size_bytes(text);
    if (!size) return fail(size.error().code, "{}, or \"auto\"", size.error().message);
    into = *size;
    return {};
  };
}

}  // namespace

void read_limits(Section limits, Config& config) {
  limits.integer("sessions", 1, shm::kSessionsMax, config.limits.sessions);
  limits.integer("outstanding", 1, 65'536, config.limits.outstanding);
  limits.string("registered", take_auto_size(config.limits.registered_bytes));
  const auto count = [&limits](std::string_view key, std::int64_t max, auto& into) {
    limits.integer_or(key, 0, max, "auto", std::remove_reference_t<decltype(into)>(), into);
  };
  count("user_sessions", shm::kSessionsMax, config.limits.user_sessions);
  count("user_buffers", shm::kSessionsMax * shm::kBuffersMax, config.limits.user_buffers);
  count("user_rings", shm::kSessionsMax * shm::kLanesMax, config.limits.user_rings);
  limits.string("user_registered", take_auto_size(config.limits.user_registered_bytes));
  limits.string("all_registered", take_auto_size(config.limits.all_registered_bytes));
  count("user_descriptors", kDescriptorsMax, config.limits.user_descriptors);
  count("descriptors", kDescriptorsMax, config.limits.descriptors);
  limits.integer("user_connections", 1, 64, config.limits.user_connections);
  limits.string("drain", [&](std::string_view text) -> Status {
    MK_ASSIGN_OR_RETURN(config.limits.drain_ns, parse_duration_ns(text));
    return {};
  });
  limits.string("ended_jobs", [&](std::string_view text) -> Status {
    MK_ASSIGN_OR_RETURN(config.limits.ended_jobs_ns, parse_duration_ns(text));
    return {};
  });
  limits.finish();
}

}  // namespace mk::daemon
