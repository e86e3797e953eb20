#include "tests/kernels/support/reference.h"

#include <fmt/format.h>

#include <cmath>

#include "kernels/cpu/row_math.h"

namespace mk::kernels::testing {
namespace {

constexpr double kU32 = 0x1p-24;  ///< unit roundoff of fp32

/// The relative error of `steps` roundings to fp32 in a row.
double gamma(double steps) { return steps * kU32 / (1 - steps * kU32); }

}  // namespace

double to_double(DType dtype, std::uint16_t value) {
  float wide = 0;
  row_math_generic(dtype).widen(&value, &wide, 1);
  return static_cast<double>(wide);
}

std::uint16_t from_float(DType dtype, float value) {
  std::uint16_t narrow = 0;
  row_math_generic(dtype).narrow(&value, &narrow, 1);
  return narrow;
}

std::vector<std::uint16_t> random_values(DType dtype, std::size_t count, std::mt19937_64& random) {
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& value : values) {
    value = from_float(
        dtype, static_cast<float>(static_cast<std::int64_t>(random() % 2001) - 1000) * 1e-3f);
  }
  return values;
}

void poison_gaps(std::vector<std::uint16_t>& matrix, std::uint64_t stride, std::uint64_t gap) {
  constexpr std::uint16_t kNaN = 0x7fff;  // in bf16 and in f16
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    if (i % stride >= stride - gap) matrix[i] = kNaN;
  }
}

Reference::Reference(DType dtype, std::uint32_t nodes, std::uint32_t locals, std::uint32_t m,
                     std::uint32_t n, Partials partials)
    : dtype_(dtype),
      nodes_(nodes),
      locals_(locals),
      m_(m),
      n_(n),
      partials_(partials),
      node_(std::size_t{m} * n),
      total_(node_.size()) {}

void Reference::round(Bounded& value) const {
  const double unit = dtype_ == DType::kBf16 ? 0x1p-8 : 0x1p-11;
  const double tiny =
      dtype_ == DType::kBf16 ? 0x1p-134 : 0x1p-25;  // half the spacing of subnormals
  value.error += unit * (std::abs(value.exact) + value.error) + tiny;
}

void Reference::round_partial(Bounded& value) const {
  if (partials_ == Partials::kElement) round(value);
}

void Reference::add_rank(const std::uint16_t* a, std::uint64_t lda, const std::uint16_t* b,
                         std::uint64_t ldb, std::uint32_t k, BLayout b_layout) {
  std::vector<double> wide_b(std::size_t{n_} * k);
  for (std::uint32_t j = 0; j < n_; ++j) {
    for (std::uint32_t i = 0; i < k; ++i) {
      wide_b[std::size_t{j} * k + i] =
          to_double(dtype_, b_layout == BLayout::kKN ? b[i * ldb + j] : b[j * ldb + i]);
    }
  }
  std::vector<double> wide_a(k);
  for (std::uint32_t row = 0; row < m_; ++row) {
    for (std::uint32_t i = 0; i < k; ++i) wide_a[i] = to_double(dtype_, a[row * lda + i]);
    for (std::uint32_t column = 0; column < n_; ++column) {
      double dot = 0;
      double magnitude = 0;
      for (std::uint32_t i = 0; i < k; ++i) {
        const double product = wide_a[i] * wide_b[std::size_t{column} * k + i];
        dot += product;
        magnitude += std::abs(product);
      }
      // A dot product in fp32, in any order; bf16 instructions may flush subnormals at each step.
      Bounded partial{dot, gamma(k) * magnitude + k * 0x1p-126};
      // One rank alone rounds when all is done.
      if (nodes_ * locals_ > 1) round_partial(partial);
      Sum& node = node_[std::size_t{row} * n_ + column];
      node.value.exact += partial.exact;
      node.value.error += partial.error;
      node.magnitude += std::abs(partial.exact) + partial.error;
    }
  }
  if (++ranks_ % locals_ == 0) close_node();
}

void Reference::close_node() {
  for (std::size_t i = 0; i < node_.size(); ++i) {
    Bounded sum = node_[i].value;
    sum.error += gamma(locals_ - 1) * node_[i].magnitude;
    // With one local rank the sum is the rounded partial itself: rounding it again changes nothing.
    if (locals_ > 1 && nodes_ > 1) round_partial(sum);
    total_[i].value.exact += sum.exact;
    total_[i].value.error += sum.error;
    total_[i].magnitude += std::abs(sum.exact) + sum.error;
    node_[i] = {};
  }
}

void Reference::finish(const Epilogue& epilogue, const std::vector<std::uint16_t>& bias) {
  epilogue_ = epilogue;
  bias_ = bias;
}

/// The sum over all, with its bias.
Reference::Bounded Reference::total(std::size_t index) const {
  Bounded sum = total_[index].value;
  sum.error += gamma(nodes_ - 1) * total_[index].magnitude;
  if (!bias_.empty()) {
    sum.exact += to_double(dtype_, bias_[index % n_]);
    sum.error += kU32 * (std::abs(sum.exact) + sum.error);
  }
  return sum;
}

/// The activation of a sum that is off by E is off by slope * E, and by its own error. The slopes
/// are 1, 1.13 and 1.1. GELU's own error is 2^-20 of |x| and SiLU's (8 + 1.2 |x|) 2^-23 of itself,
/// by the least exact of the executors.
Reference::Bounded Reference::finished(const Bounded& gate, const Bounded& up) const {
  const double x = gate.exact;
  const double reach = std::abs(x) + gate.error;
  const double silu = x / (1 + std::exp(-x));
  const double silu_error =
      1.1 * gate.error + (8 + 1.2 * reach) * 0x1p-23 * (std::abs(silu) + 1.1 * gate.error);
  switch (epilogue_.activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      return {std::max(x, 0.0), gate.error};
    case Activation::kGelu:
      return {x * std::erfc(-x / std::sqrt(2.0)) / 2, 1.13 * gate.error + 0x1p-20 * reach};
    case Activation::kSilu:
      return {silu, silu_error};
    case Activation::kGatedSilu: {
      const double product = silu * up.exact;
      const double error = silu_error * (std::abs(up.exact) + up.error) + std::abs(silu) * up.error;
      return {product, error + kU32 * (std::abs(product) + error) + 0x1p-149};
    }
  }
  return gate;
}

std::string Reference::check(const std::uint16_t* c, std::uint64_t ldc) const {
  const std::uint32_t step = epilogue_.gated() ? 2 : 1;
  for (std::uint32_t row = 0; row < m_; ++row) {
    for (std::uint32_t column = 0; column < epilogue_.columns_of(n_); ++column) {
      const std::size_t at = std::size_t{row} * n_ + std::size_t{column} * step;
      Bounded expected = finished(total(at), total(at + step - 1));
      // What one node of one rank sums has been rounded only where partial sums are.
      round(expected);
      const double got = to_double(dtype_, c[row * ldc + column]);
      const double off = std::abs(got - expected.exact);
      if (!(off <= expected.error)) {
        return fmt::format("element [{}][{}] is {}, expected {} within {}", row, column, got,
                           expected.exact, expected.error);
      }
      worst_ = std::max(worst_, off / expected.error);
    }
  }
  return {};
}

}  // namespace mk::kernels::testing
