/// \file
/// A rank process, of any operator.
#pragma once

#include <cstdint>
#include <string>

#include "shm/host/result.h"
#include "tests/bench/mkbench/spec.h"

namespace mk::bench {

/// Attaches as `rank` of `job`, runs the launches, and writes one LaunchReport per line to
/// descriptor `report_fd`.
///
/// Every launch draws fresh inputs, poisons its outputs first, and ends with a hash of all of them.
/// Where the spec asks for it, the rank compares its outputs with the float64 reference (its share,
/// when all ranks' outputs are equal; the parent requires equal hashes then). So all elements of
/// all ranks are checked, but of Ring Attention some rows alone with --check-rows, and on GPUs.
Status run_rank(const BenchSpec& spec, std::uint32_t rank, const std::string& socket,
                const std::string& job, int report_fd);

}  // namespace mk::bench
