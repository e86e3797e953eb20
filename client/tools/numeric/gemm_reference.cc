#include "client/tools/numeric/gemm_reference.h"

#include <algorithm>
#include <cmath>
#include <thread>

namespace mk::tools {
namespace {

/// row += a_row b in float64: one row of C; the inner loop runs along a row of B and C.
[[gnu::always_inline]] inline void add_product(const double* a_row, const double* b,
                                               std::uint64_t k, std::uint64_t n,
                                               double* __restrict row) {
  constexpr std::uint64_t kColumns =
      512;  // of B at a time, so that a block of k rows stays in the cache
  for (std::uint64_t first = 0; first < n; first += kColumns) {
    const std::uint64_t last = std::min(n, first + kColumns);
    for (std::uint64_t i = 0; i < k; ++i) {
      const double factor = a_row[i];
      const double* b_row = b + i * n;
      for (std::uint64_t j = first; j < last; ++j) row[j] += factor * b_row[j];
    }
  }
}

// The same loop for three widths of vector. Not target_clones: its resolver runs before the
// sanitizers' functions can be called.
using AddProduct = void (*)(const double*, const double*, std::uint64_t, std::uint64_t, double*);
[[gnu::target("avx512f")]] void add_product_avx512(const double* a_row, const double* b,
                                                   std::uint64_t k, std::uint64_t n, double* row) {
  add_product(a_row, b, k, n, row);
}
[[gnu::target("avx2")]] void add_product_avx2(const double* a_row, const double* b, std::uint64_t k,
                                              std::uint64_t n, double* row) {
  add_product(a_row, b, k, n, row);
}
void add_product_plain(const double* a_row, const double* b, std::uint64_t k, std::uint64_t n,
                       double* row) {
  add_product(a_row, b, k, n, row);
}

AddProduct widest_add_product() {
  if (__builtin_cpu_supports("avx512f")) return add_product_avx512;
  if (__builtin_cpu_supports("avx2")) return add_product_avx2;
  return add_product_plain;
}

}  // namespace

std::uint32_t share_of_cores(std::uint32_t ranks) {
  return std::max(1u, std::thread::hardware_concurrency() / std::max(1u, ranks));
}

GemmReference::GemmReference(std::uint64_t rows, std::uint64_t n, std::uint32_t nodes,
                             std::uint32_t locals, DataType type)
    : rows_(rows),
      n_(n),
      nodes_(nodes),
      locals_(locals),
      type_(type),
      sum_(rows * n),
      node_(rows * n),
      magnitude_p_(rows * n),
      magnitude_q_(rows * n) {}

void GemmReference::add_rank(const std::uint16_t* a, const std::uint16_t* b, std::uint64_t k,
                             double range_a, double range_b) {
  std::vector<double> wide_b(k * n_);
  for (std::uint64_t i = 0; i < k * n_; ++i) wide_b[i] = to_float(type_, b[i]);
  const std::uint64_t each = (rows_ + threads_ - 1) / threads_;
  {
    std::vector<std::jthread> others;
    for (std::uint64_t first = each; first < rows_; first += each) {
      others.emplace_back(
          [&, first] { add_rows(a, wide_b, k, first, std::min(rows_, first + each)); });
    }
    add_rows(a, wide_b, k, 0, std::min(rows_, each));
  }
  const double ku = static_cast<double>(k) * kUnitRoundoffFp32;
  accumulation_ += ku / (1 - ku) * static_cast<double>(k) * range_a * range_b;
  if (++ranks_ % locals_ == 0) close_node();
}

void GemmReference::add_rows(const std::uint16_t* a, const std::vector<double>& b, std::uint64_t k,
                             std::uint64_t first, std::uint64_t end) {
  const AddProduct add_row_product = widest_add_product();
  std::vector<double> a_row(k);
  std::vector<double> product(n_);
  for (std::uint64_t row = first; row < end; ++row) {
    for (std::uint64_t i = 0; i < k; ++i) a_row[i] = to_float(type_, a[row * k + i]);
    std::fill(product.begin(), product.end(), 0.0);
    add_row_product(a_row.data(), b.data(), k, n_, product.data());
    for (std::uint64_t j = 0; j < n_; ++j) {
      node_[row * n_ + j] += product[j];
      magnitude_p_[row * n_ + j] += std::fabs(product[j]);
    }
  }
}

void GemmReference::close_node() {
  for (std::uint64_t i = 0; i < rows_ * n_; ++i) {
    sum_[i] += node_[i];
    magnitude_q_[i] += std::fabs(node_[i]);
    node_[i] = 0;
  }
}

double GemmReference::bound(std::uint64_t i) const {
  const double v = unit_roundoff(type_);
  double first_order = accumulation_ + v * magnitude_p_[i];
  double roundings = nodes_ * locals_;
  if (locals_ > 1) {
    first_order += v * magnitude_q_[i] + kUnitRoundoffFp32 * locals_ * magnitude_p_[i];
    roundings += nodes_;
  }
  if (nodes_ > 1) {
    first_order += v * std::fabs(sum_[i]) + kUnitRoundoffFp32 * nodes_ * magnitude_q_[i];
    roundings += 1;
  }
  const double half_smallest_unit = std::ldexp(1.0, type_ == DataType::kF16 ? -25 : -134);
  return first_order * (1 + 4 * v) + half_smallest_unit * roundings;
}

Comparison GemmReference::compare(const std::uint16_t* c) const {
  Comparison result;
  for (std::uint64_t i = 0; i < rows_ * n_; ++i) {
    result.add(i, to_float(type_, c[i]), sum_[i], bound(i));
  }
  return result;
}

}  // namespace mk::tools
