/// \file
/// Which of a job's ranks others wait for, by what the ranks say of themselves. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/control/progress_watch.h"

namespace mk::daemon::control {

struct RankDoing {
  std::uint32_t rank = 0;
  bool in_launch = false;
  RankProgress progress;
  /// Why its process does not run, for users; empty: it runs. What it said last is old then.
  std::string stopped{};
};

struct HeldUp {
  std::uint32_t by = 0;  ///< the rank at the end of the waits; perhaps none of those given
  std::vector<std::uint32_t> ranks;  ///< who waits for it, or for one that does
  std::uint64_t for_ns = 0;          ///< since the first of them has
};

/// By the rank that holds others up. Waits that go in a circle, or for the rank's own commands, are
/// nobody's: bytes are under way then.
std::vector<HeldUp> who_holds_up(const std::vector<RankDoing>& ranks);

/// "gemm_ar launch 12 (tag 7), compute, 3 of 128 tiles, 0 of 16 chunks", or "in exchange 'more',
/// which rank 2 has not joined"; empty: not told.
std::string describe(const RankProgress& progress);

/// "the launch of rank 2", "an arrival of rank 5"; empty: it does not wait.
std::string awaited_text(const RankProgress& progress);

/// "0, 1, 5"; long ones are cut.
std::string list_of(const std::vector<std::uint32_t>& ranks);

/// For people, all that `who_holds_up` finds: "rank 3 (gemm_ar launch 12, compute, ...) holds up
/// ranks 0, 1 for 4.1 s". One that is not among `ranks` may wait itself, so it is not blamed:
/// "rank 0 waits for rank 5 of another node for 4.1 s".
std::string held_up_text(const std::vector<RankDoing>& ranks);

}  // namespace mk::daemon::control
