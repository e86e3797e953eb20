/// \file
/// Attention for attention_bench.py, through ctypes: addresses are those of PyTorch's tensors.
#pragma once

#include <cstdint>

extern "C" {
#pragma GCC visibility push(default)

/// As AttentionProblem and AttentionTuning have it, the type as its number. Strides of batch, row
/// and head of Q, K, V, O and LSE, in elements.
struct MkAttentionProblem {
  int dtype, head_dim, batch, query_heads, key_heads, queries, keys, causal;
  float scale;
  int blocks_max, section;
  void *q, *k, *v, *o;
  float* lse;
  std::int64_t strides[5][3];
};

/// A plan, or null: then mk_attention_error() says why.
void* mk_attention_create(const MkAttentionProblem* from);
/// 0, or 1 with mk_attention_error().
int mk_attention_launch(void* plan, void* stream);
/// Keys of a tile, for the bound.
int mk_attention_tile_keys(void* plan);
/// Of this thread's last failure.
const char* mk_attention_error();
void mk_attention_destroy(void* plan);

#pragma GCC visibility pop
}  // extern "C"
