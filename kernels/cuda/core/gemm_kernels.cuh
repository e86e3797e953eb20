/// \file
/// Instantiates the plain matrix product for one element type; included by one .cu file per type.
#pragma once

#include "kernels/cuda/core/gemm_choice.h"
#include "kernels/cuda/core/gemm_kernels.h"
#include "kernels/cuda/core/gemm_launch.cuh"
#include "kernels/cuda/core/wgmma_between.cuh"

namespace mk::kernels::cuda {

template <class Config>
cudaError_t launch_plain(const PlainGemmArguments& arguments, int workers, cudaStream_t stream) {
  GemmParams<RasterOrder, AlwaysReady, StoreToC<Config>> params{};
  params.a = arguments.a;
  params.b = arguments.b;
  params.a_box_rows = arguments.a_box_rows;
  params.m_blocks = arguments.m_blocks;
  params.k_blocks = arguments.k_blocks;
  params.splits = arguments.splits;
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
    .clusters = clusters_of_gemm<Config, RasterOrder, AlwaysReady, StoreToC<Config>>,
    .launch = launch_plain<Config>,
};

template <GemmVariant kVariant, class Config>
const PlainGemmKernel& shared_k_kernel() {
  constexpr int kAnyK = 1 << 20;
  static_assert(Config::kSplitsK && splits_max(kVariant, kAnyK) <= kRoomForSplits<Config>);
  return kPlainKernel<Config>;
}

template <class Element, BLayout kB>
const PlainGemmKernel& plain_gemm_variant(GemmVariant variant) {
  switch (variant) {
    case GemmVariant::k128x64:
      return shared_k_kernel<GemmVariant::k128x64,
                             GemmConfig<Element, kB, 128, 64, 8, 1, 2, true>>();
    case GemmVariant::k128x128:
      return shared_k_kernel<GemmVariant::k128x128,
                             GemmConfig<Element, kB, 128, 128, 6, 1, 2, true>>();
    case GemmVariant::k128x160:
      // As [K,N], 192 columns of B come for them.
      return shared_k_kernel<
          GemmVariant::k128x160,
          GemmConfig<Element, kB, 128, 160, kB == BLayout::kNK ? 5 : 4, 1, 2, true>>();
    case GemmVariant::k128x192:
      return kPlainKernel<GemmConfig<Element, kB, 128, 192, 4, 1>>;
    case GemmVariant::k128x224:
      return kPlainKernel<GemmConfig<Element, kB, 128, 224, 4, 1>>;
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
