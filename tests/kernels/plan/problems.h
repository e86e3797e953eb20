/// \file
/// Problems that the planner's tests ask about.
#pragma once

#include <cstdint>

#include "kernels/plan/candidate.h"

namespace mk::kernels::plan {

inline Problem problem_of(Op op, std::uint32_t nodes, std::uint32_t locals, Shape shape) {
  Problem problem;
  problem.op = op;
  problem.nodes = nodes;
  problem.locals = locals;
  problem.shape = shape;
  return problem;
}

}  // namespace mk::kernels::plan
