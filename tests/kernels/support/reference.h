/// \file
/// C = sum of A_r B_r in float64, and how far each element of the operator's result may be from it.
/// The derivation is in kernels/ops/gemm_ar/README.md; this follows it step by step.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/comm/epilogue.h"
#include "kernels/comm/types.h"

namespace mk::kernels::testing {

/// Of the element type.
double to_double(DType dtype, std::uint16_t value);
std::uint16_t from_float(DType dtype, float value);

/// `count` values from [-1, 1).
std::vector<std::uint16_t> random_values(DType dtype, std::size_t count, std::mt19937_64& random);

/// Makes the last `gap` of every `stride` elements NaNs: what lies between rows is in no result.
void poison_gaps(std::vector<std::uint16_t>& matrix, std::uint64_t stride, std::uint64_t gap);

/// Adds up the ranks' products, in rank order, and says what is allowed.
class Reference {
 public:
  Reference(DType dtype, std::uint32_t nodes, std::uint32_t locals, std::uint32_t m,
            std::uint32_t n, Partials partials = Partials::kElement);

  /// The next rank's A (m rows, lda apart) and B ([k][n], or [n][k] for kNK; ldb apart).
  void add_rank(const std::uint16_t* a, std::uint64_t lda, const std::uint16_t* b,
                std::uint64_t ldb, std::uint32_t k, BLayout b_layout);

  /// After all ranks, where there is an epilogue: `bias` has n elements if it says so.
  void finish(const Epilogue& epilogue, const std::vector<std::uint16_t>& bias);

  /// Empty if every element of `c` (row-major, ldc apart) is within its bound; else the first that
  /// is not.
  std::string check(const std::uint16_t* c, std::uint64_t ldc) const;

  /// The largest error over its bound seen by `check` so far: 1 would be just allowed.
  double worst() const { return worst_; }

 private:
  /// An exact value, and how far the computed one may be from it.
  struct Bounded {
    double exact = 0;
    double error = 0;
  };
  void round(Bounded& value) const;
  void round_partial(Bounded& value) const;
  void close_node();
  Bounded total(std::size_t index) const;
  Bounded finished(const Bounded& gate, const Bounded& up) const;

  DType dtype_;
  std::uint32_t nodes_;
  std::uint32_t locals_;
  std::uint32_t m_;
  std::uint32_t n_;
  Partials partials_;
  Epilogue epilogue_;
  std::vector<std::uint16_t> bias_;
  std::uint32_t ranks_ = 0;
  struct Sum {
    Bounded value;
    double magnitude = 0;  ///< of the computed terms, summed
  };
  std::vector<Sum> node_;
  std::vector<Sum> total_;
  mutable double worst_ = 0;
};

}  // namespace mk::kernels::testing
