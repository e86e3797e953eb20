/// \file
/// Bugs to order. tests/sim has to find each of them within a minute, which is how we know that it
/// would find one like them. A line of the product says where one could be: `MK_PLANT(name)` is
/// false, and gone, in every build but that of tests/sim's own copy of the engine.
#pragma once

#ifdef MK_PLANTED_BUGS

#include <string_view>

namespace mk::plant {

struct Plant {
  std::string_view name;
  /// What it breaks: one of the invariants of tests/sim/README.md.
  std::string_view invariant;
};

inline constexpr Plant kPlants[] = {
    {"arrives_an_epoch_early", "no arrival before its payload"},
    {"completes_out_of_order", "no arrival before its payload"},
    {"bounds_without_offset", "no byte outside a registered buffer"},
    {"drains_with_writes_posted", "no byte outside a registered buffer"},
    {"memory_goes_early", "no byte outside a registered buffer"},
    {"writes_to_the_departed", "no byte outside a registered buffer"},
    {"releases_an_epoch_early", "no write into a bank that is not released"},
    {"others_not_told", "every launch ends within its deadline"},
    {"refused_for_ever", "every launch ends within its deadline"},
    {"short_post_mixes_up", "every launch ends within its deadline"},
    {"slot_lost", "every count returns to its start"},
    {"early_part_kept", "every count returns to its start"},
    {"immediate_without_slot", "no job affects another's result"},
    {"any_link_fails_all", "no job affects another's result"},
};

/// The one that is switched on; empty: none. One thread.
inline std::string_view& active() {
  static std::string_view name;
  return name;
}

}  // namespace mk::plant

#define MK_PLANT(bug) (::mk::plant::active() == #bug)

#else

#define MK_PLANT(bug) false

#endif
