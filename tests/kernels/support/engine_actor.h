/// \file
/// Copy engines of a simulated rank, as an actor of its own: the steps of
/// kernels/gather/engine_steps.h.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/gather/block.h"
#include "kernels/gather/copy_job.h"
#include "kernels/gather/engine_steps.h"

namespace mk::kernels::testing {

/// A mistake of copy engines, which tests have to see.
enum class EngineFault {
  kNone,
  kBeginAtOnce,  ///< do not wait until nobody reads the bank
  kShowFirst,    ///< flags before the bytes
};

/// `Source`: of this rank's rows (GatherSource, or what else has its copy_packed).
template <class Executor, class Source>
class EngineActor {
 public:
  EngineActor(Executor& executor, GatherBlock<Executor>& gather, const Source& source,
              EngineFault fault)
      : executor_(executor), gather_(gather), source_(source), fault_(fault) {}

  /// After `*starts` has become 1 (the executor's start_dma); false: the launch has failed.
  bool await_start(const std::uint32_t& starts, WaitTotals& waits) {
    return fault_ == EngineFault::kBeginAtOnce ||
           wait_until(executor_, gather_.block.control, WaitSite{.role = Role::kPull}, waits, 1,
                      [&](std::uint64_t*) { return starts != 0; });
  }

  Status copy(std::uint32_t turn, std::uint64_t begin, std::uint64_t end) {
    copies_.push_back({turn, begin, end});
    if (fault_ != EngineFault::kShowFirst) bring();
    return {};
  }
  Status show(std::uint32_t turn, ChunkRange chunks) {
    for (std::uint32_t chunk = chunks.begin; chunk < chunks.end; ++chunk)
      gather_.publish_ready_at(local(turn), chunk);
    bring();
    return {};
  }
  Status yield() { return {}; }
  void bring() {
    for (const auto& [turn, begin, end] : copies_) {
      CopyJob job;
      job.add_target(gather_.slot(local(turn), gather_.block.world.rank()) + kGatherHeaderBytes +
                     begin);
      source_.copy_packed(begin, end, job, [&](const CopyJob& part) { executor_.copy(part); });
    }
    copies_.clear();
  }

 private:
  struct Bytes {
    std::uint32_t turn;
    std::uint64_t begin, end;
  };
  std::uint32_t local(std::uint32_t turn) const {
    const World& world = gather_.block.world;
    return (world.local + world.locals - turn) % world.locals;
  }

  Executor& executor_;
  GatherBlock<Executor>& gather_;
  const Source& source_;
  EngineFault fault_;
  std::vector<Bytes> copies_;
};

}  // namespace mk::kernels::testing
