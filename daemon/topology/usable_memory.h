/// \file
/// How much memory a process may take.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

namespace mk::topology {

/// The least memory that a group of control groups version 2 allows (memory.max), `group` (as
/// /proc/PID/cgroup names it) or one above it; `mount` is where they are. nullopt: no limit.
std::optional<std::uint64_t> group_memory_bytes(const std::filesystem::path& mount,
                                                std::string_view group);

/// The machine's memory, or the limit of a process's (0: this one's) control group where that is
/// less. Version 1 groups count by the limit that /sys/fs/cgroup/memory shows, as in a container.
std::uint64_t usable_memory_bytes(pid_t pid = 0);

}  // namespace mk::topology
