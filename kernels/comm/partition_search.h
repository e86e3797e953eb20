/// \file
/// Seeks, from launch to launch, the number of a rank's SMs or threads that communicate: launches'
/// times in, the number for the next ones out. Plain arithmetic, without clocks or threads. (Within
/// a launch: partition.h.) Which launches are measured: partition_searches.h.
///
/// A target's neighbours are tried, first twice and half as many, then by smaller factors. A
/// direction in which launches get quicker is kept. Nothing is assumed of why they do: links that
/// are full, waits and caches all count. A gain is more than launches differ by themselves.
///
/// One number stands for all roles that communicate: they keep the proportions of the plan. A
/// number for each would take as many times the launches, and the roles of a group that shares,
/// then pulls, come one after the other.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace mk::kernels {

/// Numbers of tokens change from launch to launch: this one stands for `count` and all that are
/// less than a quarter more. Their launches share a search.
constexpr std::uint32_t alike_count(std::uint32_t count) {
  constexpr std::uint32_t kBits = 3;
  const auto width = static_cast<std::uint32_t>(std::bit_width(count));
  return width <= kBits ? std::max(1u, count) : count >> (width - kBits) << (width - kBits);
}

/// One thread calls it.
class PartitionSearch {
 public:
  /// Targets are `least` to `most`, the first of them `start`.
  PartitionSearch(std::uint32_t least, std::uint32_t most, std::uint32_t start)
      : least_(least), most_(std::max(least, most)) {
    best_ = target_ = bounded(start);
  }

  /// For the launches that follow.
  std::uint32_t target() const { return target_; }
  /// The best one so far: for launches that nobody measures.
  std::uint32_t best() const { return best_; }
  /// Nothing is being tried. Launches need be measured now and then only.
  bool settled() const { return trying_ == Trying::kNothing && doubts_ == 0; }

  /// A launch with target() takes so long: the least of a few, since others' lateness only adds.
  /// `spread`: by how much such launches differ where nothing is late. (Routing that changes makes
  /// other work of each.)
  void measured(std::uint64_t ns, std::uint64_t spread = 0) {
    const double of_ns = static_cast<double>(spread) / static_cast<double>(std::max(ns, spread));
    spread_ = std::max(ns != 0 ? of_ns : 0.0, kForgets * spread_);
    switch (trying_) {
      case Trying::kNothing:
        look(static_cast<double>(ns));
        return;
      case Trying::kBest:
        best_ns_ = static_cast<double>(ns);
        begin();
        return;
      case Trying::kMore:
      case Trying::kLess:
        judge(static_cast<double>(ns));
        return;
    }
  }

 private:
  /// kBest: how long launches take now, before others are compared with it.
  enum class Trying : std::uint8_t { kNothing, kBest, kMore, kLess };

  static constexpr double kWidest = 2;       ///< the first factor between neighbours
  static constexpr double kNarrowest = 1.1;  ///< the last is above that
  static constexpr double kGain = 0.99;      ///< of the time: less is no gain
  static constexpr double kMuch = 0.8;       ///< of the time: less is a clear gain
  static constexpr double kForgets = 0.75;   ///< what a spread counts for after a measurement
  /// A neighbour of less than so much of the time is hardly worse. Behind so many of these the
  /// search goes on: tiles come in waves, and only a number that saves a wave shows a gain.
  static constexpr double kAlike = 1.1;
  static constexpr std::uint32_t kStrays = 2;
  static constexpr double kUnlike = 0.1;       ///< of the time: more is a disturbance
  static constexpr double kSpreads = 3;        ///< and as many spreads
  static constexpr std::uint32_t kDoubts = 2;  ///< if so many in a row have it
  /// Measurements of a settled search until it tries near neighbours again.
  static constexpr std::uint32_t kRest = 8;

  /// At the best target.
  void look(double ns) {
    const bool unlike = std::abs(ns - best_ns_) > std::max(kUnlike, kSpreads * spread_) * best_ns_;
    doubts_ = unlike ? doubts_ + 1 : 0;
    if (doubts_ == kDoubts) {
      measure_best(kWidest);
    } else if (++rested_ >= kRest && !unlike) {
      measure_best(std::sqrt(kWidest));
    }
  }
  void measure_best(double factor) {
    doubts_ = rested_ = 0;
    factor_ = factor;
    trying_ = Trying::kBest;
    target_ = best_;
  }
  /// A neighbour's time.
  void judge(double ns) {
    if (ns < std::min(kGain, 1 - spread_) * best_ns_) {
      best_ = target_;
      best_ns_ = ns;
      went_ = true;
      strayed_ = 0;
      if (try_one(trying_, best_)) return;
    } else if (factor_ == kWidest && ns < std::max(kAlike, 1 + spread_) * best_ns_ &&
               strayed_ < kStrays) {
      ++strayed_;
      if (try_one(trying_, target_)) return;
    }
    strayed_ = 0;
    if (trying_ == Trying::kMore && less_may_gain() && try_one(Trying::kLess, origin_)) return;
    narrow();
  }
  /// Also where more of them gain little, as there may be two best ones.
  bool less_may_gain() const {
    return !went_ || (factor_ == kWidest && best_ns_ > kMuch * origin_ns_);
  }
  void narrow() {
    factor_ = std::sqrt(factor_);
    if (factor_ > kNarrowest) {
      measure_best(factor_);
      return;
    }
    trying_ = Trying::kNothing;
    target_ = best_;
  }
  /// The first neighbour there is; else it is settled.
  void begin() {
    went_ = false;
    strayed_ = 0;
    origin_ = best_;
    origin_ns_ = best_ns_;
    if (!try_one(Trying::kMore, best_) && !try_one(Trying::kLess, best_)) narrow();
  }
  /// False: there is none there.
  bool try_one(Trying which, std::uint32_t from) {
    const double wanted = which == Trying::kMore ? from * factor_ : from / factor_;
    const auto whole = static_cast<std::uint32_t>(std::lround(wanted));
    const std::uint32_t next =
        which == Trying::kMore ? std::max(whole, from + 1) : std::min(whole, from - 1);
    const std::uint32_t neighbour = bounded(next);
    if (neighbour == from) return false;
    trying_ = which;
    target_ = neighbour;
    return true;
  }
  std::uint32_t bounded(std::uint32_t target) const { return std::clamp(target, least_, most_); }

  std::uint32_t least_, most_;
  std::uint32_t target_ = 0;
  std::uint32_t best_ = 0;
  double best_ns_ = 0;
  double spread_ = 0;  ///< of the last measurements, as a part of the time
  double factor_ = kWidest;
  Trying trying_ = Trying::kBest;
  std::uint32_t origin_ = 0;  ///< the best one before this factor's neighbours
  double origin_ns_ = 0;
  bool went_ = false;          ///< by this factor it has moved
  std::uint32_t strayed_ = 0;  ///< neighbours in this direction that were hardly worse
  std::uint32_t rested_ = 0;
  std::uint32_t doubts_ = 0;
};

}  // namespace mk::kernels
