#include "daemon/topology/usable_cpus.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <string>

namespace mk::topology {
namespace {

using Cpus = std::optional<std::uint32_t>;

Cpus least_of(Cpus one, Cpus other) {
  return one && other ? std::min(*one, *other) : one ? one : other;
}

Cpus affinity_cpus(pid_t pid) {
  std::array<cpu_set_t, 16> cpus{};  // of 1024 each
  if (::sched_getaffinity(pid, sizeof cpus, cpus.data()) != 0) return std::nullopt;
  return static_cast<std::uint32_t>(CPU_COUNT_S(sizeof cpus, cpus.data()));
}

}  // namespace

std::vector<std::uint32_t> affinity_of(pid_t pid) {
  std::array<cpu_set_t, 16> set{};  // of 1024 each
  std::vector<std::uint32_t> cpus;
  if (::sched_getaffinity(pid, sizeof set, set.data()) != 0) return cpus;
  for (std::uint32_t cpu = 0; cpu < set.size() * CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET_S(cpu, sizeof set, set.data())) cpus.push_back(cpu);
  }
  return cpus;
}

std::string cpu_list(const std::vector<std::uint32_t>& cpus) {
  constexpr std::size_t kLongest = 60;
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    if (text.size() > kLongest) return text + ",...";
    text += (text.empty() ? "" : ",") + std::to_string(cpus[i]);
    if (end - i > 1) text += "-" + std::to_string(cpus[end - 1]);
    i = end;
  }
  return text;
}

std::string first_line(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

std::string control_group_of(pid_t pid) {
  const std::string process = pid == 0 ? "self" : std::to_string(pid);
  std::ifstream in("/proc/" + process + "/cgroup");
  constexpr std::string_view kVersion2 = "0::";
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(kVersion2)) return line.substr(kVersion2.size());
  return "/";
}

Cpus quota_cpus(std::string_view cpu_max) {
  std::uint64_t quota = 0;
  std::uint64_t period = 0;
  const char* const end = cpu_max.data() + cpu_max.size();
  const auto first = std::from_chars(cpu_max.data(), end, quota);
  if (first.ec != std::errc{} || first.ptr == end || *first.ptr != ' ') return std::nullopt;
  const auto second = std::from_chars(first.ptr + 1, end, period);
  if (second.ec != std::errc{} || second.ptr != end || period == 0) return std::nullopt;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(quota / period, 1, UINT32_MAX));
}

Cpus group_cpus(const std::filesystem::path& mount, std::string_view group) {
  while (group.starts_with('/')) group.remove_prefix(1);
  Cpus least;
  std::filesystem::path folder = mount / group;
  for (;;) {
    least = least_of(least, quota_cpus(first_line(folder / "cpu.max")));
    if (folder == mount || !folder.has_relative_path()) return least;
    folder = folder.parent_path();
  }
}

Cpus usable_cpus(pid_t pid) {
  const Cpus allowed = affinity_cpus(pid);
  const std::string group = control_group_of(pid);
  // So the kernel names a group outside this process's namespace of them.
  const bool outside = group.starts_with("/..");
  if (!allowed || outside) return std::nullopt;
  return least_of(allowed, group_cpus("/sys/fs/cgroup", group));
}

}  // namespace mk::topology
