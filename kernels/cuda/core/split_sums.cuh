/// \file
/// A tile whose K is shared by the blocks of a cluster: few tiles then still fill the GPU. Each
/// block multiplies its share of K. Then the block of rank w sums the rows of math warpgroup w: the
/// others send it their fp32 sums, to where its stages were. It adds them in the order of K. So the
/// bits depend on the number of shares, and on nothing else.
///
/// A cluster has one tile at most: nothing is loaded into the stages after that.
#pragma once

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

#include "kernels/cuda/core/gemm_config.cuh"
#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// A block's share of a tile's K, in blocks of K.
struct KShare {
  int rank;
  int shares;
  int begin;
  int end;

  /// The calling block's, of so many.
  template <class Config>
  static __device__ __forceinline__ KShare of(int shares, int k_blocks) {
    if constexpr (!Config::kSplitsK) return {0, 1, 0, k_blocks};
    const int rank = shares == 1 ? 0 : static_cast<int>(cute::block_rank_in_cluster());
    return {rank, shares, rank * k_blocks / shares, (rank + 1) * k_blocks / shares};
  }
  /// Which block sums the rows of a math warpgroup.
  __device__ __forceinline__ int summing(int warpgroup) const { return warpgroup % shares; }
  __device__ __forceinline__ bool sums(int warpgroup) const { return summing(warpgroup) == rank; }
};

/// Bytes of a math warpgroup's sums.
template <class Config>
inline constexpr int kSumBytes = kWarpgroupRows* Config::kBlockN * 4;

/// Blocks that may share a tile's K: the others' sums come to where a block's stages were.
template <class Config>
inline constexpr int kRoomForSplits =
    1 + Config::kStages*(Config::kABytes + Config::kBBytes) / kSumBytes<Config>;

/// One thread, before the cluster's first barrier. `readers`: math warps with rows, in each block.
template <class Config>
__device__ __forceinline__ void prepare_split_sums(SplitBarriers& barriers, const KShare& share,
                                                   int readers) {
  ptx::mbarrier_init(&barriers.room, readers * share.shares);
  ptx::mbarrier_init(&barriers.come, 1);
  if (share.shares > 1)
    ptx::mbarrier_arrive_expect(&barriers.come, (share.shares - 1) * kSumBytes<Config>);
}

/// A math warpgroup's, when its sums of the block's share are complete. True: `acc` has the sums
/// over all of K; false: another block has.
template <class Config, class Shared>
__device__ __forceinline__ bool split_sums(Shared& shared, const KShare& share, int warpgroup,
                                           float (&acc)[Config::kAccumulators]) {
  if (share.shares == 1) return true;
  const int lane = threadIdx.x % 32;
  const int summing = share.summing(warpgroup);
  if (lane < share.shares) ptx::mbarrier_arrive_at(&shared.split.room, lane);
  // 16 bytes of each thread, one after the other.
  constexpr int kVectors = Config::kAccumulators / 4;
  const std::uint32_t own = ptx::shared_address(shared.a[0]) + threadIdx.x % 128 * 16;
  constexpr std::uint32_t kStep = 128 * 16;
  if (summing != share.rank) {
    // Sums of lower shares come first, in the order of K; the summing block's have no place.
    const int place = share.rank < summing ? share.rank : share.rank - 1;
    const std::uint32_t to = ptx::shared_address_at(own + place * kSumBytes<Config>, summing);
    const std::uint32_t come =
        ptx::shared_address_at(ptx::shared_address(&shared.split.come), summing);
    ptx::mbarrier_wait(&shared.split.room, 0);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      ptx::store_async(to + i * kStep, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3],
                       come);
    return false;
  }
  ptx::mbarrier_wait(&shared.split.come, 0);
  for (int place = 0; place < share.shares - 1; ++place) {
    const std::uint32_t from = own + place * kSumBytes<Config>;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 other = ptx::load_shared(from + i * kStep);
      acc[4 * i] += other.x;
      acc[4 * i + 1] += other.y;
      acc[4 * i + 2] += other.z;
      acc[4 * i + 3] += other.w;
    }
  }
  return true;
}

}  // namespace mk::kernels::cuda
