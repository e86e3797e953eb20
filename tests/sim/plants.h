/// \file
/// The planted bugs of this build, by name (daemon/plant.h): none, but in mksim_planted.
#pragma once

#include <string>

#include "daemon/plant.h"

namespace mk::sim {

#ifdef MK_PLANTED_BUGS

/// Switches one bug on for the rest of the process; false when there is none of that name.
inline bool switch_plant(const std::string& name) {
  for (const plant::Plant& known : plant::kPlants) {
    if (name != known.name) continue;
    plant::active() = known.name;
    return true;
  }
  return false;
}

inline std::string plant_list() {
  std::string list;
  for (const plant::Plant& known : plant::kPlants) list.append(" ").append(known.name);
  return list;
}

#else

inline bool switch_plant(const std::string&) { return false; }
inline std::string plant_list() { return " none"; }

#endif

}  // namespace mk::sim
