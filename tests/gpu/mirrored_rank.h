/// \file
/// Rank 0 of a job of several ranks, on a GPU of its own; the other ranks of its node, and those of
/// another node, are a mirror of it on a second one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/mirror.h"
#include "tests/gpu/mirrored_dma.h"
#include "tests/gpu/rank_operator.h"
#include "tests/gpu/reflections.h"
#include "tests/gpu/summed_reference.h"

namespace mk::test {

/// The rank on device 0, the mirror on device 1. bf16, B as [N,K], no gaps; m rows that fall evenly
/// on ranks and tiles. Ends the process on anything unexpected but a failed launch.
///
/// What the others bring: of AG+GEMM their rows of A; of the other two their partials, which are
/// products of a small k (over two nodes also the other node's sums, which are one such product),
/// of GEMM+AR besides their tiles of the result, which are random.
class MirroredRank {
 public:
  /// `setup`: of all ranks; k[0] is the rank's. The operator's launches are all of setup.m rows.
  /// `daemons`: of all ranks, but for rank 0 on device 1; null: of one node.
  MirroredRank(const JobSetup& setup, DaemonNodes* daemons, std::uint64_t seed);
  ~MirroredRank();
  MirroredRank(const MirroredRank&) = delete;
  MirroredRank& operator=(const MirroredRank&) = delete;

  RankOperator& op() { return *op_; }
  cudaStream_t stream() const { return stream_; }
  Mirror& mirror() { return *mirror_; }
  const void* a() const { return a_->data(); }
  const void* b() const { return b_->data(); }

  /// Queues a launch and its mirror. `in_place` (AG+GEMM): of the rows at input().
  void launch(bool in_place = false);
  /// NaN into C.
  void poison();
  /// Every element of the last launch's result.
  Verdict judge();

 private:
  std::uint32_t locals() const { return setup_.locals; }
  std::uint64_t shard_rows() const { return setup_.m / setup_.world(); }
  std::byte* allocate_there(std::uint64_t bytes);
  std::byte* filled_there(std::uint64_t elements);
  /// A product of the shape of rank 0's, of rank `p`, packed to `packed`.
  void make_partial(std::uint32_t p, const OwnTiles& tiles, std::byte* packed);
  kernels::RankContext make_context();
  kernels::RankContext make_context(DaemonNodes& daemons);
  RowsOrder rows_order() const;
  UnderWay under_way() const;
  void fill_rows();
  void fill_partials();
  Verdict judge_owned_tiles(const SummedProduct& product);

  JobSetup setup_;
  Plan plan_;
  std::uint64_t seed_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t there_ = nullptr;  ///< of the mirror's device, for preparations
  std::uint32_t epoch_ = 0;
  std::unique_ptr<DeviceMemory> workspace_, a_, b_, c_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_there_;
  MirroredPlaces places_;
  std::vector<std::byte*> peer_a_, peer_b_;  ///< by rank; of a sum
  std::unique_ptr<RankOperator> op_;
  std::unique_ptr<Mirror> mirror_;
  std::unique_ptr<MirroredDma> dma_;  ///< AG+GEMM whose rows come so
};

}  // namespace mk::test
