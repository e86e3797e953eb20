/// \file
/// The recorded operator runs of GPUs (tests/bench/results), as gather_runs.py has them.
#pragma once

#include <string>
#include <vector>

#include "kernels/plan/candidate.h"

namespace mk::kernels::plan {

struct RecordedRun {
  std::string file;
  bool present = false;   ///< of the kernels that exist; else of earlier ones
  bool sweep = false;     ///< its shape was run with several candidates
  bool screened = false;  ///< by five launches: a time to some percent
  std::string gpu;        ///< "H100", "H200"
  Problem problem;
  Candidate candidate;
  double us = 0;  ///< median
};

/// All of them. Ends the test if the table is not as expected.
std::vector<RecordedRun> recorded_runs();

/// Whether the fit has not seen the shape: a chess board over operator, the doublings of each side,
/// and narrow or wide (fit_machine.py has the same).
bool held_out(const Problem& problem);

}  // namespace mk::kernels::plan
