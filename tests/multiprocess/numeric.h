/// \file
/// The operators as jobs of real processes: mkbench's ranks on daemons of ours, with fresh random
/// inputs, poisoned outputs, and every element against float64.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/bench/mkbench/bench.h"
#include "tests/bench/mkbench/operator_case.h"
#include "tests/multiprocess/cluster.h"

namespace mk::test {

struct NumericWorld {
  const char* fabric;
  std::uint32_t nodes, local;
};
inline void PrintTo(const NumericWorld& world, std::ostream* out) {
  *out << world.fabric << " " << world.nodes << "x" << world.local;
}

/// Sizes at and around edges: fewer rows than ranks up to several tiles and chunks, nothing a
/// multiple of anything that it need not be.
struct NumericSizes {
  std::string dtype;
  nlohmann::json operation;
};
std::vector<NumericSizes> edge_sizes(const std::string& op);

/// The cases whose operator has its own protocol. Of the MoE layer's second half, the layer is
/// what runs as a job of processes (`with_layer`): its other worlds are in
/// tests/client/gemm_combine_test.cc.
inline std::vector<std::string> numeric_cases(bool with_layer) {
  std::vector<std::string> names = bench::case_names();
  std::erase(names, "combine");
  if (!with_layer) std::erase(names, "moe-layer");
  return names;
}

/// Running daemons, kept from test to test while they fit. Null when they did not start.
const tools::DaemonSet* daemons_for(const std::string& fabric, std::uint32_t nodes);
void stop_daemons();

/// A job of fused and unfused launches interleaved.
bench::BenchOptions numeric_job(const NumericWorld& world, const std::string& op,
                                const NumericSizes& sizes);

/// Runs it; everything must have been compared, and right.
bench::BenchResult expect_right(const bench::BenchOptions& options);

/// Launches of one operator with changing sizes, back to back, ranks starting late at random.
class NumericTest : public testing::TestWithParam<std::tuple<NumericWorld, std::string>> {
 protected:
  static void TearDownTestSuite() { stop_daemons(); }
  void expect_right_at_all_sizes() const;
};

inline std::string numeric_name(
    const testing::TestParamInfo<std::tuple<NumericWorld, std::string>>& test) {
  const auto& [world, op] = test.param;
  std::string name = fmt::format("{}{}x{}_{}", world.fabric, world.nodes, world.local, op);
  for (char& letter : name)
    if (letter == '-') letter = '_';
  return name;
}

}  // namespace mk::test
