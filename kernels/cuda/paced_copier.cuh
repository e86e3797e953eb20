/// \file
/// Copies beside a product: the executor of the gather's roles (gather/roles.h) for one lane of a
/// compute block's spare warp. The copy engine brings small pieces through what the core leaves of
/// the block's shared memory, at a **pace**: all spare warps of a GPU together write less than
/// NVLink takes. Where it is full, stores stand in their SM's way out, and the tile's loads behind
/// them: tiles then take up to a third longer, and else 1 to 3% (ag_gemm/EXPERIMENTS.md).
#pragma once

#include <cstdint>

#include "kernels/cuda/executor_common.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/gather/copy_job.h"

namespace mk::kernels::cuda {

/// Shared memory of one, in a compute block.
struct PacedCopierShared {
  /// As much as there is: to one target it is what a warp has on its way at a time.
  static constexpr std::uint32_t kPieceBytes = 1280;
  alignas(16) unsigned char piece[kPieceBytes];
  std::uint64_t loaded;
};

class PacedCopier : public RoleExecutor {
 public:
  /// One lane constructs and uses it. `ns_per_kib`: see FrameArguments::spare_ns_per_kib.
  __device__ PacedCopier(DeviceState& state, PacedCopierShared& shared, std::uint32_t ns_per_kib)
      : RoleExecutor(state), shared_(shared), ns_per_kib_(ns_per_kib), due_ns_(clock_ns()) {
    ptx::mbarrier_init(&shared_.loaded, 1);
    ptx::mbarrier_init_fence();
  }

  /// Each piece is read once and written to every target; all sizes and addresses are multiples of
  /// 16 bytes.
  __device__ void copy(const CopyJob& job) {
    const std::byte* source = job.source;
    std::uint64_t target = 0;
#pragma unroll 1
    for (std::uint32_t row = 0; row < job.rows; ++row) {
#pragma unroll 1
      for (std::uint32_t at = 0; at < job.row_bytes; at += PacedCopierShared::kPieceBytes) {
        const std::uint32_t left = job.row_bytes - at;
        const bool whole = left >= PacedCopierShared::kPieceBytes;
        copy_piece(job, source + at, target + at, whole ? PacedCopierShared::kPieceBytes : left);
      }
      source += job.source_stride;
      target += job.target_stride;
    }
  }
  __device__ void stores_done() { ptx::bulk_wait<0>(); }
  __device__ void loads_begin() { ptx::fence_acquired_to_async(); }

 private:
  /// Whoever was held up (by a wait, by full links) does not make up for more than this: it would
  /// do so together with all others.
  static constexpr std::uint32_t kBehindNs = 20'000;

  /// More than a piece's time: what seems more ahead is behind.
  static constexpr std::uint32_t kAheadNsMost = 1'000'000'000;

  /// Turns over every four seconds. (64 bits are a register more.)
  static __device__ std::uint32_t clock_ns() { return static_cast<std::uint32_t>(ptx::now_ns()); }

  __device__ void copy_piece(const CopyJob& job, const std::byte* source, std::uint64_t target,
                             std::uint32_t bytes) {
    await_turn(bytes * job.target_count);
    // The piece before this one has left.
    ptx::bulk_wait_read<0>();
    ptx::mbarrier_arrive_expect(&shared_.loaded, bytes);
    ptx::bulk_load(shared_.piece, source, bytes, &shared_.loaded);
    ptx::mbarrier_wait(&shared_.loaded, parity_);
    parity_ ^= 1;
#pragma unroll 1
    for (std::uint32_t t = 0; t < job.target_count; ++t)
      ptx::bulk_store(job.targets[t] + target, shared_.piece, bytes);
    ptx::bulk_commit();
  }
  __device__ void await_turn(std::uint32_t bytes) {
    std::uint32_t ahead_ns = due_ns_ - clock_ns();
    for (; ahead_ns - 1 < kAheadNsMost; ahead_ns = due_ns_ - clock_ns()) __nanosleep(200);
    if (0 - ahead_ns > kBehindNs) due_ns_ -= ahead_ns + kBehindNs;
    due_ns_ += bytes * ns_per_kib_ / 1024;
  }

  PacedCopierShared& shared_;
  const std::uint32_t ns_per_kib_;
  std::uint32_t parity_ = 0;
  std::uint32_t due_ns_;
};

}  // namespace mk::kernels::cuda
