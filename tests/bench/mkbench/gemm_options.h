/// \file
/// What the cases that multiply matrices share: shape, tiling, and the random matrices.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel.h"
#include "tests/bench/mkbench/spec.h"

namespace CLI {
class App;
}  // namespace CLI

namespace mk::bench {

using Elements = std::vector<std::uint16_t>;

inline DataType data_type_of(const BenchSpec& spec) {
  return spec.dtype == "f16" ? DataType::kF16 : DataType::kBf16;
}

struct GemmOptions {
  std::uint64_t m = 1024, n = 1024, k = 512;
  /// 0: the operator chooses.
  std::uint32_t tile_m = 0, tile_n = 0, chunk_bytes = 0, compute_blocks = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GemmOptions, m, n, k, tile_m, tile_n, chunk_bytes,
                                   compute_blocks)

struct GemmHelp {
  const char *m, *n, *k;
};
void add_gemm_options(CLI::App& command, GemmOptions& options, const GemmHelp& help);

template <class Tuning>
Tuning tuning_of(const GemmOptions& options, const BenchSpec& spec) {
  Tuning tuning;
  tuning.tile_m = options.tile_m;
  tuning.tile_n = options.tile_n;
  tuning.chunk_bytes = options.chunk_bytes;
  tuning.compute_blocks = options.compute_blocks;
  tuning.wait_timeout = std::chrono::milliseconds{spec.timeout_ms};
  return tuning;
}

/// Input `which` of `rank` in launch `launch`, all elements within +-1: any process can make any
/// rows of it.
inline tools::RandomMatrix input_matrix(const BenchSpec& spec, std::uint32_t launch,
                                        std::uint32_t rank, std::uint32_t which,
                                        std::uint64_t columns) {
  return {spec.seed, std::uint64_t{launch} << 24 | rank << 8 | which, columns, data_type_of(spec)};
}
inline Elements rows_of(const tools::RandomMatrix& matrix, std::uint64_t first,
                        std::uint64_t count) {
  Elements rows(count * matrix.columns);
  matrix.rows(first, count, rows.data());
  return rows;
}

}  // namespace mk::bench
