/// \file
/// The ranks of a job in one process, as far as they do not depend on the operator: devices,
/// streams, workspaces, the proxy between nodes, and how operators are created and end.
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

/// Where a job's ranks are, whatever its operator: rank r is on device r % devices.
struct PlacedSetup {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  int devices = 1;
  kernels::CudaOptions options;
  const std::uint32_t* abort = nullptr;  ///< every rank's session abort word
  JoinNodes join;  ///< null: ranks know each other's memory, and a HostProxy joins several nodes

  std::uint32_t world() const { return nodes * locals; }
  /// Devices that have ranks.
  std::uint32_t used() const { return std::min(static_cast<std::uint32_t>(devices), world()); }
  /// CudaOptions::ranks_per_device. Ranks of several nodes leave some SMs to the copies between
  /// them, if they share a GPU.
  std::uint32_t shares() const {
    const std::uint32_t per_device = (world() + used() - 1) / used();
    return per_device > 1 && nodes > 1 ? per_device + 1 : per_device;
  }
};

/// On the current device; an empty tensor has an address, too.
inline std::unique_ptr<DeviceMemory> device_memory(std::size_t bytes) {
  return std::make_unique<DeviceMemory>(std::max<std::size_t>(bytes, 16));
}

template <class Operator>
struct PlacedRank {
  int device = 0;
  cudaStream_t stream = nullptr;
  std::unique_ptr<DeviceMemory> workspace;
  std::unique_ptr<Operator> op;
};

/// The ranks, on one GPU, each with a stream and a share of the SMs, or spread over GPUs with peer
/// access. A `Rank` is a PlacedRank. Ends the process on anything unexpected but a failed launch.
template <class Rank>
class PlacedRanks {
 public:
  PlacedRanks(const PlacedRanks&) = delete;
  PlacedRanks& operator=(const PlacedRanks&) = delete;

  std::uint32_t world() const { return static_cast<std::uint32_t>(ranks_.size()); }
  auto& op(std::uint32_t rank) { return *ranks_[rank].op; }
  cudaStream_t stream(std::uint32_t rank) const { return ranks_[rank].stream; }
  int device(std::uint32_t rank) const { return ranks_[rank].device; }
  void make_current(std::uint32_t rank) const {
    require(cudaSetDevice(ranks_[rank].device), "cudaSetDevice");
  }
  HostProxy* proxy() { return proxy_.get(); }
  /// The last launch's error, or none; waits.
  Status finish(std::uint32_t rank) {
    auto finished = op(rank).finish(stream(rank));
    if (!finished) return propagate(finished);
    return {};
  }

 protected:
  explicit PlacedRanks(std::uint32_t world) : ranks_(world) {}
  /// All streams end first, then the proxy, which their launches may wait for, then the operators.
  ~PlacedRanks() {
    for (std::uint32_t r = 0; r < world(); ++r) {
      make_current(r);
      cudaStreamSynchronize(stream(r));
    }
    proxy_.reset();
    for (Rank& rank : ranks_) {
      require(cudaSetDevice(rank.device), "cudaSetDevice");
      cudaStreamDestroy(rank.stream);
      rank.op.reset();
    }
    cudaSetDevice(0);
  }

  /// Gives each rank its device, a stream and a zeroed workspace; `more(rank, r)` has its device as
  /// the current one. `create(r, context, options)` then makes the operator and launches what its
  /// caller will: CUDA loads a kernel at its first launch, and may wait for the device to be idle
  /// to do so.
  template <class More, class Create>
  void place(const PlacedSetup& setup, std::uint64_t workspace_bytes, std::uint32_t flag_count,
             More&& more, Create&& create) {
    const auto used = static_cast<int>(setup.used());
    for (int from = 0; from < used; ++from) {
      for (int to = 0; to < used; ++to) {
        if (from != to) allow_access(from, to);
      }
    }
    std::vector<int> devices;
    std::vector<std::byte*> workspaces;
    for (std::uint32_t r = 0; r < world(); ++r) {
      Rank& rank = ranks_[r];
      rank.device = static_cast<int>(r) % used;
      make_current(r);
      require(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "stream");
      more(rank, r);
      devices.push_back(rank.device);
      if (setup.join) continue;
      rank.workspace = device_memory(workspace_bytes);
      require(cudaMemset(rank.workspace->data(), 0, workspace_bytes), "workspace");
      require(cudaDeviceSynchronize(), "workspace");
      workspaces.push_back(static_cast<std::byte*>(rank.workspace->data()));
    }
    std::vector<kernels::RankContext> contexts;
    if (setup.join) {
      contexts = setup.join(workspace_bytes, flag_count);
    } else if (setup.nodes > 1) {
      proxy_ =
          std::make_unique<HostProxy>(setup.nodes, setup.locals, flag_count, devices, workspaces);
    }
    kernels::CudaOptions options = setup.options;
    options.ranks_per_device = setup.shares();
    for (std::uint32_t r = 0; r < world(); ++r) {
      make_current(r);
      create(r,
             setup.join ? contexts[r]
                        : rank_context(setup.nodes, setup.locals, r, workspaces, setup.abort,
                                       proxy_.get()),
             std::as_const(options));
      require(cudaDeviceSynchronize(), "creation");
    }
    require(cudaSetDevice(0), "cudaSetDevice");
  }

  std::vector<Rank> ranks_;
  std::unique_ptr<HostProxy> proxy_;
};

}  // namespace mk::test
