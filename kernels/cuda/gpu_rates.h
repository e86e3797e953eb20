/// \file
/// What a rank's share of a Hopper GPU does, where nobody says better: what Mode::kAuto's estimate
/// (comm/estimate.h) goes by.
#pragma once

#include <cstdint>

#include "kernels/comm/estimate.h"

namespace mk::kernels::cuda {

/// `given`, with every 0 replaced. Measured on H200s (tests/bench/results): the product's rate of a
/// compute block; what one GPU's stores reach over NVLink beside a product, which is what local
/// bytes wait for; a rail of 400 Gb/s; a command's way through the daemon, many being under way at
/// a time; and what a chunk's flags cost those who look for them, beside whom others work on.
constexpr MachineRates gpu_rates(const MachineRates& given, std::uint32_t compute_blocks) {
  constexpr double kBlockFlops = 5.2e12;
  constexpr double kLocalBytes = 300e9;
  constexpr double kNetworkBytes = 50e9;
  constexpr double kCommandNs = 500;
  constexpr double kStepNs = 20;
  const auto choose = [](double rate, double otherwise) { return rate > 0 ? rate : otherwise; };
  MachineRates rates;
  rates.flops_per_s = choose(given.flops_per_s, kBlockFlops * compute_blocks);
  rates.local_bytes_per_s = choose(given.local_bytes_per_s, kLocalBytes);
  rates.network_bytes_per_s = choose(given.network_bytes_per_s, kNetworkBytes);
  rates.command_ns = choose(given.command_ns, kCommandNs);
  rates.step_ns = choose(given.step_ns, kStepNs);
  return rates;
}

/// What one GPU writes to the node's others per second, at most, without filling NVLink, which
/// takes 371 GB/s.
inline constexpr double kNvlinkBytesPerS = 360e9;

/// Whether the product takes longer than a link of `bytes_per_s`, of an operator that sums: for
/// each element of C a rank computes 2 k operations and sends `sent_bytes`. By the rates of
/// gpu_rates().
constexpr bool product_outlasts(std::uint32_t k, double sent_bytes, double bytes_per_s,
                                const MachineRates& rates) {
  return 2.0 * k * bytes_per_s > sent_bytes * rates.flops_per_s;
}
/// The same of the network.
constexpr bool product_outlasts_network(std::uint32_t k, double sent_bytes,
                                        const MachineRates& rates) {
  return product_outlasts(k, sent_bytes, rates.network_bytes_per_s, rates);
}

}  // namespace mk::kernels::cuda
