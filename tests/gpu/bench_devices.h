/// \file
/// Options of the benchmarks over several devices besides BenchOptions: devices, their ranks, and
/// the daemons of several nodes.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "tests/gpu/bench_options.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/host_proxy.h"

namespace mk::test {

struct DeviceOptions : BenchOptions {
  int devices = 1;
};

/// All arguments, which come in pairs. `own(argument, value)` takes those that are the program's.
/// False: one is not known, or makes no sense.
template <class Own>
bool take_all(int argc, char** argv, DeviceOptions& options, Own&& own) {
  if (argc % 2 == 0) return false;
  for (int i = 1; i < argc; i += 2) {
    const std::string argument = argv[i];
    const std::string value = argv[i + 1];
    if (own(argument, value)) continue;
    if (argument == "--devices") {
      options.devices = std::atoi(value.c_str());
    } else if (options.take(argument, value) != BenchOptions::Taken::kYes) {
      return false;
    }
  }
  return true;
}

/// Settles the rest; false, having said why: it makes no sense.
inline bool settle_ranks(DeviceOptions& options) {
  if (options.devices < 1 || options.nodes < 1) {
    fmt::print(stderr, "{} devices, {} nodes: at least one of each\n", options.devices,
               options.nodes);
    return false;
  }
  if (!options.settle()) return false;
  if (options.ranks == 0) options.ranks = static_cast<std::uint32_t>(options.devices);
  options.devices = std::min(options.devices, static_cast<int>(options.ranks));
  if (options.ranks % options.nodes == 0) return true;
  fmt::print(stderr, "{} ranks do not divide evenly into {} nodes\n", options.ranks, options.nodes);
  return false;
}

/// Null for one node. Before this process asks CUDA anything: with the first question it
/// settles how many connections there are.
inline std::unique_ptr<DaemonNodes> daemons_of(const DeviceOptions& options) {
  if (options.nodes == 1) return nullptr;
  return std::make_unique<DaemonNodes>(
      options.nodes, options.locals(),
      dealt_out(options.ranks, static_cast<std::uint32_t>(options.devices)), options.mkerneld,
      options.link_bandwidth);
}

/// How ranks of a new job get their memory; null: they know each other's.
inline JoinNodes join_of(DaemonNodes* daemons) {
  if (daemons == nullptr) return nullptr;
  daemons->attach();
  return
      [daemons](std::uint64_t bytes, std::uint32_t flags) { return daemons->memory(bytes, flags); };
}

/// False, having said so: there are fewer.
inline bool has_devices(const DeviceOptions& options) {
  if (options.devices <= device_count()) return true;
  fmt::print(stderr, "{} devices are asked for, and {} are there\n", options.devices,
             device_count());
  return false;
}

}  // namespace mk::test
