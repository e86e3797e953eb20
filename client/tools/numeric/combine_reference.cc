#include "client/tools/numeric/combine_reference.h"

#include <algorithm>
#include <cmath>

#include "client/tools/numeric/gemm_reference.h"

namespace mk::tools {
namespace {

/// Half the spacing of the type's smallest numbers.
double half_least_spacing(DataType type) { return type == DataType::kBf16 ? 0x1p-134 : 0x1p-25; }

}  // namespace

void CombineReference::multiply(const CombineTerm& term) {
  const std::uint64_t hidden = sizes_.hidden;
  for (auto* sums : {&product_, &magnitudes_, &squares_, &row_off_, &row_squares_})
    sums->assign(hidden, 0);
  for (std::uint64_t i = 0; i < sizes_.features; ++i) {
    const std::uint16_t* const weights = term.weights + i * hidden;
    const double value = term.row[i];
    const double off = term.row_off.empty() ? 0 : term.row_off[i];
    const double spread = term.row_spread.empty() ? off : term.row_spread[i];
    const double size = std::fabs(value) + off;
    for (std::uint64_t h = 0; h < hidden; ++h) {
      const double factor = to_float(sizes_.type, weights[h]);
      const double magnitude = std::fabs(factor);
      product_[h] += value * factor;
      magnitudes_[h] += size * magnitude;
      squares_[h] += size * magnitude * (size * magnitude);
      row_off_[h] += off * magnitude;
      row_squares_[h] += spread * magnitude * (spread * magnitude);
    }
  }
}

void CombineReference::compare(std::span<const CombineTerm> terms, const std::uint16_t* residual,
                               const std::uint16_t* out, std::uint64_t first, Comparison* result) {
  const std::uint64_t hidden = sizes_.hidden;
  const double h = unit_roundoff(sizes_.type);
  const double q = sizes_.f32_partials ? 0 : h;
  const double g = fp32_error(static_cast<double>(sizes_.features));
  for (auto* sums : {&exact_, &size_, &off_, &rows_, &mean_}) sums->assign(hidden, 0);
  for (const CombineTerm& term : terms) {
    multiply(term);
    const double weight = std::fabs(double{term.weight});
    for (std::uint64_t i = 0; i < hidden; ++i) {
      const double product = weight * std::fabs(product_[i]);
      double row_off = row_off_[i];
      if (sizes_.random) row_off = std::min(row_off, kWidest * std::sqrt(row_squares_[i]));
      exact_[i] += double{term.weight} * product_[i];
      size_[i] += product + weight * row_off;
      off_[i] +=
          weight * g * sum_size(std::fabs(product_[i]) + row_off, magnitudes_[i], squares_[i]);
      rows_[i] += weight * row_off;
      mean_[i] +=
          weight * weight * (g * g * squares_[i] + row_squares_[i]) + 2 * q * q * product * product;
    }
  }
  const double more_steps = fp32_error(static_cast<double>(sizes_.top_k + sizes_.nodes + 1));
  const double relative = (1 + more_steps) * (1 + q) * (1 + q) - 1;
  const double tiny = sizes_.f32_partials ? 0 : half_least_spacing(sizes_.type);
  const double tinies = (sizes_.top_k + sizes_.nodes) * tiny;
  for (std::uint64_t i = 0; i < hidden; ++i) {
    const double more = residual == nullptr ? 0 : to_float(sizes_.type, residual[i]);
    const double exact = exact_[i] + more;
    const double before = rows_[i] + off_[i] + relative * (size_[i] + off_[i]) +
                          more_steps * std::fabs(more) + tinies;
    const double bound = before + h * (std::fabs(exact) + before) + half_least_spacing(sizes_.type);
    const double spread =
        std::hypot(std::sqrt(mean_[i]) + more_steps * (size_[i] + std::fabs(more)), h * exact) *
            (1 + 4 * h) +
        tinies + half_least_spacing(sizes_.type);
    result->add(first + i, to_float(sizes_.type, out[i]), exact, terms.empty() ? 0 : bound,
                Outcome::of(exact), sizes_.random && !terms.empty() ? spread * spread : 0);
  }
}

}  // namespace mk::tools
