/// \file
/// What a ring of launches over shards of the keys needs at its end: one sum of their partial
/// results, in fp32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mk::test {

/// Attention of some of the queries over one shard of the keys: rows `first` to `first + rows` of
/// each batch. `o` is [batch, rows, heads, dim] in bf16, `lse` [batch, heads, rows].
struct PartialAttention {
  const void* o = nullptr;
  const float* lse = nullptr;
  std::int64_t first = 0;
  std::int64_t rows = 0;
};

/// Whose partial results: `o` is [batch, rows, heads, dim] in bf16; `dim` is 64 or 128.
struct MergedAttention {
  void* o = nullptr;
  int batch = 1;
  std::int64_t rows = 0;
  int heads = 1;
  int dim = 128;
};

inline constexpr int kPartialsMax = 8;

/// o = the partial results of each row, weighted by their sums of exponentials. Each row has one at
/// least.
void merge(const MergedAttention& merged, const PartialAttention* partials, int count,
           cudaStream_t stream);

}  // namespace mk::test
