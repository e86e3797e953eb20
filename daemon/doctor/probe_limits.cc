#include <sys/resource.h>

#include <charconv>
#include <fstream>
#include <sstream>

#include "daemon/doctor/probe.h"
#include "daemon/topology/rails.h"
#include "daemon/topology/usable_cpus.h"
#include "daemon/topology/usable_memory.h"
#include "shm/host/unix_socket.h"

namespace mk::doctor {
namespace {

constexpr std::chrono::milliseconds kPatience(2000);
constexpr std::string_view kDaemon = "mkerneld";

/// The process that has the socket, when it is a daemon. systemd has the client socket that it
/// hands over.
std::optional<pid_t> daemon_at(const std::string& socket) {
  if (socket.empty()) return std::nullopt;
  const auto connection = shm::FrameSocket::connect(socket, kPatience);
  if (!connection) return std::nullopt;
  const auto who = connection->credentials();
  if (!who || who->pid <= 0) return std::nullopt;
  std::ifstream file(fmt::format("/proc/{}/comm", who->pid));
  std::string name;
  std::getline(file, name);
  if (name != kDaemon) return std::nullopt;
  return who->pid;
}

/// The soft limit that a line of the process's limits (proc(5)) begins with.
Result<std::uint64_t> limit_of(pid_t pid, std::string_view name) {
  const std::string path = fmt::format("/proc/{}/limits", pid);
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    std::istringstream words(line.substr(name.size()));
    std::string soft;
    words >> soft;
    if (soft == "unlimited") return UINT64_MAX;
    std::uint64_t bytes = 0;
    const auto [end, error] = std::from_chars(soft.data(), soft.data() + soft.size(), bytes);
    if (error == std::errc() && end == soft.data() + soft.size()) return bytes;
  }
  return fail(ErrorCode::kSystem, "{} does not say", path);
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool may_lock_all(const std::string& process) {
  return locks_without_limit(text_of("/proc/" + process + "/status"),
                             text_of("/proc/" + process + "/uid_map"));
}

}  // namespace

bool locks_without_limit(const std::string& status, const std::string& uid_map) {
  // The kernel asks for the capability in its first user namespace, whose map is of all ids.
  std::istringstream map(uid_map);
  std::uint64_t here = 1, there = 1, count = 0;
  if (!(map >> here >> there >> count) || here != 0 || there != 0 || count != UINT32_MAX)
    return false;
  constexpr std::string_view kEffective = "CapEff:";
  constexpr unsigned kIpcLock = 14;
  std::istringstream lines(status);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(kEffective)) continue;
    std::uint64_t all = 0;
    std::istringstream(line.substr(kEffective.size())) >> std::hex >> all;
    return (all >> kIpcLock & 1) != 0;
  }
  return false;
}

Result<std::uint64_t> memlock_of(pid_t pid) { return limit_of(pid, "Max locked memory"); }
Result<std::uint64_t> open_files_of(pid_t pid) { return limit_of(pid, "Max open files"); }

void probe_memlock(const daemon::Config& config, Facts& facts) {
  rlimit own{};
  if (::getrlimit(RLIMIT_MEMLOCK, &own) == 0 && own.rlim_cur != RLIM_INFINITY)
    facts.memlock.bytes = own.rlim_cur;
  if (may_lock_all("self")) facts.memlock.bytes = UINT64_MAX;
  if (!facts.daemon.trouble.empty()) return;
  std::optional<pid_t> pid = daemon_at(admin_socket_path(config));
  if (!pid) pid = daemon_at(config.socket.path);
  if (!pid && config.listen.unix_socket) pid = daemon_at(config.listen.path);
  if (!pid) {
    facts.memlock.trouble = "its sockets do not tell this user its process";
    return;
  }
  const auto bytes = memlock_of(*pid);
  if (!bytes) {
    facts.memlock.trouble = bytes.error().message;
    return;
  }
  facts.memlock.bytes = may_lock_all(std::to_string(*pid)) ? UINT64_MAX : *bytes;
  facts.memlock.daemon = static_cast<std::uint32_t>(*pid);
}

void probe_client_limits(const daemon::Config& config, Facts& facts) {
  const auto process = static_cast<pid_t>(facts.memlock.daemon);
  facts.machine.memory_bytes = topology::usable_memory_bytes(process);
  // A daemon that starts raises its limit as far as it may.
  rlimit own{};
  if (::getrlimit(RLIMIT_NOFILE, &own) == 0) facts.machine.descriptors = own.rlim_max;
  if (process != 0) {
    facts.machine.descriptors = open_files_of(process).value_or(facts.machine.descriptors);
  }
  facts.clients = client_limits(config, facts.machine);
}

void probe_spin(const daemon::Config& config, Facts& facts) {
  const auto plan = topology::plan_rails(config);
  const std::size_t rails = plan ? plan->endpoints.size() : 1;  // it would not start
  const auto process = static_cast<pid_t>(facts.memlock.daemon);
  facts.sleep_max_ns = config.proxy.sleep_max_ns;
  facts.spin = topology::choose_spin(config, rails, topology::usable_cpus(process));
}

}  // namespace mk::doctor
