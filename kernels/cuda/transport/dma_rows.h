/// \file
/// How copy engines bring rows of a gather to another rank of the node: rows, then the flags of
/// their chunks. Host only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/rank_context.h"
#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/cuda/transport/dma_queue.h"
#include "kernels/gather/copy_job.h"
#include "kernels/gather/schedule.h"

namespace mk::kernels::cuda {

/// To one local rank, on a queue. The kernel has written the flags' value where it is copied from
/// (gather::start_dma, CopyLeader).
struct DmaRows {
  DmaQueue& queue;
  const GatherSchedule& gather;
  const DeviceState& state;
  std::byte* workspace;  ///< of the local rank

  /// Bytes [begin, end) of this rank's packed rows, as `source` has them
  /// (GatherSource::copy_packed).
  template <class Source>
  Status bring(const Source& source, std::uint64_t begin, std::uint64_t end) const {
    CopyJob job;
    job.add_target(workspace + gather.rows_at(0, gather.world().rank()) + begin);
    Status copied;
    source.copy_packed(begin, end, job, [&](const CopyJob& part) {
      if (copied) copied = queue.copy(part);
    });
    return copied;
  }
  /// The origin's chunks are there.
  Status show(std::uint32_t origin, ChunkRange chunks) const {
    return queue.copy(workspace + gather.ready(origin, chunks.begin),
                      &state.dma_flags[chunks.begin],
                      (chunks.end - chunks.begin) * sizeof(std::uint32_t));
  }
};

/// This rank's rows, as `source` has them, to all of the node's others: the engines of
/// gather/engine_steps.h.
template <class Source>
struct DmaSharing {
  DmaQueue& queue;
  const GatherSchedule& gather;
  const DeviceState& state;
  const RankContext& context;
  const Source& source;

  Status copy(std::uint32_t turn, std::uint64_t begin, std::uint64_t end) const {
    return to(turn).bring(source, begin, end);
  }
  Status show(std::uint32_t turn, ChunkRange chunks) const {
    return to(turn).show(gather.world().rank(), chunks);
  }
  /// The loopback's network copies with the same engine.
  Status yield() const { return queue.yield(); }

  DmaRows to(std::uint32_t turn) const {
    const World& world = gather.world();
    const std::uint32_t local = (world.local + world.locals - turn) % world.locals;
    return {queue, gather, state, context.workspaces[local]};
  }
};
template <class Source>
DmaSharing(DmaQueue&, const GatherSchedule&, const DeviceState&, const RankContext&, const Source&)
    -> DmaSharing<Source>;

}  // namespace mk::kernels::cuda
