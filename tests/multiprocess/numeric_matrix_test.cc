// Every operator over real processes: worlds of one node (no network), of one rank per node (no
// local exchange), and between; over both fabrics.

#include "tests/multiprocess/numeric.h"

namespace mk::test {
namespace {

class NumericMatrix : public NumericTest {};

TEST_P(NumericMatrix, IsRightAtAllSizes) { expect_right_at_all_sizes(); }

std::vector<NumericWorld> worlds() {
  std::vector<NumericWorld> worlds;
  for (const char* fabric : {"loopback", "ofi"}) {
    for (const auto& [nodes, local] :
         {std::pair{1u, 1u}, {1u, 3u}, {2u, 1u}, {2u, 4u}, {3u, 1u}, {3u, 2u}, {4u, 2u}}) {
      worlds.push_back({fabric, nodes, local});
    }
  }
  return worlds;
}

INSTANTIATE_TEST_SUITE_P(Worlds, NumericMatrix,
                         testing::Combine(testing::ValuesIn(worlds()),
                                          testing::ValuesIn(numeric_cases(false))),
                         numeric_name);

}  // namespace
}  // namespace mk::test
