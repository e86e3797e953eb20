/// \file
/// What the cases that multiply one matrix per rank share: shape, tiling, inputs.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "client/tools/executor_matrices.h"
#include "tests/bench/mkbench/inputs.h"
#include "tests/bench/mkbench/operator_case.h"

namespace mk::bench {

struct GemmOptions {
  std::uint64_t m = 1024, n = 1024, k = 512;
  /// 0: the operator chooses.
  std::uint32_t tile_m = 0, tile_n = 0, chunk_bytes = 0, compute_blocks = 0;
  bool gathered = false;  ///< AllGather+GEMM: hand out the gathered A as well
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GemmOptions, m, n, k, tile_m, tile_n, chunk_bytes,
                                   compute_blocks, gathered)

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
  Tuning tuning(const BenchSpec& spec) const;
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
  /// Compares rows of the sum over all ranks of A_r B_r.
  tools::Comparison compare_sum(const RankShare& rows, const std::uint16_t* c) const;
  /// After the inputs were made: puts them, and poisoned outputs, where the executor wants them.
  void upload(Output* gathered = nullptr);
  /// Launches with the matrices where the executor wants them, and fetches the outputs.
  Result<LaunchStats> launch_with(
      const std::function<Result<LaunchStats>(const void* a, const void* b, void* c,
                                              void* gathered)>& launch,
      Output* gathered = nullptr);
  double flops() const { return 2.0 * static_cast<double>(m_ * options_.n * options_.k); }

  const BenchSpec& spec_;
  const GemmOptions options_;
  const std::uint32_t rank_;
  std::uint32_t launch_ = 0;
  std::uint64_t m_ = 0;
  Elements a_, b_;
  Output c_;

 private:
  enum Place : std::size_t { kA, kB, kC, kGathered, kLeadA, kLeadC, kLeadGathered };
  std::optional<tools::ExecutorMatrices> there_;
  Status upload_;         ///< its first error
  bool leading_ = false;  ///< what is launched leads up to the launch that counts
};

}  // namespace mk::bench
