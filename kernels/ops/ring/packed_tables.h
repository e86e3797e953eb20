/// \file
/// What the kernel gets that makes a packed launch's tables (packed_tables.cuh). Plain data for
/// host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/divisor.h"
#include "kernels/ops/ring/packed_items.h"

namespace mk::kernels::cuda {

/// In memory of the host that the GPU can write: why lengths were refused. `failed` is written
/// last.
struct LengthsReport {
  enum : std::uint32_t { kNone = 0, kNotAscending = 1, kTooLong = 2, kNoRoom = 3 };
  std::uint32_t failed = kNone;
  std::uint32_t sequence = 0;
  std::uint32_t begin = 0;  ///< row
  std::uint32_t end = 0;    ///< row; kNoRoom: this rank's rows
  std::uint32_t most = 0;   ///< that these may be
};

/// Where the tables are, and what they are made of.
struct PackedTableArguments {
  const std::uint32_t* starts = nullptr;  ///< count + 1
  std::uint32_t count = 0;
  std::uint32_t rows_max = 0;  ///< of all sequences, over all ranks
  std::uint32_t room = 0;      ///< rows of this rank's tensors
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
  std::uint32_t tile_rows = 128;
  bool causal = false;
  Divisor parts;
  std::uint32_t* stop = nullptr;  ///< LocalWords::stop
  LengthsReport* report = nullptr;
  PackedTotals* totals = nullptr;
  std::uint32_t* rows = nullptr;        ///< [count]
  std::uint32_t* first_rows = nullptr;  ///< [rank][count]
  std::uint32_t* rank_rows = nullptr;   ///< [rank]
  PackedTile* tiles = nullptr;
};

}  // namespace mk::kernels::cuda
