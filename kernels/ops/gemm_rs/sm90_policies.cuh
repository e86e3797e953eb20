/// \file
/// The policies of gemm_rs/protocol.h for the GEMM core.
#pragma once

#include "kernels/cuda/skeleton/block_gate.cuh"
#include "kernels/cuda/transport/packed_store.cuh"
#include "kernels/ops/gemm_rs/protocol.h"
#include "kernels/ops/gemm_rs/sm90_arguments.h"

namespace mk::kernels::cuda {

/// That barrier; and where a compute block ends with its tiles, it counts its groups as done when
/// the last inputs are here.
class GemmRsGate
    : public BlockGate<GemmRsInputBarrier<GemmRsBlock<GateExecutor>>, GemmRsLaunch, GemmRsBlock> {
 public:
  using Base = BlockGate<GemmRsInputBarrier<GemmRsBlock<GateExecutor>>, GemmRsLaunch, GemmRsBlock>;
  struct Params : Base::Params {
    WaitsDone waits_done;
  };

  __device__ GemmRsGate(const Params& params, Base::Shared& shared)
      : Base(params, shared), waits_done_(params.waits_done) {}
  __device__ void end() const { waits_done_.note(); }

 private:
  const WaitsDone& waits_done_;
};

/// Which tensor map stands for a place.
struct GemmRsMapped : GemmRsPlaces {
  using Params = PlaceParams<GemmRsSchedule, GemmRsPlaceMaps>;

  static __device__ MappedPlace map(const Params& params, const TilePlace& place,
                                    std::uint32_t epoch) {
    const int grid = place.small_grid ? 1 : 0;
    const auto packed = [&](const CUtensorMap& map) -> MappedPlace {
      return {&map, static_cast<int>(place.plane), static_cast<int>(place.tile), 0, 0};
    };
    switch (place.region) {
      case Region::kSlots:
        return packed(params.maps.slots[place.local][grid]);
      case Region::kStaging:
        return packed(params.maps.staging[bank_of(epoch, params.banks)][grid]);
      case Region::kKept:
        return packed(params.maps.kept[grid]);
      default:
        break;
    }
    const std::uint32_t shard_rows = params.schedule.grid(params.world.rank()).rows();
    if (!params.accumulates || place.rect.row + place.rows >= shard_rows)
      return MappedPlace::of_matrix(&params.maps.out, params.schedule.result(place.rect));
    // Rows below the tile's are not right: the map of C by rows of tiles keeps them out.
    return {&params.maps.out_rows, 0, static_cast<int>(place.rect.row / place.rows), 0,
            static_cast<int>(place.rect.column)};
  }
};

}  // namespace mk::kernels::cuda
