#include <fmt/format.h>

#include "client/tools/numeric/gemm_reference.h"
#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/gemm_options.h"

namespace mk::bench {
namespace {

class GemmArRank : public RankCase {
 public:
  GemmArRank(const BenchSpec& spec, const GemmOptions& options, std::uint32_t rank,
             GemmAllReduce op)
      : spec_(spec), options_(options), rank_(rank), op_(std::move(op)) {}

  void make_inputs(std::uint32_t launch) override {
    launch_ = launch;
    m_ = extent_of(spec_, launch, 1, options_.m);
    a_ = rows_of(matrix_a(rank_), 0, m_);
    b_ = rows_of(matrix_b(rank_), 0, options_.k);
    c_.resize(m_ * options_.n * sizeof(std::uint16_t));
  }

  Result<LaunchStats> launch(LaunchMode mode) override {
    return op_.launch(a_.data(), b_.data(), c_.as<void>(), m_, mode);
  }

  std::vector<Output*> outputs() override { return {&c_}; }

  tools::Comparison verify() const override {
    const std::uint64_t first = m_ * rank_ / spec_.world();
    const std::uint64_t rows = m_ * (rank_ + 1) / spec_.world() - first;
    tools::GemmReference reference(rows, options_.n, spec_.nodes, spec_.local, data_type_of(spec_));
    for (std::uint32_t rank = 0; rank < spec_.world(); ++rank) {
      reference.add_rank(rows_of(matrix_a(rank), first, rows).data(),
                         rows_of(matrix_b(rank), 0, options_.k).data(), options_.k, 1, 1);
    }
    return reference.compare(c_.as<std::uint16_t>() + first * options_.n);
  }

  /// Each rank owns 1/L of C: it gets the local peers' partials, sends its sum to its rail peers,
  /// and hands the result to the local peers.
  Work work() const override {
    const double c_bytes = static_cast<double>(m_ * options_.n * sizeof(std::uint16_t));
    Work work;
    work.flops = 2.0 * static_cast<double>(m_ * options_.n * options_.k);
    work.network_bytes = (spec_.nodes - 1) * c_bytes / spec_.local;
    work.link_bytes = spec_.nodes > 1 ? c_bytes / spec_.local : 0;
    work.local_bytes = 2 * (spec_.local - 1) * c_bytes / spec_.local;
    return work;
  }

 private:
  tools::RandomMatrix matrix_a(std::uint32_t rank) const {
    return input_matrix(spec_, launch_, rank, 0, options_.k);
  }
  tools::RandomMatrix matrix_b(std::uint32_t rank) const {
    return input_matrix(spec_, launch_, rank, 1, options_.n);
  }

  const BenchSpec& spec_;
  const GemmOptions options_;
  const std::uint32_t rank_;
  GemmAllReduce op_;
  std::uint32_t launch_ = 0;
  std::uint64_t m_ = 0;
  Elements a_, b_;
  Output c_;
};

class GemmArCase : public CaseWithOptions<GemmOptions> {
 public:
  const char* name() const override { return "gemm-ar"; }
  const char* title() const override { return "GEMM+AllReduce"; }
  const char* help() const override { return "C = sum over ranks of A B, on every rank"; }
  void add_options(CLI::App& command) override {
    add_gemm_options(command, options_,
                     {"rows of A and C", "columns of B and C", "inner dimension of each rank"});
  }
  std::string describe(const BenchSpec& spec) const override {
    const GemmOptions& o = options_;
    return fmt::format("C[{}, {}] = sum of A[{}, {}] B[{}, {}], {}", o.m, o.n, o.m, o.k, o.k, o.n,
                       spec.dtype);
  }
  bool outputs_are_equal() const override { return true; }
  void keep_work_per_rank(std::uint32_t, std::uint32_t) override {}

  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const GemmAllReduce::Shape shape{options_.m, options_.n, options_.k, data_type_of(spec)};
    MK_ASSIGN_OR_RETURN(
        auto op,
        GemmAllReduce::create(session, shape, tuning_of<GemmAllReduce::Tuning>(options_, spec)));
    return std::make_unique<GemmArRank>(spec, options_, rank, std::move(op));
  }
};

}  // namespace

std::unique_ptr<OperatorCase> make_gemm_ar_case() { return std::make_unique<GemmArCase>(); }

}  // namespace mk::bench
