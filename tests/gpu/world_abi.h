/// \file
/// All ranks of a job for benchmarks in Python, through ctypes: a GPU and a stream each, NCCL
/// among them, which knows no nodes, and the daemons' paced rails between two nodes. Addresses are
/// those of PyTorch's tensors. What goes wrong but a launch ends the process.
#pragma once

#include <cstdint>

extern "C" {
#pragma GCC visibility push(default)

struct MkWorldSetup {
  std::uint32_t nodes, locals;
  const char* link_bandwidth;  ///< of a rail and direction, "50GB/s"
};

/// To be made before anybody asks CUDA for anything. One of a process.
void* mk_world_create(const MkWorldSetup* setup);
void mk_world_destroy(void* world);
void* mk_world_stream(void* world, std::uint32_t rank);
/// Why the last launch, or creation of an operator, failed.
const char* mk_world_error();

/// Times what `queue` queues on the ranks' streams, begun together (Stopwatch): microseconds of
/// each rank. `held` 0: what it queues first may wait for the device to be idle.
void mk_world_time(void* world, void (*queue)(), int held, double* us);

struct MkWorldMove {
  std::uint32_t from, to;  ///< ranks
  const void* source;
  void* target;
  std::uint64_t bytes;
};
/// As one group of NCCL, on a stream of each rank; within a rank a copy. No bytes: nothing.
void mk_world_exchange(void* world, const MkWorldMove* moves, std::uint32_t count,
                       void* const* streams);
/// `count` all-gathers as one group: sources and targets of the first for each rank, then those of
/// the next; `bytes` of one rank.
void mk_world_all_gather(void* world, const void* const* sources, void* const* targets,
                         std::uint32_t count, std::uint64_t bytes, void* const* streams);

/// Of two nodes: `bytes` of each rank's memory that the daemons know.
void* mk_rails_create(void* world, std::uint64_t bytes, void** by_rank);
void mk_rails_destroy(void* rails);
/// Bytes of a rank's such memory, and their place in its rail peer's.
struct MkRailsParcel {
  std::uint64_t source, target, bytes;
};
/// Once before the sends of all ranks.
void mk_rails_begin(void* rails);
void mk_rails_send(void* rails, std::uint32_t rank, const MkRailsParcel* parcels,
                   std::uint32_t count, void* stream);
/// Keeps the stream until the rail peer's parcels, which have these sizes, have come.
void mk_rails_await(void* rails, std::uint32_t rank, const MkRailsParcel* parcels,
                    std::uint32_t count, void* stream);
/// Whether all that was awaited since the last such question came.
int mk_rails_right(void* rails);

#pragma GCC visibility pop
}  // extern "C"
