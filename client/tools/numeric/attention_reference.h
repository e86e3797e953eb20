/// \file
/// What attention must give, in float64, with a bound for every element.
///
/// For one query q at position i and the keys j it sees (causal: j <= i), with t_j = scale q.k_j,
/// w_j = exp(t_j) / sum exp(t): O = sum w_j v_j, LSE = ln sum exp(t_j). The operator works in fp32
/// (u = 2^-24, g(n) = n u / (1 - n u)), over T tiles of at most B keys, in base 2:
///
///  1. scores: the query is multiplied by scale * log2(e), rounded; then a dot product of length D.
///     In natural units s_j = t_j + d_j, |d_j| <= g(D + 3) |scale| sum |q||k_j|, and that sum is at
///     most |q|_2 |k_j|_2. (Subnormal products: D 2^-149 (1 + |k_j|_2) more.)
///  2. weights: 2^x is within 4 u of itself (kernels/cpu/attention_math.h); x, a difference to the
///     running maximum, is rounded. A weight is rescaled once per later tile; the differences of
///     the maxima add up to the distance to the last one. So key j's weight is exp(t_j) (1 + e_j)
///     times what all have in common, |e_j| <= exp(|d_j| + u (max t - t_j + |d_j| + max |d|) +
///     4 (T + 1) u) - 1. Weights below 2^-125 of the maximum are lost: n (T + 1) 2^-125 of the sum.
///  3. sums: within a tile from zero, then rescaled and added: a term meets B + 1 roundings in its
///     tile and 2 for each tile, so numerator and denominator are within g(B + 2 T + 1) of the sum
///     of their terms' magnitudes; the quotient rounds twice more.
///
/// With E = sum w_j |e_j| + lost, G = g(B + 2 T + 3), V the largest |v_j|: numerator minus O times
/// denominator is at most E (V + |O|) + G (1 + E) (V + |O|), hence
///
///     |O' - O| <= (E + G (1 + E)) (V + |O|) / (1 - E - G (1 + E)),  or 2 V if that is less
///     |LSE' - LSE| <= -ln(1 - E - G (1 + E)) + u |LSE|
///
/// and rounding O to the element type adds v (|O| + the above), v = 2^-8 or 2^-11, and half the
/// smallest subnormal.
///
/// On a GPU (AttentionProblem::on_gpu) products are those of tensor cores, which add 16 at a time
/// and truncate, and the second one takes weights that are rounded to the element type:
///
///  1. |d_j| <= 1.01 2^-22 (D/16 + 2) |scale| |q|_2 |k_j|_2;
///  2. |e_j| <= exp(|d_j| + max |d| + 2^-22 (max t - t_j) + (T + 2) 2^-20) - 1;
///  3. H = (B/4 + T + 4) 2^-23 for the sum of the weights, and with G = H + 1.01 2^-22 (n/16 + 2 +
///  T),
///     E = sum w_j |e_j|, A the sum of w_j |v_j| and V the largest |v_j|,
///
///     |O' - O| <= E V + (v + G) A + |O| (E + G) + [f16] 2^-25 n V / (sum of exp(t_j - max t))
///     |LSE' - LSE| <= -ln(1 - E - H) + max |d| + 2^-22 (|max t| + |LSE| + 1)
///
/// each times 1.05 for second-order terms; O is then rounded. The worst case of v A says little of
/// a long sequence, in which roundings cancel: there the LSE shows a key too many or too few.
///
/// Values with signs like coin tosses (AttentionProblem::random) say more. Scores, and so the
/// errors of weights, know nothing of those signs. As in gemm_reference.h, sums over keys then are
/// at most ten times the root of their terms' squares:
///
///     |O' - O| <= 10 R + |O| (E + G), R^2 = sum w_j^2 (|e_j| + v + G)^2 v_j^2,
///
/// for f16 with 2^-25 sqrt(n) V / (...) in R, and in the mean without the ten.
///
/// Only keys that the query sees count, whatever the others are. A score that is a NaN or +infinity
/// makes all of the query's results NaN; -infinity gives the key no weight; where all scores are
/// -infinity, O is NaN and the LSE -infinity. A value that is not finite has its usual effect, but
/// one whose weight may be lost (below 2^-100) may also give a NaN: 0 times infinity. Where a score
/// may leave fp32's range, anything is right.
#pragma once

#include <cstdint>
#include <vector>

#include "client/tools/numeric/comparison.h"
#include "client/tools/numeric/elements.h"

namespace mk::tools {

struct AttentionProblem {
  std::uint64_t sequence = 0;
  std::uint32_t query_heads = 1;
  std::uint32_t key_heads = 1;  ///< query head h uses key head h / (query_heads / key_heads)
  std::uint32_t head_dim = 64;
  bool causal = false;
  double scale = 1;
  DataType type = DataType::kBf16;
  std::uint32_t tile_keys = 128;  ///< B
  std::uint64_t tiles = 1;        ///< T, at most
  bool on_gpu = false;            ///< by tensor cores
  bool random = false;            ///< values have signs like coin tosses

  /// T for a sequence in `parts` parts of about the same size, whose tiles straddle none.
  static constexpr std::uint64_t tiles_over(std::uint64_t sequence, std::uint64_t parts,
                                            std::uint64_t tile_keys) {
    return parts * (((sequence + parts - 1) / parts + tile_keys - 1) / tile_keys);
  }
  /// B of the kernels for GPUs.
  static constexpr std::uint32_t gpu_tile_keys(std::uint32_t head_dim) {
    return head_dim == 64 ? 128 : 176;
  }
};

/// Knows all keys and values; compares any rows of queries.
class AttentionReference {
 public:
  /// `k` and `v`: [sequence][key_heads][head_dim].
  AttentionReference(const AttentionProblem& problem, const std::uint16_t* k,
                     const std::uint16_t* v);

  /// Compares `rows` rows from position `first` on: `q` and `o` [rows][query_heads][head_dim],
  /// `lse` [rows][query_heads] or null. Indices count from the first element of these.
  struct Result {
    Comparison out;
    Comparison lse;
  };
  Result compare(std::uint64_t first, std::uint64_t rows, const std::uint16_t* q,
                 const std::uint16_t* o, const float* lse) const;

 private:
  struct Query;
  void evaluate(std::uint64_t position, std::uint32_t head, const std::uint16_t* q,
                Query& query) const;
  double bound_on_gpu(const Query& query, std::uint64_t i, double largest) const;
  double mean_on_gpu(const Query& query, std::uint64_t i, double largest) const;
  bool evaluate_special(std::uint64_t seen, std::uint64_t key_head, double norm,
                        Query& query) const;

  AttentionProblem problem_;
  std::vector<float> keys_;             ///< [key head][head_dim][sequence]
  std::vector<float> values_;           ///< [key head][sequence][head_dim]
  std::vector<double> key_norms_;       ///< [key head][sequence]
  std::vector<double> values_max_;      ///< [key head][head_dim], of those that are finite
  std::vector<std::uint64_t> special_;  ///< rows with a value that is not finite
};

}  // namespace mk::tools
