/// \file
/// The host side of the policy examples: a product whose A arrives in chunks while it runs, and
/// whose tiles leave one by one.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mk::test {

/// Whose wait failed; the first one in a launch. Device memory, all zero when nothing happened.
struct Incident {
  static constexpr std::uint32_t kWriting = 1;
  static constexpr std::uint32_t kTimeout = 9;  // ErrorCode::kTimeout
  std::uint32_t code = 0;
  std::int32_t row_block = -1;
  std::int32_t range = -1;
  std::uint32_t expected = 0;
  std::uint32_t seen = 0;
};

inline constexpr int kSeamBlockM = 128;
inline constexpr int kSeamBlockN = 256;

/// bf16, B as [N,K]. All sizes in elements; the product is m x n x k.
struct SeamProduct {
  CUtensorMap a;  ///< the buffer that A arrives in
  CUtensorMap b;
  CUtensorMap slots;
  int m = 0, n = 0, k = 0;
  bool pair = false;       ///< clusters of two blocks; B's box is then half as high
  bool staged = false;     ///< 3 stages and room for a whole tile of C, for slow ways out
  unsigned jitter_ns = 0;  ///< hold finished pieces back by up to this long
  int first_m = 0;         ///< row of tiles (with pairs: of pairs of tiles) to begin with
  int range_k_blocks = 1;  ///< columns of a chunk of A, in units of 64
  std::uint32_t epoch = 0;
  std::uint64_t deadline_ns = 0;
  std::uint32_t* chunk_flags = nullptr;  ///< [row blocks][ranges]
  std::uint32_t* tile_flags = nullptr;   ///< [row blocks][tile columns]
  Incident* incident = nullptr;
  int worker_blocks() const { return pair ? 2 : 1; }
  int b_box_rows() const { return kSeamBlockN / worker_blocks(); }
  /// Rows of what one worker makes at a time.
  int worker_rows() const { return (row_blocks() + worker_blocks() - 1) / worker_blocks(); }
  int row_blocks() const { return (m + kSeamBlockM - 1) / kSeamBlockM; }
  int tile_columns() const { return (n + kSeamBlockN - 1) / kSeamBlockN; }
  int ranges() const { return ((k + 63) / 64 + range_k_blocks - 1) / range_k_blocks; }
};

/// Loads the three kernels below on the current device. CUDA loads a kernel at its first launch,
/// and may wait for the device to be idle to do so: kernels that wait for each other must all be
/// loaded before the first of them runs.
cudaError_t prepare_seams();

/// Launches the product on at most `blocks` blocks.
cudaError_t launch_seam_product(const SeamProduct& product, int blocks, cudaStream_t stream);

/// Copies A chunk by chunk, in an order drawn from `seed` and with random pauses, and shows the
/// epoch in each chunk's flag; leaves out row block `skip` (-1: none).
cudaError_t launch_arrivals(const SeamProduct& product, const void* from, void* to, int skip,
                            std::uint32_t seed, cudaStream_t stream);

/// Waits for each tile's flag and unpacks its slot into row-major C; gives up on all at the
/// deadline.
cudaError_t launch_departures(const SeamProduct& product, const void* slots, void* c,
                              cudaStream_t stream);

}  // namespace mk::test
