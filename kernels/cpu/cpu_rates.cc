#include "kernels/cpu/cpu_rates.h"

#include <algorithm>
#include <cmath>
#include <thread>

namespace mk::kernels {
namespace {

// Measured on 2 cores of an AMD EPYC (AVX-512, bf16), one thread on its own: tiles of 128 x 256,
// K = 1024; sums of two sources beyond the caches, read and written.
constexpr double kNativeFlops = 350e9;
constexpr double kThroughF32Flops = 170e9;
constexpr double kLocalBytes = 30e9;

// What a chunk's way costs where every block has a core, and where ranks and daemons take turns on
// fewer: then each step waits for a turn. The latter, and what the network is left with then, from
// tests/bench/results/gemm_ar_cpu_*.json (four ranks, two daemons, two cores): fused - longest part
// = 0.4 to 1.2 ms a chunk; over tcp, (unfused - compute) is 18 ms for 4.2 MB.
constexpr double kStepNs = 50e3;
constexpr double kStepNsInTurns = 600e3;
constexpr double kNetworkBytes = 2e9;  // a 25 Gb/s NIC for one rank, less what it never reaches
constexpr double kNetworkBytesInTurns = 250e6;
constexpr double kCommandNs = 10e3;  // a small message's way over tcp

}  // namespace

double block_flops_per_s(GemmPath path) {
  return path == GemmPath::kNative ? kNativeFlops : kThroughF32Flops;
}

MachineRates cpu_rates(const MachineRates& rates, const World& world, const RoleBlocks& blocks,
                       double block_flops_per_s) {
  const double cores = std::max(1u, std::thread::hardware_concurrency());
  const double share = std::min(1.0, cores / (world.locals * blocks.compute));
  // A compute block, and one more core a rank for what goes on beside it.
  const bool in_turns = world.locals * (blocks.compute + 1) > cores;
  const auto choose = [](double given, double otherwise) { return given > 0 ? given : otherwise; };
  MachineRates chosen;
  chosen.flops_per_s = choose(rates.flops_per_s, block_flops_per_s * blocks.compute * share);
  chosen.local_bytes_per_s = choose(rates.local_bytes_per_s, kLocalBytes * share);
  chosen.network_bytes_per_s =
      choose(rates.network_bytes_per_s, in_turns ? kNetworkBytesInTurns : kNetworkBytes);
  chosen.command_ns = choose(rates.command_ns, kCommandNs);
  chosen.step_ns = choose(rates.step_ns, in_turns ? kStepNsInTurns : kStepNs);
  return chosen;
}

Status check_rates(const char* op, const MachineRates& rates) {
  for (double rate : {rates.flops_per_s, rates.local_bytes_per_s, rates.network_bytes_per_s,
                      rates.command_ns, rates.step_ns}) {
    if (std::isfinite(rate) && rate >= 0) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}: a machine's rate of {} makes no sense; give a finite number, or 0 for the "
                "default",
                op, rate);
  }
  return {};
}

}  // namespace mk::kernels
