/// \file
/// Seeks, from launch to launch, the number of a rank's SMs that communicate: launches' times in,
/// the number for the next ones out. Plain arithmetic, without clocks or threads. (Within a launch:
/// partition.h.) Launches are measured by kernels/cuda/host/adaptive_blocks.h.
///
/// A target's neighbours are tried, first twice and half as many, then by smaller factors. A
/// direction in which launches get quicker is kept. Nothing is assumed of why they do: links that
/// are full, waits and caches all count.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace mk::kernels {

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
  void measured(std::uint64_t ns) {
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

  static constexpr double kWidest = 2;         ///< the first factor between neighbours
  static constexpr double kNarrowest = 1.1;    ///< the last is above that
  static constexpr double kGain = 0.99;        ///< of the time: less is no gain
  static constexpr double kUnlike = 0.1;       ///< of the time: more is a disturbance
  static constexpr std::uint32_t kDoubts = 2;  ///< if so many in a row have it
  /// Measurements of a settled search until it tries near neighbours again.
  static constexpr std::uint32_t kRest = 8;

  /// At the best target.
  void look(double ns) {
    const bool unlike = std::abs(ns - best_ns_) > kUnlike * best_ns_;
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
    if (ns < kGain * best_ns_) {
      best_ = target_;
      best_ns_ = ns;
      went_ = true;
      if (try_one(trying_)) return;
    } else if (trying_ == Trying::kMore && !went_ && try_one(Trying::kLess)) {
      return;
    }
    narrow();
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
    if (!try_one(Trying::kMore) && !try_one(Trying::kLess)) narrow();
  }
  /// False: there is none there.
  bool try_one(Trying which) {
    const double wanted = which == Trying::kMore ? best_ * factor_ : best_ / factor_;
    const auto whole = static_cast<std::uint32_t>(std::lround(wanted));
    const std::uint32_t next =
        which == Trying::kMore ? std::max(whole, best_ + 1) : std::min(whole, best_ - 1);
    const std::uint32_t neighbour = bounded(next);
    if (neighbour == best_) return false;
    trying_ = which;
    target_ = neighbour;
    return true;
  }
  std::uint32_t bounded(std::uint32_t target) const { return std::clamp(target, least_, most_); }

  std::uint32_t least_, most_;
  std::uint32_t target_ = 0;
  std::uint32_t best_ = 0;
  double best_ns_ = 0;
  double factor_ = kWidest;
  Trying trying_ = Trying::kBest;
  bool went_ = false;  ///< by this factor it has moved
  std::uint32_t rested_ = 0;
  std::uint32_t doubts_ = 0;
};

}  // namespace mk::kernels
