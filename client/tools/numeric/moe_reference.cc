#include "client/tools/numeric/moe_reference.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "client/tools/numeric/gemm_reference.h"

namespace mk::tools {
namespace {

/// The ranks of a node come side by side, so many tokens of each at a time.
constexpr std::uint32_t kTokensAtATime = 256;

/// Steps from `from` forwards to `to` on a circle.
std::uint32_t steps(std::uint32_t from, std::uint32_t to, std::uint32_t circle) {
  return (to + circle - from) % circle;
}

/// A column of a product in float64, and the sizes of its terms.
struct Dot {
  double exact = 0;
  double size = 0;     ///< sum of magnitudes
  double squares = 0;  ///< sum of squares
  double off = 0;      ///< by how much it may be off
  double spread = 0;   ///< in the mean
};

/// The error in silu(gate) * up before its rounding.
double gated_off(double v, double gate_off, double up, double up_off) {
  const double u = kUnitRoundoffFp32;
  const double off_gate = 1.1 * gate_off;
  const double off_v = off_gate + 8 * u * (std::fabs(v) + off_gate);
  return (std::fabs(v) * up_off + off_v * (std::fabs(up) + up_off)) * (1 + u) +
         u * std::fabs(v * up);
}

}  // namespace

void moe_row(const MoeJobShape& shape, const std::uint16_t* token, const std::uint16_t* weights,
             const std::uint16_t* bias, std::vector<double>* row, std::vector<double>* off,
             std::vector<double>* spread) {
  const std::uint64_t columns = shape.weight_columns();
  std::vector<Dot> dots(columns);
  for (std::uint64_t i = 0; i < shape.hidden; ++i) {
    const double value = to_float(shape.type, token[i]);
    for (std::uint64_t c = 0; c < columns; ++c) {
      const double term = value * to_float(shape.type, weights[i * columns + c]);
      dots[c].exact += term;
      dots[c].size += std::fabs(term);
      dots[c].squares += term * term;
    }
  }
  const double u = kUnitRoundoffFp32;
  const double h = unit_roundoff(shape.type);
  const auto hidden = static_cast<double>(shape.hidden);
  const double g = fp32_error(hidden);
  for (std::uint64_t c = 0; c < columns; ++c) {
    Dot& dot = dots[c];
    dot.off = g * sum_size(dot.exact, dot.size, dot.squares);
    dot.spread = g * std::sqrt(dot.squares);
    if (bias == nullptr) continue;
    // One more addition in fp32.
    dot.exact += to_float(shape.type, bias[c]);
    dot.off += u * (std::fabs(dot.exact) + dot.off);
    dot.spread += u * (std::fabs(dot.exact) + dot.spread);
  }
  const double tiny = shape.type == DataType::kBf16 ? 0x1p-134 : 0x1p-25;
  for (std::uint64_t i = 0; i < shape.features; ++i) {
    double exact = dots[i].exact;
    double before = dots[i].off;
    double mean = dots[i].spread;
    if (shape.epilogue != MoeEpilogue::kNone) {
      const bool pairs = shape.epilogue == MoeEpilogue::kGatedSiluInterleaved;
      const Dot& gate = dots[pairs ? 2 * i : i];
      const Dot& up = dots[pairs ? 2 * i + 1 : shape.features + i];
      const double v = gate.exact / (1 + std::exp(-gate.exact));
      exact = v * up.exact;
      before = gated_off(v, gate.off, up.exact, up.off);
      mean = gated_off(v, gate.spread, up.exact, up.spread);
    }
    row->push_back(exact);
    off->push_back(before + h * (std::fabs(exact) + before) + tiny);
    if (spread != nullptr) spread->push_back(std::hypot(mean, h * exact) * (1 + 4 * h) + tiny);
  }
}

MoeReference::MoeReference(const MoeJobShape& shape, std::uint32_t rank,
                           std::span<const MoeSource> sources)
    : shape_(shape), sources_(sources) {
  const std::uint64_t world = std::uint64_t{shape.nodes} * shape.locals;
  first_expert_ = static_cast<std::uint32_t>(rank * std::uint64_t{shape.experts} / world);
  expert_count_ =
      static_cast<std::uint32_t>((rank + 1) * std::uint64_t{shape.experts} / world) - first_expert_;
  for (std::uint32_t source = 0; source < sources.size(); ++source) {
    for (std::uint32_t token = 0; token < sources[source].tokens; ++token) {
      for (std::uint32_t slot = 0; slot < shape.top_k; ++slot) {
        const std::uint64_t at = std::uint64_t{token} * shape.top_k + slot;
        const std::int32_t id = sources[source].ids[at];
        const auto expert = static_cast<std::uint32_t>(id);
        if (id < 0 || expert < first_expert_ || expert >= first_expert_ + expert_count_) continue;
        rows_.push_back({expert, source, token, slot, sources[source].weights[at]});
      }
    }
  }
  const auto key = [&](const Row& row) {
    const std::uint32_t locals = shape.locals;
    return std::tuple(row.expert, steps(row.rank / locals, rank / locals, shape.nodes),
                      row.token / kTokensAtATime, steps(rank % locals, row.rank % locals, locals),
                      row.token, row.slot);
  };
  std::sort(rows_.begin(), rows_.end(),
            [&](const Row& a, const Row& b) { return key(a) < key(b); });
}

std::uint64_t MoeReference::offset(std::uint32_t i) const {
  const auto first = std::find_if(rows_.begin(), rows_.end(),
                                  [&](const Row& row) { return row.expert >= first_expert_ + i; });
  return static_cast<std::uint64_t>(first - rows_.begin());
}

Comparison MoeReference::compare(std::uint32_t i, const std::uint16_t* weights,
                                 const std::uint16_t* y, const std::uint16_t* bias) const {
  const std::uint64_t first = offset(i);
  const std::uint64_t count = offset(i + 1) - first;
  const std::uint64_t hidden = shape_.hidden;
  if (shape_.epilogue != MoeEpilogue::kNone || bias != nullptr) {
    Comparison result;
    for (std::uint64_t row = first; row < first + count; ++row) {
      const Row& from = rows_[row];
      std::vector<double> exact, off, spread;
      moe_row(shape_, sources_[from.rank].values.data() + from.token * hidden, weights, bias,
              &exact, &off, &spread);
      for (std::uint64_t column = 0; column < shape_.features; ++column) {
        const std::uint64_t at = row * shape_.features + column;
        result.add(at, to_float(shape_.type, y[at]), exact[column], off[column],
                   Outcome::of(exact[column]), spread[column] * spread[column]);
      }
    }
    result.judge_mean();
    return result;
  }
  std::vector<std::uint16_t> packed(count * hidden);
  for (std::uint64_t row = 0; row < count; ++row) {
    const Row& from = rows_[first + row];
    const std::uint16_t* token = sources_[from.rank].values.data() + from.token * hidden;
    std::copy(token, token + hidden, packed.data() + row * hidden);
  }
  GemmReference product(count, shape_.features, 1, 1, shape_.type);
  product.random_inputs();
  product.add_rank(packed.data(), weights, hidden, 1, 1);
  Comparison result = product.compare(y + first * shape_.features);
  if (result.wrong != 0) result.first_wrong += first * shape_.features;
  return result;
}

}  // namespace mk::tools
