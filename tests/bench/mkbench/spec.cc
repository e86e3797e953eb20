#include "tests/bench/mkbench/spec.h"

#include <algorithm>

#include "client/tools/numeric/random_matrix.h"

namespace mk::bench {

std::uint64_t extent_of(const BenchSpec& spec, std::uint32_t launch, std::uint64_t least,
                        std::uint64_t max) {
  if (spec.sizes == "fixed") return max;
  const std::uint64_t drawn =
      least + tools::mix64(spec.seed ^ tools::mix64(launch)) % (max - least + 1);
  const std::uint64_t by_turns[] = {max, least, drawn, max - 1, least + 1, drawn, drawn};
  return std::clamp(by_turns[launch % std::size(by_turns)], least, max);
}

}  // namespace mk::bench
