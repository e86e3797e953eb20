#include "client/tools/numeric/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "client/tools/numeric/gemm_reference.h"

namespace mk::tools {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

constexpr double kSecondOrder = 1.05;

/// Of a sum of so many products by a tensor core, relative to the sum of their magnitudes.
double tensor_core_error(std::uint64_t products) {
  return 1.01 * 0x1p-22 * (static_cast<double>(products) / 16 + 2);
}

}  // namespace

/// One query's exact result and bounds, and scratch that is kept from query to query.
struct AttentionReference::Query {
  std::vector<double> scores;
  std::vector<double> out;
  std::vector<double> magnitude;  ///< on a GPU: A
  std::vector<double> squares;    ///< on a GPU, of random values: R^2
  double lse = 0;
  double sum = 0;           ///< of exp(t_j - max t)
  double weight_error = 0;  ///< E + G (1 + E); on a GPU: E
  double sum_error = 0;     ///< on a GPU: G
  double lse_bound = 0;
  Outcome all = Outcome::finite();  ///< what the scores make of all of O
  Outcome lse_outcome = Outcome::finite();
  std::vector<Outcome> values;  ///< what values make of each element; empty: nothing special
};

AttentionReference::AttentionReference(const AttentionProblem& problem, const std::uint16_t* k,
                                       const std::uint16_t* v)
    : problem_(problem) {
  const std::uint64_t dim = problem.head_dim;
  const std::uint64_t n = problem.sequence;
  keys_.resize(problem.key_heads * dim * n);
  values_.resize(keys_.size());
  key_norms_.assign(problem.key_heads * n, 0.0);
  values_max_.assign(problem.key_heads * dim, 0.0);
  for (std::uint64_t row = 0; row < n; ++row) {
    bool finite = true;
    for (std::uint64_t head = 0; head < problem.key_heads; ++head) {
      double squares = 0;
      for (std::uint64_t i = 0; i < dim; ++i) {
        const std::uint64_t from = (row * problem.key_heads + head) * dim + i;
        const float key = to_float(problem.type, k[from]);
        const float value = to_float(problem.type, v[from]);
        keys_[(head * dim + i) * n + row] = key;
        values_[(head * n + row) * dim + i] = value;
        squares += double{key} * double{key};
        double& largest = values_max_[head * dim + i];
        if (std::isfinite(value)) largest = std::max(largest, std::fabs(double{value}));
        finite = finite && std::isfinite(value);
      }
      key_norms_[head * n + row] = std::sqrt(squares);
    }
    if (!finite) special_.push_back(row);
  }
}

/// Sees to scores and values that are not finite; whether there is anything to compute beside.
bool AttentionReference::evaluate_special(std::uint64_t seen, std::uint64_t key_head, double norm,
                                          Query& query) const {
  const std::uint64_t dim = problem_.head_dim;
  const std::uint64_t n = problem_.sequence;
  const double* const t = query.scores.data();
  query.all = query.lse_outcome = Outcome::finite();
  query.values.clear();
  double largest = -std::numeric_limits<double>::infinity();
  bool leaves_fp32 = false;
  for (std::uint64_t j = 0; j < seen; ++j) {
    if (std::isnan(t[j]) || t[j] == std::numeric_limits<double>::infinity()) {
      query.all = query.lse_outcome = Outcome::nan();
      return false;
    }
    largest = std::max(largest, t[j]);
    const double magnitude = std::fabs(problem_.scale) * norm * key_norms_[key_head * n + j];
    leaves_fp32 = leaves_fp32 || (std::isfinite(t[j]) && 2 * magnitude >= kOverflowFp32);
  }
  if (leaves_fp32) {
    query.all = query.lse_outcome = Outcome::anything();
    return false;
  }
  if (std::isinf(largest)) {
    query.all = Outcome::nan();
    query.lse_outcome = Outcome::infinity(-1);
    return false;
  }
  for (const std::uint64_t row : special_) {
    if (row >= seen) break;
    if (query.values.empty()) query.values.assign(dim, Outcome::finite());
    const double weight = std::exp(t[row] - largest);
    const float* const value = values_.data() + (key_head * n + row) * dim;
    for (std::uint64_t i = 0; i < dim; ++i) {
      if (std::isfinite(value[i])) continue;
      Outcome effect = Outcome::of(double{value[i]});
      if (std::isinf(t[row])) {
        effect = Outcome::nan();
      } else if (weight < 0x1p-100) {
        effect = effect | Outcome::nan();
      }
      query.values[i] = query.values[i] + effect;
    }
  }
  return true;
}

void AttentionReference::evaluate(std::uint64_t position, std::uint32_t head,
                                  const std::uint16_t* q, Query& query) const {
  const std::uint64_t dim = problem_.head_dim;
  const std::uint64_t n = problem_.sequence;
  const std::uint64_t seen = problem_.causal ? position + 1 : n;
  const std::uint64_t key_head = head / (problem_.query_heads / problem_.key_heads);
  query.scores.assign(seen, 0.0);
  double* const t = query.scores.data();
  double squares = 0;
  for (std::uint64_t i = 0; i < dim; ++i) {
    const double element = double{to_float(problem_.type, q[i])};
    squares += element * element;
    const float* const keys = keys_.data() + (key_head * dim + i) * n;
    for (std::uint64_t j = 0; j < seen; ++j) t[j] += element * double{keys[j]};
  }
  for (std::uint64_t j = 0; j < seen; ++j) t[j] *= problem_.scale;
  const double norm = std::sqrt(squares);
  if (!evaluate_special(seen, key_head, norm, query)) return;
  const double largest = *std::max_element(t, t + seen);

  const double* const key_norms = key_norms_.data() + key_head * n;
  const double tiles = static_cast<double>(problem_.tiles);
  const auto score_error = [&](std::uint64_t j) {  // |d_j|
    if (problem_.on_gpu)
      return tensor_core_error(dim) * std::fabs(problem_.scale) * norm * key_norms[j];
    return fp32_error(static_cast<double>(dim) + 3) * std::fabs(problem_.scale) * norm *
               key_norms[j] +
           static_cast<double>(dim) * 0x1p-149 * (1 + key_norms[j]);
  };
  double worst_score_error = 0;
  for (std::uint64_t j = 0; j < seen; ++j) {
    if (std::isfinite(t[j])) worst_score_error = std::max(worst_score_error, score_error(j));
  }

  query.out.assign(dim, 0.0);
  query.magnitude.assign(problem_.on_gpu ? dim : 0, 0.0);
  query.squares.assign(problem_.on_gpu && problem_.random ? dim : 0, 0.0);
  const double weights_sum =  // on a GPU: H
      (static_cast<double>(problem_.tile_keys) / 4 + tiles + 4) * 0x1p-23;
  query.sum_error = weights_sum + tensor_core_error(seen) + 1.01 * 0x1p-22 * tiles;
  const double each = unit_roundoff(problem_.type) + query.sum_error;
  double sum = 0;
  double weighted_error = 0;
  double worst_exponent = 0;
  for (std::uint64_t j = 0; j < seen; ++j) {
    if (!std::isfinite(t[j])) continue;  // no weight
    const double weight = std::exp(t[j] - largest);
    const double error = score_error(j);
    const double exponent =
        problem_.on_gpu
            ? error + worst_score_error + 0x1p-22 * (largest - t[j]) + (tiles + 2) * 0x1p-20
            : error + kUnitRoundoffFp32 * (largest - t[j] + error + worst_score_error) +
                  4 * (tiles + 1) * kUnitRoundoffFp32;
    sum += weight;
    weighted_error += weight * std::expm1(exponent);
    worst_exponent = std::max(worst_exponent, exponent);
    const float* const value = values_.data() + (key_head * n + j) * dim;
    double* const out = query.out.data();
    for (std::uint64_t i = 0; i < dim; ++i) out[i] += weight * double{value[i]};
    double* const magnitude = query.magnitude.data();
    for (std::uint64_t i = 0; i < query.magnitude.size(); ++i)
      magnitude[i] += weight * std::fabs(double{value[i]});
    const double moved = weight * (std::expm1(exponent) + each);
    for (std::uint64_t i = 0; i < query.squares.size(); ++i)
      query.squares[i] += moved * moved * double{value[i]} * double{value[i]};
  }
  for (double& element : query.out) element /= sum;
  for (double& element : query.magnitude) element /= sum;
  for (double& element : query.squares) element /= sum * sum;
  query.sum = sum;
  query.lse = largest + std::log(sum);
  if (problem_.on_gpu) {
    query.weight_error = weighted_error / sum;
    query.lse_bound =
        kSecondOrder *
        (-std::log1p(-std::min(0.5, query.weight_error + weights_sum)) + worst_score_error +
         0x1p-22 * (std::fabs(largest) + std::fabs(query.lse) + 1));
    return;
  }
  const double e = weighted_error / sum + static_cast<double>(seen) * (tiles + 1) * 0x1p-125;
  const double g = fp32_error(static_cast<double>(problem_.tile_keys) + 2 * tiles + 3);
  query.weight_error = e + g * (1 + e);
  query.lse_bound =
      (query.weight_error < 0.5 ? -std::log1p(-query.weight_error) : worst_exponent + 2 * g) +
      kUnitRoundoffFp32 * std::fabs(query.lse) + 0x1p-50 * std::fabs(query.lse);
}

/// Before the last rounding; `largest` of the values.
double AttentionReference::bound_on_gpu(const Query& query, std::uint64_t i, double largest) const {
  const double keys = static_cast<double>(query.scores.size());
  const double subnormal = problem_.type == DataType::kF16 ? 0x1p-25 * largest / query.sum : 0;
  const double worst = query.weight_error * largest +
                       (unit_roundoff(problem_.type) + query.sum_error) * query.magnitude[i] +
                       subnormal * keys;
  const double random = problem_.random
                            ? kWidest * std::sqrt(query.squares[i] + subnormal * subnormal * keys)
                            : worst;
  return kSecondOrder * (std::min(worst, random) +
                         std::fabs(query.out[i]) * (query.weight_error + query.sum_error));
}

/// The mean square of the error, if values are random; 0: not known.
double AttentionReference::mean_on_gpu(const Query& query, std::uint64_t i, double largest) const {
  if (!problem_.on_gpu || !problem_.random) return 0;
  const double subnormal = problem_.type == DataType::kF16 ? 0x1p-25 * largest / query.sum : 0;
  const double out = std::fabs(query.out[i]);
  const double before = std::sqrt(query.squares[i]) +
                        subnormal * std::sqrt(static_cast<double>(query.scores.size())) +
                        out * (query.weight_error + query.sum_error);
  const double rounding = unit_roundoff(problem_.type) * out;
  return kSecondOrder * kSecondOrder * (before * before + rounding * rounding);
}

AttentionReference::Result AttentionReference::compare(std::uint64_t first, std::uint64_t rows,
                                                       const std::uint16_t* q,
                                                       const std::uint16_t* o,
                                                       const float* lse) const {
  const std::uint64_t dim = problem_.head_dim;
  const double unit = unit_roundoff(problem_.type);
  const double subnormal = problem_.type == DataType::kF16 ? 0x1p-25 : 0x1p-134;
  Result result;
  Query query;
  for (std::uint64_t row = 0; row < rows; ++row) {
    for (std::uint32_t head = 0; head < problem_.query_heads; ++head) {
      const std::uint64_t index = row * problem_.query_heads + head;
      evaluate(first + row, head, q + index * dim, query);
      const double* const largest =
          values_max_.data() + head / (problem_.query_heads / problem_.key_heads) * dim;
      const auto element = [&](std::uint64_t i) {
        return double{to_float(problem_.type, o[index * dim + i])};
      };
      if (!query.all.may_be_finite() || query.all == Outcome::anything()) {
        for (std::uint64_t i = 0; i < dim; ++i) {
          result.out.add(index * dim + i, element(i), 0, kUnbounded, query.all);
        }
        if (lse != nullptr)
          result.lse.add(index, double{lse[index]}, 0, kUnbounded, query.lse_outcome);
        continue;
      }
      for (std::uint64_t i = 0; i < dim; ++i) {
        const double exact = query.out[i];
        double bound = 2 * largest[i];
        if (problem_.on_gpu) {
          bound = std::min(bound, bound_on_gpu(query, i, largest[i]));
        } else if (query.weight_error < 0.5) {
          bound = std::min(bound, query.weight_error * (largest[i] + std::fabs(exact)) /
                                      (1 - query.weight_error));
        }
        bound += unit * (std::fabs(exact) + bound) + subnormal;
        const Outcome right = query.values.empty() ? Outcome::finite() : query.values[i];
        result.out.add(index * dim + i, element(i), exact, bound, right,
                       mean_on_gpu(query, i, largest[i]));
      }
      if (lse != nullptr) result.lse.add(index, double{lse[index]}, query.lse, query.lse_bound);
    }
  }
  return result;
}

}  // namespace mk::tools
