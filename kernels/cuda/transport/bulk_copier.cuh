/// \file
/// Copies by the copy engine through shared memory, one thread's work: each piece is read once and
/// written to every target.
#pragma once

#include <cstdint>

#include "kernels/cuda/core/ptx.cuh"
#include "kernels/gather/copy_job.h"

namespace mk::kernels::cuda {

/// Shared memory of a copier.
struct BulkCopierShared {
  static constexpr std::uint32_t kBuffers = 4;
  static constexpr std::uint32_t kBufferBytes = 16 * 1024;
  alignas(128) unsigned char buffers[kBuffers][kBufferBytes];
  std::uint64_t loaded[kBuffers];
  struct Piece {
    std::byte* targets[shm::kLocalRanksMax];
    std::uint32_t target_count;
    std::uint32_t bytes;
  } pieces[kBuffers];
};

/// Pieces go through four buffers: two are being filled while the last two are being emptied.
class BulkCopier {
 public:
  /// One thread constructs and uses it.
  __device__ explicit BulkCopier(BulkCopierShared& shared) : shared_(shared) {
    for (auto& barrier : shared.loaded) ptx::mbarrier_init(&barrier, 1);
    ptx::mbarrier_init_fence();
  }

  /// Begins the copy; all sizes and addresses are multiples of 16 bytes.
  __device__ void copy(const CopyJob& job) {
    const bool dense =
        job.rows == 1 || (job.source_stride == job.row_bytes && job.target_stride == job.row_bytes);
    const std::uint32_t runs = dense ? 1 : job.rows;
    const std::uint64_t run_bytes =
        dense ? std::uint64_t{job.rows} * job.row_bytes : std::uint64_t{job.row_bytes};
    for (std::uint32_t run = 0; run < runs; ++run) {
      const std::byte* source = job.source + run * job.source_stride;
      const std::uint64_t target = run * job.target_stride;
      for (std::uint64_t at = 0; at < run_bytes; at += BulkCopierShared::kBufferBytes) {
        const std::uint64_t left = run_bytes - at;
        const auto bytes = static_cast<std::uint32_t>(
            left < BulkCopierShared::kBufferBytes ? left : BulkCopierShared::kBufferBytes);
        const std::uint32_t buffer = next_buffer(bytes);
        ptx::bulk_load(shared_.buffers[buffer], source + at, bytes, &shared_.loaded[buffer]);
        put_into(job, target + at, bytes);
      }
    }
  }
  /// Whether `collect` is the quicker way: short rows that lie apart, and follow each other where
  /// they go.
  static __device__ bool collects(const CopyJob& job) {
    return job.rows > 1 && job.source_stride != job.row_bytes &&
           job.target_stride == job.row_bytes &&
           job.row_bytes <= BulkCopierShared::kBufferBytes / 2;
  }
  /// The same as `copy` for such a job: as many rows at a time as a buffer holds.
  __device__ void collect(const CopyJob& job) {
    const std::uint32_t most = BulkCopierShared::kBufferBytes / job.row_bytes;
    for (std::uint32_t row = 0; row < job.rows; row += most) {
      const std::uint32_t rows = job.rows - row < most ? job.rows - row : most;
      const std::uint32_t buffer = next_buffer(rows * job.row_bytes);
      const std::byte* source = job.source + row * job.source_stride;
      for (std::uint32_t i = 0; i < rows; ++i, source += job.source_stride) {
        ptx::bulk_load(shared_.buffers[buffer] + i * job.row_bytes, source, job.row_bytes,
                       &shared_.loaded[buffer]);
      }
      put_into(job, std::uint64_t{row} * job.row_bytes, rows * job.row_bytes);
    }
  }
  /// The same of `rows` packed rows that `load(to, barrier, row)` brings, always a buffer full:
  /// those from `row` on, and whatever follows the last one.
  template <class Load>
  __device__ void copy_full_buffers(const CopyJob& job, std::uint32_t rows, std::uint32_t row_bytes,
                                    Load&& load) {
    const std::uint32_t most = BulkCopierShared::kBufferBytes / row_bytes;
    for (std::uint32_t row = 0; row < rows; row += most) {
      const std::uint32_t buffer = next_buffer(BulkCopierShared::kBufferBytes);
      load(shared_.buffers[buffer], &shared_.loaded[buffer], row);
      const std::uint32_t stored = rows - row < most ? rows - row : most;
      put_into(job, std::uint64_t{row} * row_bytes, stored * row_bytes);
    }
  }
  /// Until all that was begun is where it belongs, and may be shown to others.
  __device__ void finish() {
    while (stores_ != loads_) store();
    ptx::bulk_wait<0>();
  }
  /// After the last copy: the shared memory may then be used for something else.
  __device__ void end() {
    finish();
    for (auto& barrier : shared_.loaded) ptx::mbarrier_invalidate(&barrier);
  }

 private:
  static constexpr std::uint32_t kAhead = 2;

  /// Whose loads of `bytes` in all may begin.
  __device__ std::uint32_t next_buffer(std::uint32_t bytes) {
    if (loads_ - stores_ == kAhead) store();
    // All groups but the last have been read: among them the one that used this buffer.
    ptx::bulk_wait_read<1>();
    const std::uint32_t buffer = loads_ % BulkCopierShared::kBuffers;
    ptx::mbarrier_arrive_expect(&shared_.loaded[buffer], bytes);
    ++loads_;
    return buffer;
  }
  /// Where what was loaded last goes: so many bytes into the job's targets.
  __device__ void put_into(const CopyJob& job, std::uint64_t at, std::uint32_t bytes) {
    auto& piece = shared_.pieces[(loads_ - 1) % BulkCopierShared::kBuffers];
    piece.target_count = job.target_count;
    piece.bytes = bytes;
    for (std::uint32_t t = 0; t < job.target_count; ++t) piece.targets[t] = job.targets[t] + at;
  }
  __device__ void store() {
    const std::uint32_t buffer = stores_ % BulkCopierShared::kBuffers;
    ptx::mbarrier_wait(&shared_.loaded[buffer], stores_ / BulkCopierShared::kBuffers % 2);
    const auto& piece = shared_.pieces[buffer];
    for (std::uint32_t t = 0; t < piece.target_count; ++t)
      ptx::bulk_store(piece.targets[t], shared_.buffers[buffer], piece.bytes);
    ptx::bulk_commit();
    ++stores_;
  }

  BulkCopierShared& shared_;
  std::uint32_t loads_ = 0;
  std::uint32_t stores_ = 0;
};

}  // namespace mk::kernels::cuda
