/// \file
/// The operators' cases, and the layer of two.
#pragma once

#include <memory>

#include "kernels/ops/registry.h"
#include "tests/bench/mkbench/operator_case.h"

namespace mk::bench {

#define MK_CASE(id, name, Class) std::unique_ptr<OperatorCase> make_##id##_case();
MK_OPERATORS(MK_CASE)
#undef MK_CASE
std::unique_ptr<OperatorCase> make_moe_layer_case();

}  // namespace mk::bench
