/// \file
/// What the cases that multiply one matrix per rank share: shape, tiling, inputs.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "client/tools/executor_matrices.h"
#include "tests/bench/mkbench/inputs.h"
#include "tests/bench/mkbench/operator_case.h"
#include "tests/bench/mkbench/tuning_options.h"

namespace mk::bench {

struct GemmOptions : TuningOptions {
  std::uint64_t m = 1024, n = 1024, k = 512;
  bool gathered = false;  ///< AllGather+GEMM: hand out the gathered A as well
  std::string activation = "none";
  bool bias = false;
  std::string partials = "element";  ///< of those that sum: or "f32"
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GemmOptions, m, n, k, tile_m, tile_n, chunk_bytes,
                                   compute_blocks, gathered, activation, bias, partials, partition)

Activation activation_of(const GemmOptions& options);

class GemmCase : public CaseWithOptions<GemmOptions> {
 public:
  void make_large() override {
    options_.m = 4096;
    options_.n = 2048;
    options_.k = 1024;
  }

 protected:
  struct Help {
    const char *m, *n, *k;
  };
  void add_gemm_options(CLI::App& command, const Help& help);
  void add_partials_option(CLI::App& command);
  kernels::plan::Problem problem(kernels::plan::Op op, const BenchSpec& spec) const;
  /// The options' part of an operator's shape.
  template <class Shape>
  Shape shape_of(const BenchSpec& spec) const {
    Shape shape{options_.m, options_.n, options_.k, data_type_of(spec)};
    shape.epilogue = {activation_of(options_), options_.bias};
    if constexpr (requires { shape.partials; })
      shape.partials = options_.partials == "f32" ? Partials::kF32 : Partials::kElement;
    return shape;
  }
  /// ", gelu, bias, partial sums f32", for users.
  std::string describe_finish() const;
};

/// Rank r's A_r (`a_rows` x k) and B_r (k x n) of a launch with m rows.
class GemmRank : public RankCase {
 public:
  std::vector<Output*> outputs() override { return {&c_}; }
  Status lead(LaunchMode mode, std::uint32_t launches) override;

 protected:
  GemmRank(const BenchSpec& spec, const GemmOptions& options, std::uint32_t rank)
      : spec_(spec), options_(options), rank_(rank) {}

  /// The launch's m.
  void begin(std::uint32_t launch) {
    launch_ = launch;
    m_ = extent_of(spec_, launch, 1, options_.m);
  }
  RankShare rows_of_rank(std::uint32_t rank) const { return share_of(m_, spec_.world(), rank); }
  tools::RandomMatrix matrix_a(std::uint32_t rank) const {
    return input_matrix(spec_, launch_, rank, 0, options_.k);
  }
  tools::RandomMatrix matrix_b(std::uint32_t rank) const {
    return input_matrix(spec_, launch_, rank, 1, options_.n);
  }
  /// Of C: half as many as the product's, if it is gated.
  std::uint64_t c_columns() const {
    return activation_of(options_) == Activation::kGatedSilu ? options_.n / 2 : options_.n;
  }
  /// Of a row of partial sums.
  std::uint64_t partial_row_bytes() const {
    return options_.n * (options_.partials == "f32" ? sizeof(float) : sizeof(std::uint16_t));
  }
  /// Whose bias this rank adds: operators that sum, all the same.
  virtual std::uint32_t bias_rank() const { return 0; }
  /// n elements, those of `rank`; none unless asked for.
  Elements bias_of(std::uint32_t rank) const;
  /// Compares rows of the sum over all ranks of A_r B_r, with rank 0's bias.
  tools::Comparison compare_sum(const RankShare& rows, const std::uint16_t* c) const;
  /// After the inputs were made: puts them, and poisoned outputs, where the executor wants them.
  void upload(Output* gathered = nullptr);
  /// Launches with the matrices where the executor wants them, and fetches the outputs.
  Result<LaunchStats> launch_with(
      const std::function<Result<LaunchStats>(const GemmArguments& arguments)>& launch,
      Output* gathered = nullptr);
  double flops() const { return 2.0 * static_cast<double>(m_ * options_.n * options_.k); }

  const BenchSpec& spec_;
  const GemmOptions options_;
  const std::uint32_t rank_;
  std::uint32_t launch_ = 0;
  std::uint64_t m_ = 0;
  Elements a_, b_, bias_;
  Output c_;

 private:
  enum Place : std::size_t { kA, kB, kC, kGathered, kLeadA, kLeadC, kLeadGathered, kBias };
  std::optional<tools::ExecutorMatrices> there_;
  Status upload_;         ///< its first error
  bool leading_ = false;  ///< what is launched leads up to the launch that counts
};

}  // namespace mk::bench
