/// \file
/// The ways to do an operator's work that operators_bench times, interleaved and each alone.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/operator_ranks.h"
#include "tests/gpu/stopwatch.h"
#include "tests/gpu/unfused.h"

namespace mk::test {

/// One of them.
struct Side {
  std::string name;
  std::function<void()> run;  ///< queues a launch on all ranks' streams
  Timing by_turns;            ///< interleaved with the others, so all see the same GPU clock
  Timing alone;               ///< may be empty
};

/// Those of a job, by name: `fused`; `in_place`, where AG+GEMM's rows lie in the workspace;
/// `unfused`, the operator's own form; of each `baseline` form `products`, `collective` and
/// `baseline`, the two one after the other.
class Sides {
 public:
  /// No forms of the baseline: only `fused` and `in_place`.
  Sides(Job& job, bool in_place, std::vector<std::unique_ptr<Unfused>> forms);

  /// Stopwatch::take_turns.
  void take_turns(Stopwatch& stopwatch, int launches);
  /// fused, products and baseline, each for `seconds` without a pause, three times, after as long
  /// to settle at its own clock. After take_turns, which says how many launches that is.
  void endure(Stopwatch& stopwatch, double seconds);

  /// The fastest of that name interleaved; null: there is none.
  const Side* find(const std::string& name) const;
  /// Its median; 0: there is none.
  double us(const std::string& name) const;
  double alone_us(const std::string& name) const;
  void run_fused() { launch(kernels::Mode::kFused); }
  void run_in_place();
  /// Whether all that the baseline awaited came.
  bool right() const;

 private:
  void launch(kernels::Mode mode);

  Job& job_;
  std::vector<std::unique_ptr<Unfused>> forms_;
  std::vector<Side> sides_;
};

}  // namespace mk::test
