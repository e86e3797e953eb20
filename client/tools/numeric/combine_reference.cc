#include "client/tools/numeric/combine_reference.h"

#include <cmath>

namespace mk::tools {
namespace {

/// Half the spacing of the type's smallest numbers.
double half_least_spacing(DataType type) { return type == DataType::kBf16 ? 0x1p-134 : 0x1p-25; }

}  // namespace

void CombineReference::compare(std::span<const CombineTerm> terms, const std::uint16_t* residual,
                               const std::uint16_t* out, std::uint64_t first, Comparison* result) {
  const std::uint64_t hidden = sizes_.hidden;
  exact_.assign(hidden, 0);
  size_.assign(hidden, 0);
  off_.assign(hidden, 0);
  for (const CombineTerm& term : terms) {
    const double weight = term.weight;
    for (std::uint64_t i = 0; i < sizes_.features; ++i) {
      const std::uint16_t* const weights = term.weights + i * hidden;
      const double value = weight * term.row[i];
      const double off = term.row_off.empty() ? 0 : std::fabs(weight) * term.row_off[i];
      const double size = std::fabs(value) + off;
      for (std::uint64_t h = 0; h < hidden; ++h) {
        const double factor = to_float(sizes_.type, weights[h]);
        exact_[h] += value * factor;
        size_[h] += size * std::fabs(factor);
        off_[h] += off * std::fabs(factor);
      }
    }
  }
  const double u = kUnitRoundoffFp32;
  const double h = unit_roundoff(sizes_.type);
  const double q = sizes_.f32_partials ? 0 : h;
  const auto steps = static_cast<double>(sizes_.features + sizes_.top_k + sizes_.nodes + 1);
  const double relative = (1 + steps * u / (1 - steps * u)) * (1 + q) * (1 + q) - 1;
  const double tiny = sizes_.f32_partials ? 0 : half_least_spacing(sizes_.type);
  for (std::uint64_t i = 0; i < hidden; ++i) {
    const double more = residual == nullptr ? 0 : to_float(sizes_.type, residual[i]);
    const double exact = exact_[i] + more;
    const double before =
        off_[i] + relative * (size_[i] + std::fabs(more)) + (sizes_.top_k + sizes_.nodes) * tiny;
    const double bound = before + h * (std::fabs(exact) + before) + half_least_spacing(sizes_.type);
    result->add(first + i, to_float(sizes_.type, out[i]), exact, terms.empty() ? 0 : bound);
  }
}

}  // namespace mk::tools
