/// \file
/// The wgmma instructions for tiles of 160 and 224 columns.
#pragma once

#include <cute/arch/mma_sm90_gmma_ext.hpp>

#include "kernels/cuda/core/gemm_config.cuh"

namespace mk::kernels::cuda {

template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<160, __nv_bfloat16, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x160x16_F32BF16BF16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<160, __half, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x160x16_F32F16F16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<224, __nv_bfloat16, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x224x16_F32BF16BF16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<224, __half, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x224x16_F32F16F16_SS<kA, kB>;
};

}  // namespace mk::kernels::cuda
