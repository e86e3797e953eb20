/// \file
/// One rank as `who-is-slow` has seen it at two looks, and how a finding speaks of it. Private to
/// slow.cc and slow_text.cc.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "daemon/control/held_up.h"
#include "proto/mkernel/v1/admin.pb.h"

namespace mk::mkctl {

namespace v1 = ::mkernel::v1;

// Of a rank's time between the looks: one that waits for more than the first is held up, one that
// waits for less than the second holds others up if anybody does.
inline constexpr double kHeldUp = 0.6;
inline constexpr double kHolds = 0.3;
/// Times that a daemon has looked at a rank meanwhile, so that these say something.
inline constexpr std::uint64_t kLooksMin = 3;
/// A rank that waits for so much less of its time than any rank outside its group is slower than
/// those. Ranks of one group differ by the second at most.
inline constexpr double kSlowerBy = 0.1;
inline constexpr double kAlike = 0.05;
/// For that: the share of 100 looks has an error of 4 points.
inline constexpr std::uint64_t kLooksOfShares = 80;

struct Rank {
  std::uint32_t node = 0;
  const v1::Session* before = nullptr;  ///< null: attached between the looks
  const v1::Session* after = nullptr;
  double commands_per_second = 0;

  /// Times that its daemon has looked at it between the looks; 0: it does not tell.
  std::uint64_t looks() const {
    if (before == nullptr || !after->has_progress()) return 0;
    return after->progress().looks() - before->progress().looks();
  }
  /// The share of them in which it waited; of which it was in a launch.
  double waited() const {
    return part(after->progress().looks_waiting() - before->progress().looks_waiting());
  }
  double in_launch() const {
    return part(after->progress().looks_in_launch() - before->progress().looks_in_launch());
  }
  /// In a launch, for most of the time, and seldom waiting.
  bool works() const { return looks() != 0 && in_launch() >= 0.5 && waited() <= kHolds; }
  /// At both looks, for the same rank.
  bool waits() const {
    return looks() != 0 && !after->progress().waits_for().empty() &&
           !before->progress().waits_for().empty() &&
           after->progress().waits_for_rank() == before->progress().waits_for_rank();
  }

 private:
  double part(std::uint64_t of) const {
    return static_cast<double>(of) / static_cast<double>(looks());
  }
};

/// By name, all ranks of all nodes.
using Ranks = std::map<std::uint32_t, Rank>;

inline std::string numbers(const std::vector<std::uint32_t>& all) {
  return (all.size() == 1 ? "rank " : "ranks ") + daemon::control::list_of(all);
}

inline std::uint64_t launch_of(std::uint64_t launches) { return launches / 2 + launches % 2; }

/// "rank 3 (node 1, pid 4711)"
std::string person(std::uint32_t number, const Rank& rank);

/// A rank that works: as at that look at which it did not wait for an instant.
daemon::RankProgress work_of(const Rank& rank);

/// "ranks 0, 1 wait at least 97% of the time, rank 0 in reduce of gemm_ar launch 3 for a tile of
/// rank 3"
std::string waits_of(const std::vector<std::uint32_t>& waiting, const Ranks& all);

}  // namespace mk::mkctl
