/// \file
/// GPU memory over a network: an endpoint of that network, and beside it, from the first GPU buffer
/// on, a second one that carries GPUs' data. It goes straight from GPU to GPU where its NIC reaches
/// both, else by way of host memory. See README.md.
#pragma once

#include <functional>
#include <memory>

#include "daemon/fabric/fabric.h"
#include "daemon/fabric/gpu_copier.h"

namespace mk::fabric {

struct StagedOptions {
  /// Another endpoint of the same network, of the unordered contract, for GPUs' data.
  std::function<Result<std::unique_ptr<Endpoint>>()> open_carrier;
  bool direct = true;  ///< false: always by way of host memory
  GpuCopier::LoadDriver load_gpu_driver = gpu::load_driver;
};

/// `plain` with `Capabilities::device_memory`. What is no GPU's memory goes to it as before, its
/// links' numbers are this endpoint's, and so are its address and the keys of host memory.
std::unique_ptr<Endpoint> make_staged_endpoint(std::unique_ptr<Endpoint> plain,
                                               StagedOptions options);

}  // namespace mk::fabric
