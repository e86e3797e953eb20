/// \file
/// The numbers that all ranks agree on about one gather, for the operator's lifetime. They say how
/// many rows of what size there are, in what chunks, and where they lie in the operator's
/// workspace. plan.h makes them. The arithmetic over them is schedule.h. Compiles for host and
/// device.
#pragma once

#include <cstdint>

namespace mk::kernels {

/// How rows reach the ranks of a node.
enum class GatherKind : std::uint8_t {
  kBroadcast = 0,  ///< every rank gets a copy of every row
  kPull = 1,       ///< rows stay with the rank of their rail; the node's ranks read them there
};

/// The first bytes of every slot: what its origin says of its rows. Network chunk 0.
struct alignas(64) GatherHeader {
  std::uint32_t epoch = 0;
  std::uint32_t m = 0;     ///< with which the origin launched
  std::uint32_t rows = 0;  ///< how many follow
};
inline constexpr std::uint64_t kGatherHeaderBytes = sizeof(GatherHeader);

/// Chunks end at multiples of it.
inline constexpr std::uint32_t kGatherLine = 64;
/// Chunks of one rank, at most, where its flags are no more than kOperatorFlagsMax. Each has a
/// ready word on every rank, and a flag per bank and node.
inline constexpr std::uint32_t kGatherChunksMax = 4096;
/// Rows of one rank, in bytes, at most: so that their lines are numbers that a Divisor takes.
inline constexpr std::uint64_t kGatherShardBytesMax = 1ull << 36;

/// Byte offsets in every rank's workspace, the same on all ranks. A world of one rank has nothing.
struct GatherLayout {
  std::uint64_t ready = 0;       ///< uint32[origin rank][chunks_max]
  std::uint64_t drained = 0;     ///< a line of 64 bytes per local rank; kPull over several nodes
  std::uint64_t sent = 0;        ///< the same, of either kind (gather::send_first)
  std::uint64_t slots = 0;       ///< [banks][slots of a bank][slot_bytes]
  std::uint64_t slot_bytes = 0;  ///< a GatherHeader, then rows_max rows, packed; rows begin at a
                                 ///< multiple of 128 bytes, what NVLink and L2 move at a time
};

struct GatherGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  GatherKind kind = GatherKind::kBroadcast;
  std::uint32_t rows_max = 0;  ///< of one rank
  std::uint32_t row_bytes = 0;
  std::uint32_t chunk_bytes = 0;  ///< a multiple of kGatherLine; rows may straddle chunks
  std::uint32_t chunks_max = 0;   ///< of one rank, the header's included
  std::uint32_t turn_chunks = 0;  ///< ChunkOrder
  std::uint32_t banks = 2;        ///< the operator's (Launch::banks)
  /// Banks of the slots that the ranks of a node fill for each other: `banks`; or 1: always the
  /// first bank's, so that every launch has them at one place. Those of other nodes have `banks`.
  std::uint32_t local_banks = 2;
  std::uint32_t first_flag = 0;  ///< of this gather, within the operator's arrival flags
  GatherLayout layout;
};

}  // namespace mk::kernels
