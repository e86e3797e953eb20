/// \file
/// The grouped product for grouped_gemm_bench.py, through ctypes: addresses are those of PyTorch's
/// tensors.
#pragma once

#include <cstdint>

extern "C" {
#pragma GCC visibility push(default)

/// As GroupedGemmProblem and GroupedGemmTuning have it, enumerations as their numbers.
struct MkGroupedProblem {
  int dtype, b_layout, activation, experts, rows_max, n, k;
  const void *a, *b;
  void* c;
  const std::uint32_t *offsets, *counts;
  const void* bias;
  const float* row_scale;
  int variant, band_rows, blocks_max;
};

/// A plan, or null: then mk_grouped_error() says why.
void* mk_grouped_create(const MkGroupedProblem* from);
/// 0, or 1 with mk_grouped_error().
int mk_grouped_launch(void* plan, void* stream);
/// The plan's tile, as text.
const char* mk_grouped_variant(void* plan);
/// Of this thread's last failure.
const char* mk_grouped_error();
void mk_grouped_destroy(void* plan);

#pragma GCC visibility pop
}  // extern "C"
