#include "daemon/topology/usable_memory.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <string>

#include "daemon/topology/usable_cpus.h"

namespace mk::topology {
namespace {

std::optional<std::uint64_t> number_in(const std::filesystem::path& file) {
  const std::string line = first_line(file);  // "max": no limit
  std::uint64_t bytes = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), bytes);
  if (error != std::errc{} || end != line.data() + line.size()) return std::nullopt;
  return bytes;
}

}  // namespace

std::optional<std::uint64_t> group_memory_bytes(const std::filesystem::path& mount,
                                                std::string_view group) {
  while (group.starts_with('/')) group.remove_prefix(1);
  std::optional<std::uint64_t> least;
  for (std::filesystem::path folder = mount / group;; folder = folder.parent_path()) {
    const auto bytes = number_in(folder / "memory.max");
    if (bytes) least = std::min(*bytes, least.value_or(*bytes));
    if (folder == mount || !folder.has_relative_path()) return least;
  }
}

std::uint64_t usable_memory_bytes(pid_t pid) {
  const auto pages = static_cast<std::uint64_t>(std::max(0L, ::sysconf(_SC_PHYS_PAGES)));
  std::uint64_t bytes = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::string group = control_group_of(pid);
  if (!group.starts_with("/..")) {
    bytes = std::min(bytes, group_memory_bytes("/sys/fs/cgroup", group).value_or(bytes));
  }
  return std::min(bytes, number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes").value_or(bytes));
}

}  // namespace mk::topology
