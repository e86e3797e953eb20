/// \file
/// The end of a gather for callers who want the rows themselves: from the slots to their memory.
/// AllGather is this and roles.h; AllGather+GEMM offers it beside its product.
#pragma once

#include <cstdint>

#include "kernels/comm/part.h"
#include "kernels/comm/shard.h"
#include "kernels/gather/block.h"
#include "kernels/gather/copy_job.h"

namespace mk::kernels::gather {

/// Copies a part of a chunk, not the header's, of the rows of `origin`, which are the rows `shard`
/// of all, to its place in `whole`: all ranks' rows in rank order, without gaps. `own`: this rank's
/// rows. The chunk is here.
template <class Executor>
MK_HOST_DEVICE inline void collect_part(GatherBlock<Executor>& gather, const GatherSource& own,
                                        std::byte* whole, std::uint32_t origin,
                                        const ShardRange& shard, std::uint32_t chunk, Part part) {
  const ByteRange range = part_of(gather.schedule.chunk_range(shard.count, chunk), part);
  if (range.bytes == 0) return;
  const std::uint64_t begin = range.begin - kGatherHeaderBytes;
  CopyJob job;
  job.add_target(whole + gather.schedule.data_bytes(shard.first) + begin);
  if (origin == gather.block.world.rank()) {
    own.copy_packed(begin, begin + range.bytes, job,
                    [&](const CopyJob& run) { gather.block.executor.copy(run); });
    return;
  }
  job.source = gather.rows(origin) + begin;
  job.rows = 1;
  job.row_bytes = range.bytes;
  gather.block.executor.copy(job);
}

/// Sees that all ranks take part with the same m, also those without rows, and brings everybody's
/// rows to `whole`, if that is not null. One of `blocks` blocks. They share all origins' chunks,
/// each of so many parts, in the order of expected arrival: with fewer ranks than blocks, none is
/// without work. `shard_of(rank)`: the rank's rows of all.
template <class Executor, class ShardOf>
MK_HOST_DEVICE inline bool collect(GatherBlock<Executor>& gather, const GatherSource& own,
                                   std::byte* whole, std::uint32_t blocks, std::uint32_t parts,
                                   ShardOf&& shard_of) {
  auto& block = gather.block;
  // How many parts, or headers where no rows are wanted, come before this block's next.
  std::uint32_t skip = block.index;
  for (std::uint32_t position = 0; position < block.world.size(); ++position) {
    const std::uint32_t origin = gather.schedule.origin_at(position);
    const ShardRange shard = shard_of(origin);
    const std::uint32_t chunks = gather.schedule.chunks(shard.count);
    const bool rows = whole != nullptr && chunks > 1;
    const std::uint32_t shares = rows ? (chunks - 1) * parts : 1;
    if (skip < shares) {
      if (!gather.await_header(origin)) return false;
      for (; rows && skip < shares; skip += blocks) {
        const std::uint32_t chunk = 1 + skip / parts;
        if (!gather.await_chunk(origin, chunk)) return false;
        collect_part(gather, own, whole, origin, shard, chunk, Part{skip % parts, parts});
      }
      if (!rows) skip += blocks;
    }
    skip -= shares;
  }
  block.publish_done(blocks);
  return true;
}

}  // namespace mk::kernels::gather
