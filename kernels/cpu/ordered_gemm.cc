#include "kernels/cpu/ordered_gemm.h"

#include <algorithm>

namespace mk::kernels {
namespace {

/// K is cut into panels of this length, always from its begin, which bounds the widened copies. A
/// panel is summed for itself and then added to those before it.
constexpr std::uint32_t kDepth = 1024;

}  // namespace

OrderedGemm::OrderedGemm(std::uint32_t rows, std::uint32_t columns, std::uint32_t k, DType dtype,
                         BLayout b_layout, const AttentionMath& math)
    : math_(math), row_math_(row_math(dtype)), k_(k), b_layout_(b_layout) {
  const std::size_t depth = std::min(k, kDepth);
  const std::size_t wide = round_up_to(std::size_t{columns}, kPanel);
  a_.resize(rows * depth);
  b_.resize(wide * depth);
  c_.resize(rows * wide);
  line_.resize(std::max(wide, depth));
  ones_.assign(rows, 1.0f);
}

/// Columns beyond the tile's last keep what they have: nobody reads their sums.
void OrderedGemm::widen_b(std::uint32_t columns, std::uint32_t depth, const std::uint16_t* b,
                          std::uint64_t ldb) {
  const std::size_t panel = std::size_t{depth} * kPanel;
  if (b_layout_ == BLayout::kKN) {
    for (std::uint32_t step = 0; step < depth; ++step) {
      row_math_.widen(b + step * ldb, line_.data(), columns);
      for (std::uint32_t column = 0; column < columns; column += kPanel) {
        std::copy_n(line_.data() + column, std::min(kPanel, columns - column),
                    b_.data() + column / kPanel * panel + std::size_t{step} * kPanel);
      }
    }
    return;
  }
  for (std::uint32_t column = 0; column < columns; ++column) {
    row_math_.widen(b + column * ldb, line_.data(), depth);
    float* const to = b_.data() + column / kPanel * panel + column % kPanel;
    for (std::uint32_t step = 0; step < depth; ++step) to[std::size_t{step} * kPanel] = line_[step];
  }
}

void OrderedGemm::multiply(std::uint32_t rows, std::uint32_t columns, const std::uint16_t* a,
                           std::uint64_t lda, const std::uint16_t* b, std::uint64_t ldb,
                           float* target) {
  const std::uint32_t panels = div_up(columns, kPanel);
  const std::size_t wide = std::size_t{panels} * kPanel;
  for (std::uint32_t begin = 0; begin < k_; begin += kDepth) {
    const std::uint32_t depth = std::min(kDepth, k_ - begin);
    for (std::uint32_t row = 0; row < rows; ++row)
      row_math_.widen(a + row * lda + begin, a_.data() + std::size_t{row} * depth, depth);
    widen_b(columns, depth, b_layout_ == BLayout::kKN ? b + begin * ldb : b + begin, ldb);
    AttentionProduct product;
    product.a = a_.data();
    product.a_row = depth;
    product.a_step = 1;
    product.b = b_.data();
    product.b_panel = std::size_t{depth} * kPanel;
    product.c = c_.data();
    product.c_row = wide;
    product.c_panel = kPanel;
    product.factor = begin == 0 ? nullptr : ones_.data();
    product.rows = rows;
    product.panels = panels;
    product.depth = depth;
    math_.multiply(product);
  }
  for (std::uint32_t row = 0; row < rows; ++row)
    std::copy_n(c_.data() + row * wide, columns, target + std::size_t{row} * columns);
}

}  // namespace mk::kernels
