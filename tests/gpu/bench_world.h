/// \file
/// What is behind world_abi.h, for the operators that are benchmarked in it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
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
  /// For a launch that does not end: the lines that tell of each operator's ranks.
  std::map<const void*, std::function<std::string()>> watched;

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

/// `ops`, the ranks' of an operator, into BenchWorld::watched.
template <class Op>
void watch(BenchWorld& world, const std::vector<std::unique_ptr<Op>>& ops) {
  world.watched[&ops] = [&ops] {
    std::string lines;
    for (const auto& op : ops) lines += op->progress() + "\n";
    return lines;
  };
}

inline BenchWorld& world_of(void* world) { return *static_cast<BenchWorld*>(world); }
void current(std::uint32_t rank);
inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
/// True: it failed, and mk_world_error() says why.
bool failed(const Status& status);

}  // namespace mk::test
