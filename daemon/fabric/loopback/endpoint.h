/// \file
/// The loopback fabric: nodes of one host, whose daemons share a process or not. Ordered contract.
/// See README.md.
#pragma once

#include <functional>
#include <memory>

#include "daemon/fabric/fabric.h"

namespace mk::fabric {

/// For tests.
struct LoopbackOptions {
  /// The link model's clock in ns, monotone; called by the proxy thread. Null: CLOCK_MONOTONIC.
  std::function<std::uint64_t()> now_ns;
  std::uint32_t link_depth = 256;
  /// Whether regions of this process are written directly. Off: mapped like those of another
  /// process.
  bool share_process_memory = true;
  /// Where the GPUs' driver comes from; asked when memory of a GPU is first registered.
  std::function<Result<std::shared_ptr<gpu::Driver>>()> load_gpu_driver = gpu::load_driver;
};

Result<std::unique_ptr<Endpoint>> make_loopback_endpoint(const EndpointConfig& config,
                                                         LoopbackOptions options = {});

}  // namespace mk::fabric
