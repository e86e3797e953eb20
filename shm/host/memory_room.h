/// \file
/// How much memory a process may still use: of the machine, and of its control groups, which may
/// allow less.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace mk::shm {

struct MemoryRoom {
  std::uint64_t available = 0;  ///< without swapping; what files' pages occupy counts as available
  std::uint64_t total = 0;
};

/// nullopt when the system does not say. Control groups of version 2 are looked at.
std::optional<MemoryRoom> memory_room();
/// The same for files that lie elsewhere: of /proc, and the control groups' root.
std::optional<MemoryRoom> memory_room(const std::string& proc, const std::string& cgroups);

}  // namespace mk::shm
