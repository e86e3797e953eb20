/// \file
/// A partition that is sought from launch to launch (partition_search.h), for one rank's operator:
/// which launches are measured, and a search for each height of launches. Host only.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>

#include "kernels/comm/partition.h"
#include "kernels/comm/partition_search.h"

namespace mk::kernels {

/// Targets are numbers of workers that communicate. `Measurement`, of one launch, has
///
///     bool is_there() const;       whether its time is known; never waits
///     std::uint64_t ns() const;    its time; 0: the launch has failed
///
/// Not thread-safe.
template <class Measurement>
class PartitionSearches {
 public:
  /// Launches of which the quickest counts.
  static constexpr std::uint32_t kMeasured = 3;
  /// Targets change every so many launches: where ranks launch alike, with all of them at one time.
  static constexpr std::uint32_t kWindow = 4;
  /// So many launches go by between two windows once a search is settled.
  static constexpr std::uint32_t kRest = 60;
  /// Before the first ones, so many launches, as the machine's clock and caches are not yet what
  /// they will be.
  static constexpr std::uint32_t kWarmUp = 2 * kWindow;
  /// More heights than that take the target of the nearest one.
  static constexpr std::size_t kHeightsMax = 16;

  PartitionSearches(std::uint32_t least, std::uint32_t most, std::uint32_t start)
      : least_(least), most_(most), start_(start) {
    stats_.first = stats_.last = start;
  }

  /// The target of the next launch, of `m` rows. `measurable`: else it has the best one known, and
  /// nobody measures it.
  std::uint32_t choose(std::uint32_t m, bool measurable) {
    measured_ = nullptr;
    // Making a search allocates, which a launch that is captured must not.
    if (!measurable) {
      const Sought* const nearest = nearest_to(m);
      return note(nearest == nullptr ? start_ : nearest->search.best());
    }
    Sought& sought = sought_for(m);
    if (sought_.count(m) == 0) return note(sought.search.best());
    sought.turn();
    if (sought.rest == 0) measured_ = &sought;
    return note(sought.search.target());
  }
  /// Likewise, of a launch that does not adapt.
  std::uint32_t choose_first() {
    measured_ = nullptr;
    return note(start_);
  }
  /// After it: the place of its time; null: nobody measures it.
  Measurement* next_measurement() {
    if (measured_ == nullptr) return nullptr;
    const std::uint32_t place = measured_->launches++;
    Sought& sought = *measured_;
    measured_ = nullptr;
    return place < kMeasured ? &sought.measurements[place] : nullptr;
  }
  /// The last launch's target, as first and last, and how often it has changed since the first
  /// launch.
  const PartitionStats& stats() const { return stats_; }

 private:
  /// The search for launches of one height.
  struct Sought {
    explicit Sought(const PartitionSearch& begin) : search(begin) {}

    /// Before a launch that may be measured.
    void turn() {
      if (rest != 0) {
        --rest;
        return;
      }
      // Not all at once: those that are under way may be the last ones with the old target.
      if (launches < kWindow || launches % kWindow != 0) return;
      std::array<std::uint64_t, kMeasured> ns{};
      std::uint32_t count = 0;
      for (const Measurement& one : measurements) {
        if (!one.is_there()) return;
        if (const std::uint64_t its = one.ns(); its != 0) ns[count++] = its;
      }
      launches = 0;
      std::sort(ns.begin(), ns.begin() + count);
      // One may be late by itself: the second tells by how much launches differ.
      if (count != 0) search.measured(ns[0], ns[std::min(count - 1, 1u)] - ns[0]);
      if (search.settled()) rest = kRest;
    }

    PartitionSearch search;
    std::array<Measurement, kMeasured> measurements;
    std::uint32_t launches = 0;    ///< with this target, since it was chosen or rested
    std::uint32_t rest = kWarmUp;  ///< launches that nobody measures
  };

  /// Null: there is none at all.
  Sought* nearest_to(std::uint32_t m) const {
    Sought* nearest = nullptr;
    double least = 0;
    for (const auto& [height, sought] : sought_) {
      const double distance = std::abs(std::log(static_cast<double>(height) / m));
      if (nearest != nullptr && distance >= least) continue;
      nearest = sought.get();
      least = distance;
    }
    return nearest;
  }
  /// A height that is new begins with what the nearest one has learned.
  Sought& sought_for(std::uint32_t m) {
    if (const auto found = sought_.find(m); found != sought_.end()) return *found->second;
    Sought* const nearest = nearest_to(m);
    if (sought_.size() >= kHeightsMax) return *nearest;
    const std::uint32_t start = nearest == nullptr ? start_ : nearest->search.best();
    auto made = std::make_unique<Sought>(PartitionSearch(least_, most_, start));
    return *sought_.emplace(m, std::move(made)).first->second;
  }
  std::uint32_t note(std::uint32_t target) {
    if (target != stats_.last) ++stats_.moves;
    stats_.first = stats_.last = target;
    return target;
  }

  const std::uint32_t least_, most_, start_;
  std::map<std::uint32_t, std::unique_ptr<Sought>> sought_;  ///< by m
  Sought* measured_ = nullptr;  ///< whose launch is next; null: nobody measures it
  PartitionStats stats_;
};

}  // namespace mk::kernels
