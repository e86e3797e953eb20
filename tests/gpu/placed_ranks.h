/// \file
/// The ranks of a job in one process, as far as they do not depend on the operator: devices,
/// streams, workspaces, the proxy between nodes, and how operators are created. A `Rank` has a
/// `device`, a `stream`, a `workspace` and an operator `op`.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cuda/host/cuda_options.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/host_proxy.h"
#include "tests/gpu/transfers.h"

namespace mk::test {

/// Rank r is on device r % devices.
struct JobPlaces {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t devices = 1;
  std::uint64_t workspace_bytes = 0;
  std::uint32_t flag_count = 0;

  /// On so many of `devices`.
  std::uint32_t used() const { return std::min(devices, nodes * locals); }
  /// CudaOptions::ranks_per_device. Ranks of several nodes leave some SMs to the copies between
  /// them, if they share a GPU.
  std::uint32_t shares() const {
    const std::uint32_t per_device = (nodes * locals + used() - 1) / used();
    return per_device > 1 && nodes > 1 ? per_device + 1 : per_device;
  }
};

/// Gives each rank its device, a stream and a zeroed workspace; `more(rank, r)` has its device as
/// the current one. `create(r, context, options)` then makes the operators. `join`: of ranks whose
/// workspaces it brings.
template <class Rank, class More, class Create>
void place_ranks(std::vector<Rank>& ranks, std::unique_ptr<HostProxy>& proxy,
                 const JobPlaces& places, kernels::CudaOptions options, const std::uint32_t* abort,
                 More&& more, Create&& create, const JoinNodes& join = nullptr) {
  const auto used = static_cast<int>(places.used());
  for (int from = 0; from < used; ++from) {
    for (int to = 0; to < used; ++to) {
      if (from != to) allow_access(from, to);
    }
  }
  std::vector<int> devices;
  std::vector<std::byte*> workspaces;
  for (std::uint32_t r = 0; r < ranks.size(); ++r) {
    Rank& rank = ranks[r];
    rank.device = static_cast<int>(r) % used;
    require(cudaSetDevice(rank.device), "cudaSetDevice");
    require(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "stream");
    more(rank, r);
    devices.push_back(rank.device);
    if (join) continue;
    rank.workspace =
        std::make_unique<DeviceMemory>(std::max<std::size_t>(places.workspace_bytes, 16));
    require(cudaMemset(rank.workspace->data(), 0, places.workspace_bytes), "workspace");
    require(cudaDeviceSynchronize(), "workspace");
    workspaces.push_back(static_cast<std::byte*>(rank.workspace->data()));
  }
  std::vector<kernels::RankContext> contexts;
  if (join) {
    contexts = join(places.workspace_bytes, places.flag_count);
  } else if (places.nodes > 1) {
    proxy = std::make_unique<HostProxy>(places.nodes, places.locals, places.flag_count, devices,
                                        workspaces);
  }
  options.ranks_per_device = places.shares();
  for (std::uint32_t r = 0; r < ranks.size(); ++r) {
    require(cudaSetDevice(ranks[r].device), "cudaSetDevice");
    create(r,
           join ? contexts[r]
                : rank_context(places.nodes, places.locals, r, workspaces, abort, proxy.get()),
           std::as_const(options));
    require(cudaDeviceSynchronize(), "creation");
  }
  require(cudaSetDevice(0), "cudaSetDevice");
}

}  // namespace mk::test
