/// \file
/// Copies beside a product: the executor of the gather's roles (gather/roles.h) for one lane of a
/// compute block's spare warp. The copy engine brings small pieces through what the core leaves of
/// the block's shared memory, at a **pace**: all spare warps of a GPU together write less than
/// NVLink takes. Where it is full, stores stand in their SM's way out, and the tile's loads behind
/// them: tiles then take up to a third longer, and else 1 to 3% (ag_gemm/EXPERIMENTS.md).
#pragma once

#include <cstdint>

#include "kernels/cuda/executor_common.cuh"
#include "kernels/cuda/pace.cuh"
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
      : RoleExecutor(state), shared_(shared), ns_per_kib_(ns_per_kib) {
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
  static constexpr std::uint32_t kBehindNs = 20'000;

  __device__ void copy_piece(const CopyJob& job, const std::byte* source, std::uint64_t target,
                             std::uint32_t bytes) {
    pace_.take(bytes * job.target_count * ns_per_kib_ / 1024);
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

  PacedCopierShared& shared_;
  const std::uint32_t ns_per_kib_;
  std::uint32_t parity_ = 0;
  Pace pace_{kBehindNs};
};

}  // namespace mk::kernels::cuda
