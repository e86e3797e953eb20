#include "daemon/config/client_limits.h"

#include <algorithm>

#include "daemon/config/units.h"
#include "shm/limits.h"

namespace mk::daemon {
namespace {

/// Connections with the other nodes, and as many of all else.
constexpr std::uint64_t kOwnDescriptorsMax = 2 * shm::kNodesMax;

/// One user's part of what all have; of little, too, there is one.
template <class T>
T three_quarters(T all) {
  return all == 0 ? 0 : std::max<T>(all - all / 4, 1);
}

std::string size_text(std::uint64_t bytes) {
  if (bytes == 0) return "any amount";
  return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / 0x1p30);
}

std::string count_text(std::uint64_t count) {
  return count == 0 ? "any number" : fmt::format("{}", count);
}

}  // namespace

ClientLimits client_limits(const Config& config, const MachineLimits& machine) {
  const auto& asked = config.limits;
  ClientLimits limits;
  limits.all.memory_bytes =
      asked.all_registered_bytes.value_or(machine.memory_bytes - machine.memory_bytes / 5);
  limits.user.memory_bytes =
      asked.user_registered_bytes.value_or(three_quarters(limits.all.memory_bytes));
  limits.session_memory_bytes = asked.registered_bytes.value_or(limits.all.memory_bytes / 2);
  const std::uint64_t own = std::min(machine.descriptors / 4, kOwnDescriptorsMax);
  limits.all.descriptors = asked.descriptors.value_or(machine.descriptors - own);
  limits.user.descriptors = asked.user_descriptors.value_or(three_quarters(limits.all.descriptors));
  limits.user.sessions = asked.user_sessions.value_or(three_quarters(asked.sessions));
  limits.user.rings = asked.user_rings.value_or(three_quarters(asked.sessions * shm::kLanesMax));
  limits.user.buffers =
      asked.user_buffers.value_or(three_quarters(asked.sessions * shm::kBuffersMax));
  return limits;
}

std::string describe(const ClientLimits& limits, const MachineLimits& machine) {
  return fmt::format(
      "clients may register {} of host memory in all, one user {}, one session {}, of the {} there "
      "are (limits.all_registered, user_registered, registered); and hold {} descriptors, one user "
      "{} (limits.descriptors, user_descriptors)",
      size_text(limits.all.memory_bytes), size_text(limits.user.memory_bytes),
      size_text(limits.session_memory_bytes), size_text(machine.memory_bytes),
      count_text(limits.all.descriptors), count_text(limits.user.descriptors));
}

}  // namespace mk::daemon
