/// \file
/// The end of a gather for callers who want the rows themselves: from the slots to their memory.
/// AllGather is this and roles.h; AllGather+GEMM offers it beside its product.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/gather/block.h"
#include "kernels/gather/copy_job.h"

namespace mk::kernels::gather {

/// Copies a chunk, not the header's, of the rows of `origin`, which are the rows `shard` of all, to
/// its place in `whole`: all ranks' rows in rank order, without gaps. `own`: this rank's rows. The
/// chunk is here.
template <class Executor>
MK_HOST_DEVICE inline void collect_chunk(GatherBlock<Executor>& gather, const GatherSource& own,
                                         std::byte* whole, std::uint32_t origin,
                                         const ShardRange& shard, std::uint32_t chunk) {
  const ByteRange range = gather.schedule.chunk_range(shard.count, chunk);
  const std::uint64_t begin = range.begin - kGatherHeaderBytes;
  CopyJob job;
  job.add_target(whole + gather.schedule.data_bytes(shard.first) + begin);
  if (origin == gather.block.world.rank()) {
    own.copy_packed(begin, begin + range.bytes, job,
                    [&](const CopyJob& part) { gather.block.executor.copy(part); });
    return;
  }
  job.source = gather.rows(origin) + begin;
  job.rows = 1;
  job.row_bytes = range.bytes;
  gather.block.executor.copy(job);
}

/// Sees that all ranks take part with the same m, also those without rows, and brings everybody's
/// rows to `whole`, if that is not null. One of `blocks` blocks: origins `index`, `index` +
/// `blocks`, ... in the order of their expected arrival. `shard_of(rank)`: the rank's rows of all.
template <class Executor, class ShardOf>
MK_HOST_DEVICE inline bool collect(GatherBlock<Executor>& gather, const GatherSource& own,
                                   std::byte* whole, std::uint32_t blocks, ShardOf&& shard_of) {
  auto& block = gather.block;
  for (std::uint32_t position = block.index; position < block.world.size(); position += blocks) {
    const std::uint32_t origin = gather.schedule.origin_at(position);
    if (!gather.await_header(origin)) return false;
    if (whole == nullptr) continue;
    const ShardRange shard = shard_of(origin);
    const std::uint32_t chunks = gather.schedule.chunks(shard.count);
    for (std::uint32_t chunk = 1; chunk < chunks; ++chunk) {
      if (!gather.await_chunk(origin, chunk)) return false;
      collect_chunk(gather, own, whole, origin, shard, chunk);
    }
  }
  block.publish_done(blocks);
  return true;
}

}  // namespace mk::kernels::gather
