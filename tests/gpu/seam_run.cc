#include "tests/gpu/seam_run.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/core/tensor_map.h"

namespace mk::test {
namespace {

using kernels::cuda::DType;
using kernels::cuda::GemmProblem;

constexpr std::size_t kFlagBytes = 1 << 20;

SeamProduct sizes_of(const GemmProblem& p) {
  SeamProduct product;
  product.m = p.m;
  product.n = p.n;
  product.k = p.k;
  product.pair = true;
  product.range_k_blocks = 8;
  return product;
}

std::int64_t slot_rows(const SeamProduct& p) {
  return std::int64_t{kSeamBlockM} * p.row_blocks() * p.tile_columns();
}

CUtensorMap map(const char* what, const void* at, std::int64_t rows, int columns, int box_rows) {
  auto made =
      kernels::cuda::make_tensor_map(what, DType::kBf16, at, rows, columns, columns, box_rows, 64);
  if (made) return *made;
  fmt::print(stderr, "{}\n", made.error().message);
  std::exit(1);
}

}  // namespace

SeamRun::SeamRun(const GemmProblem& p, int device, bool staged)
    : chunk_flags_(kFlagBytes),
      incident_(sizeof(Incident)),
      tile_flags_(kFlagBytes, device),
      slots_(static_cast<std::size_t>(slot_rows(sizes_of(p))) * kSeamBlockN * 2, device),
      product_(sizes_of(p)) {
  constexpr int kFlagByte = 1;
  require(cudaMemset(chunk_flags_.data(), kFlagByte, kFlagBytes), "flags");
  require(cudaMemset(incident_.data(), 0, sizeof(Incident)), "incident");
  product_.staged = staged;
  product_.epoch = 0x01010101u * kFlagByte;
  product_.deadline_ns = 1'000'000'000;
  product_.a = map("A", p.a, p.m, p.k, kSeamBlockM);
  product_.b = map("B", p.b, p.n, p.k, product_.b_box_rows());
  product_.slots = map("slots", slots_.data(), slot_rows(product_), kSeamBlockN, 64);
  product_.chunk_flags = static_cast<std::uint32_t*>(chunk_flags_.data());
  product_.tile_flags = static_cast<std::uint32_t*>(tile_flags_.data());
  product_.incident = static_cast<Incident*>(incident_.data());
  require(prepare_seams(), "prepare_seams");
}

void SeamRun::launch(int blocks) const {
  require(launch_seam_product(product_, blocks, nullptr), "seam product");
}

}  // namespace mk::test
