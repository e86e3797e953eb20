/// \file
/// What the command line may choose of any fused operator: tiles, chunks, blocks, and how these
/// share the work (client/tools/partition_choice.h). Nothing named: the planner chooses.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <string>

#include "client/tools/partition_choice.h"
#include "kernels/plan/candidate.h"
#include "mkernel/mkernel.h"
#include "tests/bench/mkbench/spec.h"

namespace mk::bench {

struct TuningOptions {
  std::uint32_t tile_m = 0, tile_n = 0, chunk_bytes = 0, compute_blocks = 0;
  std::string partition = "planned";

  /// All but the tiles, whose sides operators name otherwise.
  static void add_shares(CLI::App& command, std::uint32_t& chunk_bytes,
                         std::uint32_t& compute_blocks, std::string& partition) {
    command.add_option("--chunk-bytes", chunk_bytes, "payload of a network command");
    command.add_option("--compute-blocks", compute_blocks, "compute threads of a rank");
    command.add_option("--partition", partition, tools::kPartitionHelp)
        ->check(tools::PartitionChoice::check, "CHOICE")
        ->capture_default_str();
  }
  void add_to(CLI::App& command) {
    command.add_option("--tile-m", tile_m, "rows of a tile; default: the planner's choice");
    command.add_option("--tile-n", tile_n, "columns of a tile; default: the planner's choice");
    add_shares(command, chunk_bytes, compute_blocks, partition);
  }
  void name_in(kernels::plan::Problem& problem) const {
    problem.named.tiling = {tile_m, tile_n, chunk_bytes};
    problem.named.compute_blocks = compute_blocks;
  }
  /// `OperatorTuning`: a Tuning, or an operator's, which has more.
  template <class OperatorTuning = Tuning>
  OperatorTuning tuning(const BenchSpec& spec) const {
    OperatorTuning tuning;
    if (spec.executor == "cuda") tuning.executor = Executor::kCuda;
    tuning.tile_m = tile_m;
    tuning.tile_n = tile_n;
    tuning.chunk_bytes = chunk_bytes;
    tuning.compute_sms = compute_blocks;
    tools::PartitionChoice::apply(partition, tuning);
    tuning.wait_timeout = std::chrono::milliseconds{spec.timeout_ms};
    return tuning;
  }
};

}  // namespace mk::bench
