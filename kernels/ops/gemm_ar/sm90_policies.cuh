/// \file
/// The policies of gemm_ar/protocol.h for the GEMM core.
#pragma once

#include "kernels/cuda/skeleton/block_gate.cuh"
#include "kernels/cuda/transport/packed_store.cuh"
#include "kernels/ops/gemm_ar/protocol.h"
#include "kernels/ops/gemm_ar/sm90_arguments.h"

namespace mk::kernels::cuda {

using GemmArGate =
    BlockGate<GemmArInputBarrier<GemmArBlock<GateExecutor>>, GemmArLaunch, GemmArBlock>;

/// Which tensor map stands for a place.
struct GemmArMapped : GemmArPlaces {
  using Params = PlaceParams<GemmArSchedule, GemmArPlaceMaps>;

  static __device__ const CUtensorMap* other_out(const Params& params) {
    return &params.maps.out[1 - params.world.local];
  }
  static __device__ MappedPlace map(const Params& params, const TilePlace& place,
                                    std::uint32_t epoch) {
    switch (place.region) {
      case Region::kSlots:
        return {&params.maps.slots[place.local], 0, static_cast<int>(place.tile), 0, 0};
      case Region::kStaging:
        return {&params.maps.staging[bank_of(epoch, params.banks)], static_cast<int>(place.plane),
                static_cast<int>(place.tile), 0, 0};
      default:
        return MappedPlace::of_matrix(&params.maps.out[place.local],
                                      params.schedule.result(place.rect));
    }
  }
};

}  // namespace mk::kernels::cuda
