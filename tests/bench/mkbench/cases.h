/// \file
/// The operators' cases; one file each.
#pragma once

#include <memory>

#include "tests/bench/mkbench/operator_case.h"

namespace mk::bench {

std::unique_ptr<OperatorCase> make_ag_gemm_case();
std::unique_ptr<OperatorCase> make_gemm_rs_case();
std::unique_ptr<OperatorCase> make_gemm_ar_case();
std::unique_ptr<OperatorCase> make_moe_case();
std::unique_ptr<OperatorCase> make_combine_case();
std::unique_ptr<OperatorCase> make_moe_layer_case();
std::unique_ptr<OperatorCase> make_ring_case();

}  // namespace mk::bench
