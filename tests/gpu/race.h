/// \file
/// Timing several ways to do the same work interleaved, so that all meet the same clocks and
/// temperature.
#pragma once

#include <functional>
#include <vector>

namespace mk::test {

/// One way to do the work: launches it on input set `set`.
using Launch = std::function<void(int set)>;

struct RaceTiming {
  std::vector<double> us;  ///< per launch, one entry per sample
  double median() const;
  double min() const;
  double max() const;
};

/// Times the sides interleaved: a sample is a few milliseconds of back-to-back launches on the null
/// stream over the rotating sets. `flops` of one launch sizes the samples; `seconds` of samples per
/// side.
std::vector<RaceTiming> race(const std::vector<Launch>& sides, int sets, double flops,
                             double seconds);

/// Runs each side alone for `seconds` and times the second half of it, round after round: what a
/// side reaches at the clock that its own power draw leaves it. One sample per round.
std::vector<RaceTiming> endure(const std::vector<Launch>& sides, int sets, double flops,
                               double seconds, int rounds);

}  // namespace mk::test
