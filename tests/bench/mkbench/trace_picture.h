/// \file
/// Traces as one picture.
#pragma once

#include <span>
#include <string>

#include "tests/bench/mkbench/trace.h"

namespace mk::bench {

/// SVG, all launches on the same scale of time. Each rank has three lanes. They show what its
/// compute blocks did (tiles; waits in grey), its exchange with the node (sums and copies), and the
/// chunks it sent to other nodes. A chunk goes from its commit, or the arrival of the one before it
/// on the same link, to its arrival.
std::string trace_picture(std::span<const LaunchTrace> launches, const std::string& title);

}  // namespace mk::bench
