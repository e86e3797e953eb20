/// \file
/// A stand-in for the daemon in one process: every rank's session segment in pinned host memory,
/// and a thread per rank that takes its commands, copies between the ranks' device memory, and then
/// shows the flags. What a GPU sees of it is what it sees of the daemon.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/comm/rank_context.h"
#include "shm/layout.h"
#include "shm/ring.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

/// Answers every rank's context, with a workspace of so many bytes and so many flags, which
/// outlives the job's operators.
using JoinNodes =
    std::function<std::vector<kernels::RankContext>(std::uint64_t bytes, std::uint32_t flags)>;

class HostProxy {
 public:
  static constexpr std::uint32_t kLanes = 2;

  /// `devices[rank]`; `workspaces[rank]`.
  HostProxy(std::uint32_t nodes, std::uint32_t locals, std::uint32_t flags,
            const std::vector<int>& devices, const std::vector<std::byte*>& workspaces);
  ~HostProxy();
  HostProxy(const HostProxy&) = delete;
  HostProxy& operator=(const HostProxy&) = delete;

  /// The rank's lanes, flags, peers.
  void fill_in(std::uint32_t rank, kernels::RankContext& context) const;
  /// Bytes of payload that the rank has sent.
  std::uint64_t payload(std::uint32_t rank) const { return ranks_[rank]->payload; }
  /// Who of them waited longest for a copy, and how long: a copy that CUDA keeps behind a launch
  /// that waits for it is not the kernels' fault.
  std::string slowest_copy() const;
  /// Whether ranks are held up at random between a copy and its flag.
  void dawdle(bool on) { dawdles_ = on; }

 private:
  struct Rank {
    void* host = nullptr;  ///< pinned: controls, slots, flags
    std::unique_ptr<DeviceMemory> lanes;
    shm::RingConsumer consumers[kLanes];
    std::vector<kernels::RailPeer> rail_peers;
    std::uint32_t* flags = nullptr;
    std::byte* workspace = nullptr;
    int device = 0;
    std::atomic<std::uint64_t> payload{0};
    std::atomic<std::int64_t> slowest_copy_us{0};
    std::thread thread;
  };
  void serve(std::uint32_t rank);

  std::uint32_t nodes_;
  std::uint32_t locals_;
  std::uint32_t flag_count_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::atomic<bool> dawdles_{false};
  std::atomic<bool> stop_{false};
};

/// A rank's place among `nodes` of `locals`, its node's `workspaces[rank]`, and what `proxy` gives
/// it (null: one node).
kernels::RankContext rank_context(std::uint32_t nodes, std::uint32_t locals, std::uint32_t rank,
                                  const std::vector<std::byte*>& workspaces,
                                  const std::uint32_t* abort, const HostProxy* proxy);

}  // namespace mk::test
