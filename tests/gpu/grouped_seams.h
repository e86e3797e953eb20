/// \file
/// The policies of the grouped product that operators replace, at work in one launch. Rows arrive
/// while it runs. The tile list is made on the device in an order of its own, and rows are stored
/// where a table says.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/core/grouped_tiles.h"

namespace mk::test {

/// bf16, weights as [experts, n, k]. All device memory.
struct GroupedSeamProduct {
  int experts = 0, rows = 0, n = 0, k = 0;
  const std::uint32_t* to = nullptr;  ///< [rows]: the row of C that row r goes to
  const std::uint32_t* offsets = nullptr;
  kernels::cuda::GroupedTile* tiles = nullptr;  ///< room for the row tiles; made by the launch
  std::uint32_t* words = nullptr;               ///< kWords; [2] is zero unless a wait failed
  std::uint32_t* arrived = nullptr;             ///< [rows / kChunkRows, rounded up]: epoch
  std::uint32_t epoch = 0;
  std::uint64_t deadline_ns = 0;
  static constexpr int kChunkRows = 50;  ///< of A arrive together
  static constexpr int kWords = 3;
};

/// Of A [rows, k], which arrives during the launch (make_row_window_map of 128 and 64 rows), B
/// (make_expert_weights_map) and C [rows, n] in boxes of 1 x 64.
struct GroupedSeamMaps {
  CUtensorMap a, a_half, b, c;
};

/// Loads the kernels on the current device.
cudaError_t prepare_grouped_seams();
/// Makes the tile list, last expert first, and multiplies; on at most `blocks` blocks.
cudaError_t launch_grouped_seam_product(const GroupedSeamMaps& maps,
                                        const GroupedSeamProduct& product, int blocks,
                                        cudaStream_t stream);
/// Copies A chunk by chunk from `from`, in an order drawn from `seed`, and shows the epoch for each
/// chunk; leaves out chunk `skip` (-1: none).
cudaError_t launch_row_arrivals(const GroupedSeamProduct& product, const void* from, void* to,
                                int skip, std::uint32_t seed, cudaStream_t stream);

}  // namespace mk::test
