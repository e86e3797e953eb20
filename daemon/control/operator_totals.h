/// \file
/// How many launches of which operator and tag jobs have made here, and how long they took: for
/// metrics, so that the number of series is bounded whatever tags callers choose.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace mk::daemon {

struct OperatorLabels {
  std::string job, uid, op;
  std::string tag;  ///< LaunchOptions::tag, "0" where there is none

  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 takes a defaulted <=> for one with a 0
  friend auto operator<=>(const OperatorLabels&, const OperatorLabels&) = default;
};

/// Over a job's ranks on this node. What passes between two looks at a rank counts for the launch
/// that the second one sees.
struct OperatorCounts {
  std::uint64_t launches = 0;   ///< begun
  std::uint64_t launch_ns = 0;  ///< in launches
  std::uint64_t wait_ns = 0;    ///< of these with nothing of the rank at work
};

struct OperatorTotal {
  OperatorLabels labels;
  OperatorCounts counts;
};

namespace control {

/// Not thread-safe.
class OperatorTotals {
 public:
  /// Of a job's operator; later ones are added up as "other".
  static constexpr std::size_t kTagsMax = 16;
  /// Of a user, and of all: what comes later is added up under "other" in all labels, but for the
  /// user's as long as there is room.
  static constexpr std::size_t kOfUserMax = 64;
  static constexpr std::size_t kMax = 256;

  /// Those that nothing was added to for `keep_ns` (a minute at least) are forgotten.
  explicit OperatorTotals(std::uint64_t keep_ns);

  void add(OperatorLabels labels, const OperatorCounts& more, std::uint64_t now_ns);
  /// In order of their labels; at most kMax + 1.
  std::vector<OperatorTotal> list(std::uint64_t now_ns) const;

 private:
  struct Entry {
    OperatorCounts counts;
    std::uint64_t added_ns = 0;
  };
  bool expired(const Entry& entry, std::uint64_t now_ns) const;
  Entry& entry_of(OperatorLabels labels, std::uint64_t now_ns);

  const std::uint64_t keep_ns_;
  std::map<OperatorLabels, Entry> entries_;
};

}  // namespace control
}  // namespace mk::daemon
