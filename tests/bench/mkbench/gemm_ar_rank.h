/// \file
/// A rank process of `mkbench gemm-ar`.
#pragma once

#include <string>

#include "shm/host/result.h"
#include "tests/bench/mkbench/gemm_ar_spec.h"

namespace mk::bench {

/// Attaches as `rank` of `job`, runs the launches, and writes one LaunchReport per line to
/// descriptor `report_fd`.
///
/// Every launch draws fresh inputs, poisons its output with NaN first, and ends with a hash of the
/// whole output. Where the spec asks for it, the rank compares its share of the rows with the
/// float64 reference; since the parent requires equal hashes on all ranks, all elements of all
/// ranks are checked.
Status run_gemm_ar_rank(const GemmArSpec& spec, std::uint32_t rank, const std::string& socket,
                        const std::string& job, int report_fd);

}  // namespace mk::bench
