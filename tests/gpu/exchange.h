/// \file
/// What an unfused collective needs to send through the daemons: kernels of a thread or two that
/// write commands and await flags, queued on a stream between others.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/comm/rank_context.h"
#include "shm/limits.h"

namespace mk::test {

/// Bytes of the rank's workspace and where they go in its rail peer's.
struct Parcel {
  std::uint64_t source = 0;
  std::uint64_t target = 0;
  std::uint64_t bytes = 0;
  std::uint32_t first_flag = 0;  ///< of the peer's; one per chunk
  std::uint32_t chunk_bytes = 1 << 20;
};
constexpr std::uint32_t chunks_of(std::uint64_t bytes, std::uint32_t chunk_bytes = 1 << 20) {
  return static_cast<std::uint32_t>((bytes + chunk_bytes - 1) / chunk_bytes);
}

/// The chunks, no smaller than `least`, of `count` parcels with `total` bytes. They fit into a
/// command ring together. So their sender ends even when the daemon is held up, as it is while CUDA
/// loads a kernel, which may wait for an idle GPU.
constexpr std::uint32_t parcel_chunk_bytes(std::uint64_t total, std::uint32_t count,
                                           std::uint32_t least) {
  // Each parcel's last chunk may be a small one.
  const std::uint32_t chunks = shm::kRingSlotsDefault > count ? shm::kRingSlotsDefault - count : 1;
  std::uint32_t bytes = least;
  while (bytes < shm::kCommandPayloadBytesMax && chunks_of(total, bytes) > chunks) bytes *= 2;
  return bytes;
}

/// Puts commands for the parcel's chunks into the rank's first lane; ends without them after
/// seconds in which the daemon takes none.
void post(const kernels::RankContext& context, std::uint32_t node, const Parcel& parcel,
          std::uint32_t epoch, cudaStream_t stream);
/// Waits for `count` of the rank's flags, for seconds at most; `missed` (device memory) becomes 1
/// when they do not come.
void await_flags(const kernels::RankContext& context, std::uint32_t first, std::uint32_t count,
                 std::uint32_t epoch, std::uint32_t* missed, cudaStream_t stream);
/// Keeps the stream from going on until the host writes 1 to the word, for seconds at most.
void hold(const std::uint32_t* word, cudaStream_t stream);
/// sum = x + y, of `count` bf16 elements, a multiple of 8.
void add(const void* x, const void* y, void* sum, std::uint64_t count, cudaStream_t stream);

}  // namespace mk::test
