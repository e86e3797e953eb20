/// \file
/// Instantiates attention for one element type; included by one .cu file per type.
#pragma once

#include "kernels/cuda/core/attention_core.cuh"
#include "kernels/cuda/core/attention_kernels.h"

namespace mk::kernels::cuda {

template <class Config>
using PlainAttentionParams =
    AttentionParams<DenseItems, HeadKeys, KeysAreHere, StoreRows<typename Config::Element>>;

template <class Config>
inline constexpr auto kPlainAttention = attention_kernel<Config, DenseItems, HeadKeys, KeysAreHere,
                                                         StoreRows<typename Config::Element>>;

template <class Config>
cudaError_t prepare_plain_attention() {
  return cudaFuncSetAttribute(kPlainAttention<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(AttentionShared<Config>)));
}

template <class Config>
cudaError_t launch_plain_attention(const AttentionArguments& arguments, int blocks,
                                   cudaStream_t stream) {
  PlainAttentionParams<Config> params{};
  params.q = arguments.q;
  params.scale_log2 = arguments.scale_log2;
  params.dealer.words = arguments.dealer_words;
  params.items = arguments.items;
  params.keys.k = arguments.k;
  params.keys.v = arguments.v;
  params.keys.length = arguments.keys;
  params.keys.heads_per_key_head = arguments.heads_per_key_head;
  params.keys.offset = arguments.offset;
  params.store.o = static_cast<typename Config::Element*>(arguments.o.data);
  params.store.batch_stride = arguments.o.batch_stride;
  params.store.head_stride = arguments.o.head_stride;
  params.store.row_stride = arguments.o.row_stride;
  params.store.lse = arguments.lse;
  params.store.lse_batch_stride = arguments.lse_batch_stride;
  params.store.lse_head_stride = arguments.lse_head_stride;
  params.store.lse_row_stride = arguments.lse_row_stride;
  kPlainAttention<Config><<<static_cast<unsigned>(blocks), Config::kThreads,
                            sizeof(AttentionShared<Config>), stream>>>(params);
  return cudaGetLastError();
}

template <class Config>
inline constexpr AttentionKernel kPlainAttentionRecord = {
    .tile_queries = Config::kTileQueries,
    .tile_keys = Config::kTileKeys,
    .query_box_rows = kAttentionRows,
    .prepare = prepare_plain_attention<Config>,
    .launch = launch_plain_attention<Config>,
};

template <class Element>
const AttentionKernel& plain_attention(int head_dim) {
  if (head_dim == 64) return kPlainAttentionRecord<AttentionConfig<Element, 64, 192, 128, 2>>;
  return kPlainAttentionRecord<AttentionConfig<Element, 128, 128, 176, 2>>;
}

}  // namespace mk::kernels::cuda
