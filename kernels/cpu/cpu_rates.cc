#include "kernels/cpu/cpu_rates.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "kernels/plan/model.h"

namespace mk::kernels {
namespace {

/// The machine that is shipped, with this one's cores.
const plan::Machine& machine_here() {
  static const plan::Machine machine = [] {
    // A shipped file is ours: it parses (a test holds it to that).
    plan::Machine made = plan::shipped_machine("CPU").value_or(plan::Machine{});
    made.sms = std::max(1u, std::thread::hardware_concurrency());
    return made;
  }();
  return machine;
}

}  // namespace

double block_flops_per_s(GemmPath path) {
  const plan::Machine& machine = machine_here();
  return 1e9 * (path == GemmPath::kNative ? machine.cpu_gflops : machine.cpu_f32_gflops);
}

MachineRates cpu_rates(const MachineRates& rates, const World& world, const RoleBlocks& blocks,
                       double block_flops_per_s) {
  return plan::cpu_rates(machine_here(), rates, world.locals, blocks.compute, block_flops_per_s);
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
