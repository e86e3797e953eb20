/// \file
/// The shapes at which operators are measured, per rank of eight.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/gpu/products.h"
#include "tests/gpu/rank_operator.h"

namespace mk::test {

/// On one node a layer of width 8192 and 57344 (AG+GEMM) or 28672 dealt out over eight ranks; then
/// square products, dealt out.
inline std::vector<Shape> bench_shapes(Op op, std::uint32_t nodes) {
  constexpr int kRows[] = {2048, 4096, 8192, 16384, 32768};
  const bool gathers = op == Op::kAgGemm;
  std::vector<Shape> shapes;
  for (const int m : kRows) {
    if (nodes == 1) shapes.push_back(gathers ? Shape{m, 7168, 8192} : Shape{m, 8192, 3584});
  }
  for (const int m : kRows) shapes.push_back(gathers ? Shape{m, m / 8, m} : Shape{m, m, m / 8});
  return shapes;
}

}  // namespace mk::test
