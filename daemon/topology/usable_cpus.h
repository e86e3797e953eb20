/// \file
/// Which CPUs a process may use, and how many it may keep busy.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mk::topology {

/// Of a control group's cpu.max, "QUOTA PERIOD" or "max PERIOD": whole CPUs, rounded down, at least
/// one; nullopt: no limit, or nothing that can be understood.
std::optional<std::uint32_t> quota_cpus(std::string_view cpu_max);

/// The least that a group of control groups version 2 allows, `group` (as /proc/PID/cgroup names
/// it) or one above it; `mount` is where they are (/sys/fs/cgroup). nullopt: no limit.
std::optional<std::uint32_t> group_cpus(const std::filesystem::path& mount, std::string_view group);

/// The group of version 2 that a process (0: this one) is in, "/GROUP"; "/" where there are none.
/// It begins with "/.." when it lies outside those that are seen from here.
std::string control_group_of(pid_t pid);

/// A process's affinity (0: this one's), ascending; empty: there is no such process.
std::vector<std::uint32_t> affinity_of(pid_t pid);
/// "0-15,32": ascending numbers as Linux writes them; past 60 characters "...".
std::string cpu_list(const std::vector<std::uint32_t>& cpus);

/// The first line of a file; empty when there is none.
std::string first_line(const std::filesystem::path& file);

/// The CPUs a process (0: this one) may run on, its affinity, or fewer where its control group's
/// quota ends earlier: threads that poll past a quota stand still for most of a period. At least
/// one. Version 1 groups are not looked at. nullopt: there is no such process, or its group lies
/// outside those that are seen from here.
std::optional<std::uint32_t> usable_cpus(pid_t pid = 0);

}  // namespace mk::topology
