/// \file
/// The code behind attention_math.h, written once over the compiler's vectors. Each including
/// source file has its own instruction set and says, before including this, how wide its vectors
/// are and how many rows of a product its registers hold:
///
///     namespace mk::kernels::lanes { constexpr int kVectorBytes = 32; constexpr int kRows = 4; }
///
/// Everything here has internal linkage and includes next to nothing: no function compiled for a
/// wider machine may take the place of another file's.
#pragma once

#include "kernels/cpu/attention_math.h"

namespace mk::kernels {
namespace {

using Vector [[gnu::vector_size(lanes::kVectorBytes)]] = float;
using Words [[gnu::vector_size(lanes::kVectorBytes)]] = std::int32_t;

constexpr std::uint32_t kLanes = lanes::kVectorBytes / sizeof(float);
constexpr std::uint32_t kPerPanel = kPanel / kLanes;  ///< vectors in a panel's row
static_assert(kPanel % (2 * kLanes) == 0);

inline Vector load(const float* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof(vector));
  return vector;
}
inline void store(float* to, Vector vector) { __builtin_memcpy(to, &vector, sizeof(vector)); }
inline Vector all(float value) { return value - Vector{}; }
inline Vector larger(Vector a, Vector b) { return b > a ? b : a; }

/// kCount rows by two vectors of a product, summed up in registers.
template <std::uint32_t kCount>
[[gnu::always_inline]] inline void multiply_block(const AttentionProduct& product,
                                                  std::uint32_t row, const float* b, float* c) {
  Vector sums[kCount][2] = {};
  const float* a = product.a + row * product.a_row;
  const std::uint32_t shared = product.depths != nullptr ? product.depths[row] : product.depth;
  for (std::uint32_t step = 0; step < shared; ++step) {
    const Vector b0 = load(b);
    const Vector b1 = load(b + kLanes);
    for (std::uint32_t i = 0; i < kCount; ++i) {
      const Vector factor = all(a[i * product.a_row]);
      sums[i][0] += factor * b0;
      sums[i][1] += factor * b1;
    }
    a += product.a_step;
    b += kPanel;
  }
  // The first row's sum ends here; the others have some steps more, each its own number.
  if (product.depths != nullptr) {
    for (std::uint32_t i = 1; i < kCount; ++i) {
      const float* a_more = a + i * product.a_row;
      const float* b_more = b;
      for (std::uint32_t step = shared; step < product.depths[row + i]; ++step) {
        const Vector factor = all(*a_more);
        sums[i][0] += factor * load(b_more);
        sums[i][1] += factor * load(b_more + kLanes);
        a_more += product.a_step;
        b_more += kPanel;
      }
    }
  }
  for (std::uint32_t i = 0; i < kCount; ++i) {
    float* const to = c + (row + i) * product.c_row;
    if (product.factor != nullptr) {
      const Vector factor = all(product.factor[row + i]);
      sums[i][0] += factor * load(to);
      sums[i][1] += factor * load(to + kLanes);
    }
    store(to, sums[i][0]);
    store(to + kLanes, sums[i][1]);
  }
}

void multiply(const AttentionProduct& product) {
  for (std::uint32_t panel = 0; panel < product.panels; ++panel) {
    for (std::uint32_t column = 0; column < kPanel; column += 2 * kLanes) {
      const float* const b = product.b + panel * product.b_panel + column;
      float* const c = product.c + panel * product.c_panel + column;
      std::uint32_t row = 0;
      for (; row + lanes::kRows <= product.rows; row += lanes::kRows) {
        multiply_block<lanes::kRows>(product, row, b, c);
      }
      for (; row < product.rows; ++row) multiply_block<1>(product, row, b, c);
    }
  }
}

/// 2^x, x <= 0: 2^n by the exponent's bits, n the nearest integer, times 2^f by a polynomial that
/// interpolates (2^f - 1) / f at the six Chebyshev nodes of [-1/2, 1/2].
inline Vector power_of_two(Vector x) {
  constexpr float kRounder = 0x1.8p23f;  // x + this is a whole number, in its lowest bits
  const Vector inside = larger(x, all(-126.0f));
  const Vector shifted = inside + all(kRounder);
  const Vector f = inside - (shifted - all(kRounder));
  Vector p = all(1.5453163360e-04f);
  p = p * f + all(1.3390863314e-03f);
  p = p * f + all(9.6180830151e-03f);
  p = p * f + all(5.5503569543e-02f);
  p = p * f + all(2.4022650719e-01f);
  p = p * f + all(6.9314718246e-01f);
  p = p * f + all(1.0f);
  Words bits;
  Words exponent;
  __builtin_memcpy(&bits, &p, sizeof(bits));
  __builtin_memcpy(&exponent, &shifted, sizeof(exponent));
  bits += exponent << 23;  // the rounder's own bits leave at the top
  Vector result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return x < all(-125.0f) ? Vector{} : result;
}

void softmax(const AttentionSoftmax& softmax) {
  for (std::uint32_t panel = 0; panel < softmax.panels; ++panel) {
    for (std::uint32_t part = 0; part < kPerPanel; ++part) {
      const std::uint32_t column = panel * kPanel + part * kLanes;
      float* const scores = softmax.scores + panel * softmax.panel_stride + part * kLanes;
      const Vector before = load(softmax.max + column);
      Vector max = before;
      for (std::uint32_t row = 0; row < softmax.rows; ++row) {
        max = larger(max, load(scores + row * kPanel));
      }
      Vector sum = {};
      for (std::uint32_t row = 0; row < softmax.rows; ++row) {
        const Vector weight = power_of_two(load(scores + row * kPanel) - max);
        store(scores + row * kPanel, weight);
        sum += weight;
      }
      const Vector alpha = power_of_two(before - max);
      store(softmax.alpha + column, alpha);
      store(softmax.max + column, max);
      store(softmax.sum + column, alpha * load(softmax.sum + column) + sum);
    }
  }
}

}  // namespace
}  // namespace mk::kernels
