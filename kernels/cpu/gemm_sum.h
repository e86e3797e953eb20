/// \file
/// What the CPU forms of GEMM+AllReduce and GEMM+ReduceScatter have in common: both sum
/// products over ranks, and differ in what becomes of the sums. `op` names the operator in
/// messages.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/comm/sum_geometry.h"
#include "kernels/comm/sum_job.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/world.h"
#include "kernels/cpu/adaptive_roles.h"
#include "kernels/cpu/finish_row.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/cpu/pacer.h"
#include "kernels/cpu/row_math.h"
#include "kernels/cpu/sum_rows.h"
#include "kernels/cpu/tile_gemm.h"

namespace mk::kernels {

/// The caller's matrices of one launch.
struct GemmMatrices {
  const std::uint16_t* a = nullptr;
  std::uint64_t lda = 0;
  const std::uint16_t* b = nullptr;
  std::uint64_t ldb = 0;
  std::uint16_t* c = nullptr;  ///< all rows, or those that are this rank's
  std::uint64_t ldc = 0;
  const std::uint16_t* bias = nullptr;

  std::uint16_t* c_at(const TileRect& rect) const { return c + rect.row * ldc + rect.column; }
};

/// What both operators' roles ask of an executor, for one block on one thread. Stores and loads are
/// this thread's own plain ones, so flags order them without further ado.
class GemmSumExecutor : public CpuPacer {
 public:
  /// `nonfinite` is null, or counts elements of what is added that are not finite. `adaptive`:
  /// whose tasks the thread does; or null.
  GemmSumExecutor(TileGemm& tiles, const RowMath& math, const SumGeometry& geometry,
                  const GemmMatrices& matrices, std::uint32_t compute_block,
                  std::atomic<std::uint64_t>* nonfinite, AdaptiveRoles* adaptive)
      : matrices_(matrices),
        tiles_(tiles),
        math_(math),
        geometry_(geometry),
        block_(compute_block),
        nonfinite_(nonfinite),
        adaptive_(adaptive) {}

  /// One rank alone computes the result.
  bool multiply(const TileRect& rect, void* target, std::uint64_t target_stride) {
    const bool alone = geometry_.nodes * geometry_.locals == 1;
    const TileOutput output{target, target_stride, alone ? Partials::kElement : geometry_.partials,
                            alone ? geometry_.epilogue.activation : Activation::kNone,
                            alone ? matrices_.bias : nullptr};
    return tiles_.multiply(block_, {rect.rows, rect.columns},
                           matrices_.a + rect.row * matrices_.lda, matrices_.lda, matrices_.b,
                           rect.column, output);
  }
  void sum(const SumJob& job) {
    if (nonfinite_ == nullptr) return sum_rows(math_, job);
    NonfiniteCounter counter(geometry_.dtype);
    sum_rows(math_, job, &counter);
    nonfinite_->fetch_add(counter.count(), std::memory_order_relaxed);
  }
  void accumulate(const AccumulateJob& job) {
    if (nonfinite_ == nullptr) return accumulate_rows(math_, job);
    NonfiniteCounter counter(geometry_.dtype);
    accumulate_rows(math_, job, &counter);
    nonfinite_->fetch_add(counter.count(), std::memory_order_relaxed);
  }
  void stores_done() {}
  void loads_begin() {}
  /// Tiles are counted where each is a block of its own.
  bool counts_done(Role role) const { return adaptive_ != nullptr && role == Role::kCompute; }
  bool last_done(Role /*role*/, std::uint32_t count) { return adaptive_->last_tile(count); }

 protected:
  const GemmMatrices& matrices_;

 private:
  TileGemm& tiles_;
  const RowMath& math_;
  const SumGeometry& geometry_;
  std::uint32_t block_;
  std::atomic<std::uint64_t>* nonfinite_;
  AdaptiveRoles* adaptive_;
};

/// Whether all local ranks' partials of those tiles are seen to be here; `ready(source, tile)`: the
/// offset of a partial's flag. A look orders nothing: the sum awaits them, too.
template <class Ready>
bool partials_seen(const Launch& launch, const TileRange& tiles, Ready&& ready) {
  const std::byte* own = launch.context.workspaces[launch.context.world.local];
  for (std::uint32_t tile = tiles.begin; tile < tiles.end; ++tile) {
    for (std::uint32_t source = 0; source < launch.context.world.locals; ++source) {
      const auto* flag = reinterpret_cast<const std::uint32_t*>(own + ready(source, tile));
      if (!shm::epoch_reached(shm::load_relaxed(flag), launch.epoch)) return false;
    }
  }
  return true;
}

/// A thread per block of the roles that the world needs. `after_compute`: what compute blocks do
/// after their tiles.
std::vector<RoleThread> gemm_sum_threads(const RoleBlocks& blocks, const World& world,
                                         std::optional<Role> after_compute);

/// Shape of one launch: m rows, of an operator with that geometry; k is this rank's own.
Status check_gemm_launch(std::string_view op, const GemmMatrices& matrices, std::uint32_t m,
                         const SumGeometry& geometry, std::uint32_t k, BLayout b_layout);

}  // namespace mk::kernels
