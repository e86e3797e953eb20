/// \file
/// What fixtures of ranks on GPUs do with results and with memory of the device.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "shm/host/result.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

/// Ends the process with the error's message.
template <class T>
T or_exit(Result<T> result) {
  if (result) return std::move(*result);
  fmt::print(stderr, "{}\n", result.error().message);
  std::exit(1);
}

template <class T>
std::vector<T> from_device(const void* from, std::size_t count) {
  std::vector<T> host(count);
  if (count > 0)
    require(cudaMemcpy(host.data(), from, count * sizeof(T), cudaMemcpyDefault), "from device");
  return host;
}
template <class T>
void to_device(const DeviceMemory& to, const std::vector<T>& host) {
  if (!host.empty())
    require(cudaMemcpy(to.data(), host.data(), host.size() * sizeof(T), cudaMemcpyDefault),
            "to device");
}

}  // namespace mk::test
