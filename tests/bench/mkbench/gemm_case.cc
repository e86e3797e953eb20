#include "tests/bench/mkbench/gemm_case.h"

#include <CLI/CLI.hpp>

#include "client/tools/numeric/gemm_reference.h"

namespace mk::bench {

void GemmCase::add_gemm_options(CLI::App& command, const Help& help) {
  const auto size = [&](const char* flag, std::uint64_t& value, const char* text) {
    command.add_option(flag, value, text)->check(CLI::PositiveNumber)->capture_default_str();
  };
  size("--m", options_.m, help.m);
  size("--n", options_.n, help.n);
  size("--k", options_.k, help.k);
  command.add_option("--tile-m", options_.tile_m);
  command.add_option("--tile-n", options_.tile_n);
  command.add_option("--chunk-bytes", options_.chunk_bytes, "payload of a network command");
  command.add_option("--compute-blocks", options_.compute_blocks, "compute threads of a rank");
}

Tuning GemmCase::tuning(const BenchSpec& spec) const {
  Tuning tuning;
  tuning.tile_m = options_.tile_m;
  tuning.tile_n = options_.tile_n;
  tuning.chunk_bytes = options_.chunk_bytes;
  tuning.compute_blocks = options_.compute_blocks;
  tuning.wait_timeout = std::chrono::milliseconds{spec.timeout_ms};
  return tuning;
}

tools::Comparison GemmRank::compare_sum(const RankShare& rows, const std::uint16_t* c) const {
  tools::GemmReference reference(rows.count, options_.n, spec_.nodes, spec_.local,
                                 data_type_of(spec_));
  for (std::uint32_t rank = 0; rank < spec_.world(); ++rank) {
    reference.add_rank(rows_of(matrix_a(rank), rows.first, rows.count).data(),
                       rows_of(matrix_b(rank), 0, options_.k).data(), options_.k, 1, 1);
  }
  return reference.compare(c);
}

}  // namespace mk::bench
