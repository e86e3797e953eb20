/// \file
/// Tiles of a matrix product on one core whose bits depend on nothing but the row and the column:
/// each element is summed in fp32 in the order of K, whatever the tile's shape, place and
/// neighbours are. (oneDNN chooses its order by the shape.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/comm/types.h"
#include "kernels/cpu/attention_math.h"
#include "kernels/cpu/row_math.h"

namespace mk::kernels {

/// A block's scratch memory. One thread. After construction it allocates nothing.
class OrderedGemm {
 public:
  /// For tiles of at most `rows` x `columns`.
  OrderedGemm(std::uint32_t rows, std::uint32_t columns, std::uint32_t k, DType dtype,
              BLayout b_layout, const AttentionMath& math = attention_math());

  /// target[rows][columns], packed, = A[rows][k] B[k][columns]. `a` points to the tile's first row,
  /// `b` to its first column (BLayout::kNK: its first row). Leading dimensions in elements.
  void multiply(std::uint32_t rows, std::uint32_t columns, const std::uint16_t* a,
                std::uint64_t lda, const std::uint16_t* b, std::uint64_t ldb, float* target);

 private:
  void widen_b(std::uint32_t columns, std::uint32_t depth, const std::uint16_t* b,
               std::uint64_t ldb);

  const AttentionMath& math_;
  const RowMath& row_math_;
  const std::uint32_t k_;
  const BLayout b_layout_;
  std::vector<float> a_;     ///< [row][depth of the panel of K]
  std::vector<float> b_;     ///< [panel of columns][depth][kPanel]
  std::vector<float> c_;     ///< [row][columns, to whole panels]
  std::vector<float> line_;  ///< a line of B, as the caller has it
  std::vector<float> ones_;  ///< by row
};

}  // namespace mk::kernels
