#include "kernels/plan/account.h"

#include <algorithm>
#include <cmath>
#include <thread>

namespace mk::kernels::plan {
namespace {

constexpr double kBytesOfGb = 1e9;
constexpr double kNsOfUs = 1e3;
constexpr double kFlopsOfStep = 2.0 * 128 * 256 * 64;  ///< Machine::step_us_256

double or_own(double told, double own) { return told > 0 ? told : own; }

MachineRates cpu_rates(const Machine& machine, const RankShare& of) {
  const double cores = std::max(1u, machine.sms);
  const double threads = of.locals * std::max(1u, of.compute_blocks);
  const double share = std::min(1.0, cores / threads);
  // A compute block, and one more core a rank for what goes on beside it.
  const bool in_turns = threads + of.locals > cores;
  const double flops = or_own(of.block_flops_per_s, machine.cpu_gflops * kBytesOfGb);
  MachineRates own;
  own.flops_per_s = flops * std::max(1u, of.compute_blocks) * share;
  own.local_bytes_per_s = machine.cpu_memory_gb_s * kBytesOfGb * share;
  own.network_bytes_per_s =
      kBytesOfGb * (in_turns ? std::min(machine.cpu_network_in_turns_gb_s, machine.network_gb_s)
                             : machine.network_gb_s);
  own.command_ns = machine.cpu_command_us * kNsOfUs;
  own.step_ns = kNsOfUs * (in_turns ? machine.cpu_step_in_turns_us : machine.cpu_step_us);
  return own;
}

MachineRates gpu_rates(const Machine& machine, const RankShare& of) {
  MachineRates own;
  own.flops_per_s = or_own(of.block_flops_per_s, sm_flops_per_s(machine)) * of.compute_blocks /
                    (1 + machine.power_slowdown);
  own.local_bytes_per_s = machine.rows_link_gb_s * kBytesOfGb;
  own.network_bytes_per_s = machine.network_gb_s * kBytesOfGb;
  own.command_ns = machine.network_command_us * kNsOfUs;
  own.step_ns = machine.chunk_flag_us * kNsOfUs;
  return own;
}

}  // namespace

std::uint64_t ns_of(double us) {
  // More than this (584 years) says nothing anyway, and would not fit the type.
  constexpr double kMost = 1.8e19;
  return static_cast<std::uint64_t>(std::min(us * kNsOfUs, kMost));
}

Estimate estimate_of(const Timeline& fused, const Timeline& unfused) {
  return {ns_of(fused.total), ns_of(unfused.total)};
}

double sm_flops_per_s(const Machine& machine) { return kFlopsOfStep / machine.step_us_256 * 1e6; }

MachineRates rank_rates(const Machine& machine, const MachineRates& told, const RankShare& share) {
  const MachineRates own =
      machine.kind == MachineKind::kCpu ? cpu_rates(machine, share) : gpu_rates(machine, share);
  return {or_own(told.flops_per_s, own.flops_per_s),
          or_own(told.local_bytes_per_s, own.local_bytes_per_s),
          or_own(told.network_bytes_per_s, own.network_bytes_per_s),
          or_own(told.command_ns, own.command_ns), or_own(told.step_ns, own.step_ns)};
}

Timeline predict(const LaunchWork& work, const MachineRates& rates, Mode form) {
  const auto us = [](double amount, double per_s) { return per_s > 0 ? amount / per_s * 1e6 : 0; };
  Timeline time;
  time.compute = us(work.flops, rates.flops_per_s);
  time.local = us(work.local_bytes, rates.local_bytes_per_s);
  time.network = us(work.network_bytes, rates.network_bytes_per_s) +
                 work.commands * rates.command_ns / kNsOfUs;
  const double sum = time.compute + time.local + time.network;
  time.total = sum;
  if (form == Mode::kUnfused) return time;
  const double steps = std::max(work.steps, 1u);
  const double longest = std::max({time.compute, time.local, time.network});
  time.last = (sum - longest) / steps;
  time.launch = steps * rates.step_ns / kNsOfUs;
  time.total = longest + time.last + time.launch;
  return time;
}

Estimate expected(const LaunchWork& work, const MachineRates& rates) {
  return estimate_of(predict(work, rates, Mode::kFused), predict(work, rates, Mode::kUnfused));
}

Status check_rates(std::string_view op, const MachineRates& rates) {
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

const Machine& cpu_here() {
  static const Machine machine = [] {
    // A shipped file is ours: it parses (a test holds it to that).
    Machine made = shipped_machine("CPU").value_or(Machine{});
    made.sms = std::max(1u, std::thread::hardware_concurrency());
    return made;
  }();
  return machine;
}

}  // namespace mk::kernels::plan
