/// \file
/// How long a launch will take, fused and unfused, from what it has to do and what the machine
/// does: so that Mode::kAuto can run the form that costs less. Small launches gain nothing from
/// overlap, and every step of the pipeline costs something.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/comm/types.h"

namespace mk::kernels {

/// What one rank has of the machine. 0: unknown; the part it is of then counts for nothing.
struct MachineRates {
  double flops_per_s = 0;          ///< of its compute blocks together
  double local_bytes_per_s = 0;    ///< read and written by its sums and copies
  double network_bytes_per_s = 0;  ///< sent to other nodes
  double command_ns = 0;           ///< that a command takes besides its bytes
  double step_ns = 0;              ///< that a step of the pipeline costs the fused form: waking who
                                   ///< waits for it, and taking its core from who computes
};

/// What one rank has to do in one launch.
struct LaunchWork {
  double flops = 0;
  double local_bytes = 0;    ///< read and written by sums and copies
  double network_bytes = 0;  ///< sent to other nodes
  std::uint32_t steps = 1;   ///< chunks, the steps in which computing and communicating overlap
  std::uint32_t commands = 0;
};

struct Estimate {
  std::uint64_t fused_ns = 0;
  std::uint64_t unfused_ns = 0;

  friend constexpr bool operator==(const Estimate&, const Estimate&) = default;
  /// What Mode::kAuto runs.
  constexpr Mode cheaper() const { return unfused_ns < fused_ns ? Mode::kUnfused : Mode::kFused; }
};

/// One after the other: the sum of the parts. Overlapped: the longest part hides the others but for
/// the first (or last) step of each, and the steps cost what they cost.
///     unfused = compute + local + network
///     fused   = longest + (unfused - longest) / steps + steps * step_ns
constexpr Estimate estimate(const LaunchWork& work, const MachineRates& rates) {
  const auto ns = [](double amount, double per_s) {
    return per_s > 0 ? amount / per_s * 1e9 : 0.0;
  };
  const double compute = ns(work.flops, rates.flops_per_s);
  const double local = ns(work.local_bytes, rates.local_bytes_per_s);
  const double network =
      ns(work.network_bytes, rates.network_bytes_per_s) + work.commands * rates.command_ns;
  const double sum = compute + local + network;
  const double longest = std::max({compute, local, network});
  const double steps = std::max(work.steps, 1u);
  const double fused = longest + (sum - longest) / steps + steps * rates.step_ns;
  // A sum beyond this (584 years) says nothing anyway, and would not fit the type.
  constexpr double kMost = 1.8e19;
  return {static_cast<std::uint64_t>(std::min(fused, kMost)),
          static_cast<std::uint64_t>(std::min(sum, kMost))};
}

}  // namespace mk::kernels
