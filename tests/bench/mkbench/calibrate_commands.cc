#include <algorithm>

#include "tests/bench/mkbench/bench.h"
#include "tests/bench/mkbench/calibrate.h"
#include "tests/bench/mkbench/operator_case.h"

namespace mk::bench {
namespace {

namespace plan = kernels::plan;

/// AllGather+GEMM with hardly a product: 8 MiB of rows go to the other of two nodes, in chunks of
/// that size.
Result<CommandRun> run_with(std::uint32_t chunk_bytes,
                            const std::function<void(const std::string&)>& progress) {
  BenchOptions options;
  options.spec.op = "ag-gemm";
  options.spec.nodes = 2;
  options.spec.local = 1;
  options.spec.iterations = 25;
  options.spec.verify = "none";
  const auto gather = make_case(options.spec.op);
  nlohmann::json shape = gather->options();
  shape["m"] = 4096;
  shape["n"] = 8;
  shape["k"] = 2048;
  shape["chunk_bytes"] = chunk_bytes;
  gather->set_options(shape);
  options.spec.operation = gather->options();
  MK_ASSIGN_OR_RETURN(const BenchResult result, run_bench(options, progress));
  CommandRun run;
  run.fused_us = result.fused.total_ms.min * 1e3;
  run.unfused_us = result.unfused.total_ms.min * 1e3;
  run.compute_us = result.unfused.compute_ms.min * 1e3;
  run.bytes = static_cast<double>(result.unfused.network_bytes_per_rank);
  run.commands = static_cast<double>(result.unfused.commands_per_rank);
  return run;
}

}  // namespace

CommandsMeasured commands_of(const CommandRun& few, const CommandRun& many, std::uint32_t cores) {
  CommandsMeasured measured;
  const double more = many.commands - few.commands;
  if (more <= 0) return measured;
  measured.command_us = std::max(0.0, many.unfused_us - few.unfused_us) / more;
  // Fused, the network is the longest leg: its commands, and a step for each.
  measured.step_us = std::max(0.0, (many.fused_us - few.fused_us) / more - measured.command_us);
  const double sending = few.unfused_us - few.compute_us - few.commands * measured.command_us;
  if (sending > 0) measured.network_gb_s = few.bytes / (sending * 1e3);
  // Two ranks with two threads each, and two daemons.
  constexpr std::uint32_t kThreads = 6;
  measured.in_turns = cores < kThreads;
  return measured;
}

Result<CommandsMeasured> measure_commands(const std::function<void(const std::string&)>& progress) {
  MK_ASSIGN_OR_RETURN(const CommandRun few, run_with(1024 * 1024, progress));
  MK_ASSIGN_OR_RETURN(const CommandRun many, run_with(16 * 1024, progress));
  return commands_of(few, many, cores_here());
}

plan::Machine calibrated(const plan::Machine& like, const CommandsMeasured& measured) {
  plan::Machine machine = like;
  const auto take = [](double from, double& to) {
    if (from > 0) to = from;
  };
  take(measured.command_us, machine.cpu_command_us);
  take(measured.step_us, measured.in_turns ? machine.cpu_step_in_turns_us : machine.cpu_step_us);
  take(measured.network_gb_s,
       measured.in_turns ? machine.cpu_network_in_turns_gb_s : machine.network_gb_s);
  return machine;
}

}  // namespace mk::bench
