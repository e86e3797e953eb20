#include "shm/host/memory_room.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace mk::shm {
namespace {

std::optional<std::uint64_t> number_of(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end != text.data() ? std::optional(value) : std::nullopt;
}

/// The number behind `name` in a file of lines "name value ...".
std::optional<std::uint64_t> field(const std::filesystem::path& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first, second;
    if (words >> first >> second && first == name) return number_of(second);
  }
  return std::nullopt;
}

/// The number that a file consists of; "max" is none.
std::optional<std::uint64_t> content(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string word;
  return file >> word ? number_of(word) : std::nullopt;
}

/// The process's group, below the root: "/system.slice/job.service".
std::string group_of(const std::string& proc) {
  std::ifstream file(proc + "/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("0::/")) return line.substr(3);
  }
  return "/";
}

}  // namespace

std::optional<MemoryRoom> memory_room() { return memory_room("/proc", "/sys/fs/cgroup"); }

std::optional<MemoryRoom> memory_room(const std::string& proc, const std::string& cgroups) {
  constexpr std::uint64_t kKiB = 1024;
  const auto total = field(proc + "/meminfo", "MemTotal:");
  const auto available = field(proc + "/meminfo", "MemAvailable:");
  if (!total || !available) return std::nullopt;
  MemoryRoom room{*available * kKiB, *total * kKiB};
  // A group's limit holds for all below it.
  for (std::filesystem::path group = group_of(proc);; group = group.parent_path()) {
    const std::filesystem::path folder = cgroups + group.string();
    const auto most = content(folder / "memory.max");
    const auto used = content(folder / "memory.current");
    if (most && used) {
      const std::uint64_t files = field(folder / "memory.stat", "inactive_file").value_or(0);
      const std::uint64_t held = *used - std::min(*used, files);
      room.total = std::min(room.total, *most);
      room.available = std::min(room.available, *most - std::min(*most, held));
    }
    if (group == group.parent_path()) return room;
  }
}

}  // namespace mk::shm
