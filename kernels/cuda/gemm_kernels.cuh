/// \file
/// Instantiates the plain matrix product for one element type; included by one .cu file per type.
#pragma once

#include "kernels/cuda/gemm_kernels.h"
#include "kernels/cuda/gemm_launch.cuh"

namespace mk::kernels::cuda {

template <class Config>
cudaError_t launch_plain(const PlainGemmArguments& arguments, int workers, cudaStream_t stream) {
  GemmParams<RasterOrder, AlwaysReady, StoreToC<Config>> params{};
  params.a = arguments.a;
  params.b = arguments.b;
  params.a_box_rows = arguments.a_box_rows;
  params.m_blocks = arguments.m_blocks;
  params.k_blocks = arguments.k_blocks;
  params.order = arguments.order;
  params.store.c = arguments.c;
  return launch_gemm<Config>(params, workers, stream);
}

template <class Config>
inline constexpr PlainGemmKernel kPlainKernel = {
    .block_m = Config::kBlockM,
    .block_n = Config::kBlockN,
    .cluster = Config::kCluster,
    .b_box_rows = Config::kBLayout == BLayout::kNK ? Config::kBBox : kBlockK,
    .b_box_columns = Config::kBLayout == BLayout::kNK ? kBlockK : Config::kBBox,
    .prepare = prepare_gemm<Config, RasterOrder, AlwaysReady, StoreToC<Config>>,
    .launch = launch_plain<Config>,
};

template <class Element, BLayout kB>
const PlainGemmKernel& plain_gemm_variant(GemmVariant variant) {
  switch (variant) {
    case GemmVariant::k128x64:
      return kPlainKernel<GemmConfig<Element, kB, 128, 64, 8, 1>>;
    case GemmVariant::k128x128:
      return kPlainKernel<GemmConfig<Element, kB, 128, 128, 6, 1>>;
    case GemmVariant::k128x256:
      return kPlainKernel<GemmConfig<Element, kB, 128, 256, 4, 1>>;
    case GemmVariant::kAuto:
    case GemmVariant::k128x256Pair:
      break;
  }
  return kPlainKernel<GemmConfig<Element, kB, 128, 256, 4, 2>>;
}

template <class Element>
const PlainGemmKernel& plain_gemm(BLayout b_layout, GemmVariant variant) {
  return b_layout == BLayout::kNK ? plain_gemm_variant<Element, BLayout::kNK>(variant)
                                  : plain_gemm_variant<Element, BLayout::kKN>(variant);
}

}  // namespace mk::kernels::cuda
