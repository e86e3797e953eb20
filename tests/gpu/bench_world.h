/// \file
/// What is behind world_abi.h, for the operators that are benchmarked in it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/rank_context.h"
#include "shm/host/result.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/nccl.h"
#include "tests/gpu/stopwatch.h"
#include "tests/gpu/world_abi.h"

namespace mk::test {

class BenchWorld {
 public:
  explicit BenchWorld(const MkWorldSetup& setup);
  ~BenchWorld();
  BenchWorld(const BenchWorld&) = delete;
  BenchWorld& operator=(const BenchWorld&) = delete;

  std::uint32_t size() const { return nodes * locals; }
  /// What takes memory of the daemons at one time is of one job.
  void join();
  void leave();

  const std::uint32_t nodes, locals;
  std::unique_ptr<DaemonNodes> daemons;  ///< null: one node
  std::unique_ptr<Nccl> nccl;            ///< null: one rank
  std::vector<cudaStream_t> streams;
  std::unique_ptr<Stopwatch> stopwatch;

 private:
  int members_ = 0;
};

/// The workspaces of an operator's ranks.
class BenchMemory {
 public:
  BenchMemory(BenchWorld& world, std::uint64_t bytes, std::uint32_t flags);
  ~BenchMemory();
  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;

  std::vector<kernels::RankContext> contexts;

 private:
  BenchWorld& world_;
  std::vector<DeviceMemory> workspaces_;  ///< of one node
};

inline BenchWorld& world_of(void* world) { return *static_cast<BenchWorld*>(world); }
void current(std::uint32_t rank);
inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
/// True: it failed, and mk_world_error() says why.
bool failed(const Status& status);

}  // namespace mk::test
