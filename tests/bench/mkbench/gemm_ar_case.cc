#include <fmt/format.h>

#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/gemm_case.h"

namespace mk::bench {
namespace {

class GemmArRank : public GemmRank {
 public:
  GemmArRank(const BenchSpec& spec, const GemmOptions& options, std::uint32_t rank,
             GemmAllReduce op)
      : GemmRank(spec, options, rank), op_(std::move(op)) {}

  void make_inputs(std::uint32_t launch) override {
    begin(launch);
    a_ = rows_of(matrix_a(rank_), 0, m_);
    b_ = rows_of(matrix_b(rank_), 0, options_.k);
    c_.resize(m_ * c_columns() * sizeof(std::uint16_t));
    upload();
  }
  Result<LaunchStats> launch(LaunchMode mode) override {
    return launch_with([&](const GemmArguments& given) { return op_.launch(given, mode); });
  }
  tools::Comparison verify() const override {
    const RankShare rows = rows_of_rank(rank_);
    return compare_sum(rows, c_.as<std::uint16_t>() + rows.first * c_columns());
  }
  /// Each rank owns 1/L of C, and sends its node's sum of that to its rail peers.
  Work work() const override {
    const double partial = static_cast<double>(m_ * partial_row_bytes()) / spec_.local;
    Work work;
    work.flops = flops();
    work.network_bytes = (spec_.nodes - 1) * partial;
    work.link_bytes = spec_.nodes > 1 ? partial : 0;
    return work;
  }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

 private:
  GemmAllReduce op_;
};

class GemmArCase : public GemmCase {
 public:
  const char* name() const override { return "gemm-ar"; }
  const char* title() const override { return "GEMM+AllReduce"; }
  const char* help() const override { return "C = sum over ranks of A B, on every rank"; }
  void add_options(CLI::App& command) override {
    add_gemm_options(command,
                     {"rows of A and C", "columns of B and C", "inner dimension of each rank"});
    add_partials_option(command);
  }
  std::string describe(const BenchSpec& spec) const override {
    const GemmOptions& o = options_;
    return fmt::format("C[{}, {}] = sum of A[{}, {}] B[{}, {}], {}", o.m, o.n, o.m, o.k, o.k, o.n,
                       spec.dtype) +
           describe_finish();
  }
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    return {problem(kernels::plan::Op::kGemmAr, spec)};
  }
  bool outputs_are_equal() const override { return true; }
  void keep_work_per_rank(std::uint32_t) override {}

  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const auto shape = shape_of<GemmAllReduce::Shape>(spec);
    MK_ASSIGN_OR_RETURN(auto op, GemmAllReduce::create(session, shape, tuning(spec)));
    return std::make_unique<GemmArRank>(spec, options_, rank, std::move(op));
  }
};

}  // namespace

std::unique_ptr<OperatorCase> make_gemm_ar_case() { return std::make_unique<GemmArCase>(); }

}  // namespace mk::bench
