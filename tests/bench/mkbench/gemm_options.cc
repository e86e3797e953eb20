#include "tests/bench/mkbench/gemm_options.h"

#include <CLI/CLI.hpp>

namespace mk::bench {

void add_gemm_options(CLI::App& command, GemmOptions& options, const GemmHelp& help) {
  const auto size = [&](const char* flag, std::uint64_t& value, const char* text) {
    command.add_option(flag, value, text)->check(CLI::PositiveNumber)->capture_default_str();
  };
  size("--m", options.m, help.m);
  size("--n", options.n, help.n);
  size("--k", options.k, help.k);
  command.add_option("--tile-m", options.tile_m);
  command.add_option("--tile-n", options.tile_n);
  command.add_option("--chunk-bytes", options.chunk_bytes, "payload of a network command");
  command.add_option("--compute-blocks", options.compute_blocks, "compute threads of a rank");
}

}  // namespace mk::bench
