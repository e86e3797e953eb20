/// \file
/// Instantiates the grouped products of one element type; included by one .cu file per type.
#pragma once

#include "kernels/cuda/core/gemm_launch.cuh"
#include "kernels/cuda/core/grouped_kernels.h"
#include "kernels/cuda/core/grouped_policies.cuh"

namespace mk::kernels::cuda {

static_assert(sizeof(GroupedWords) == kGroupedWordsBytes);

template <class Config, class Epilogue>
struct GroupedProduct {
  using Store = GroupedStore<Config, Epilogue::kSumsPerOutput>;

  static cudaError_t prepare() {
    return prepare_gemm<Config, GroupedOrder, GroupedInputs<Config>, Store, Epilogue>();
  }
  static cudaError_t launch(const GroupedArguments& arguments, int workers, cudaStream_t stream) {
    GemmParams<GroupedOrder, GroupedInputs<Config>, Store, Epilogue> params{};
    params.a = arguments.a;
    params.b = arguments.b;
    params.a_box_rows = Config::kBlockM;
    params.k_blocks = arguments.k_blocks;
    params.order = {arguments.rows, arguments.experts, arguments.columns, arguments.band,
                    arguments.words};
    params.gate = {arguments.halves, arguments.a_half};
    params.store.c = arguments.c;
    if constexpr (!std::is_same_v<Epilogue, RoundedSums>)
      params.epilogue = {arguments.bias, arguments.row_scale, arguments.n};
    return launch_gemm<Config>(params, workers, stream);
  }
  static constexpr GroupedKernel kKernel = {Config::kBlockN, prepare, launch};
};

template <class Config>
const GroupedKernel& grouped_kernel_of(GroupedActivation activation, bool plain) {
  switch (activation) {
    case GroupedActivation::kGatedSiluHalves:
      return GroupedProduct<Config,
                            GroupedEpilogue<Config, GroupedActivation::kGatedSiluHalves>>::kKernel;
    case GroupedActivation::kGatedSiluPairs:
      return GroupedProduct<Config,
                            GroupedEpilogue<Config, GroupedActivation::kGatedSiluPairs>>::kKernel;
    case GroupedActivation::kNone:
      break;
  }
  return plain ? GroupedProduct<Config, RoundedSums>::kKernel
               : GroupedProduct<Config, GroupedEpilogue<Config, GroupedActivation::kNone>>::kKernel;
}

template <class Element, BLayout kB>
const GroupedKernel& grouped_kernel_of(GroupedActivation activation, bool plain,
                                       GroupedVariant variant) {
  if (variant == GroupedVariant::k128x128)
    return grouped_kernel_of<GemmConfig<Element, kB, 128, 128, 6, 1>>(activation, plain);
  return grouped_kernel_of<GemmConfig<Element, kB, 128, 256, 4, 1>>(activation, plain);
}

template <class Element>
const GroupedKernel& grouped_kernel(BLayout layout, GroupedActivation activation, bool plain,
                                    GroupedVariant variant) {
  return layout == BLayout::kNK
             ? grouped_kernel_of<Element, BLayout::kNK>(activation, plain, variant)
             : grouped_kernel_of<Element, BLayout::kKN>(activation, plain, variant);
}

}  // namespace mk::kernels::cuda
