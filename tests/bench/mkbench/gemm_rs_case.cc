#include <fmt/format.h>

#include "mkernel/gemm_reduce_scatter.h"
#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/gemm_case.h"

namespace mk::bench {
namespace {

class GemmRsRank : public GemmRank {
 public:
  GemmRsRank(const BenchSpec& spec, const GemmOptions& options, std::uint32_t rank,
             GemmReduceScatter op)
      : GemmRank(spec, options, rank), op_(std::move(op)) {}

  void make_inputs(std::uint32_t launch) override {
    begin(launch);
    a_ = rows_of(matrix_a(rank_), 0, m_);
    b_ = rows_of(matrix_b(rank_), 0, options_.k);
    c_.resize(rows_of_rank(rank_).count * c_columns() * sizeof(std::uint16_t));
    upload();
  }
  Result<LaunchStats> launch(LaunchMode mode) override {
    return launch_with([&](const GemmArguments& given) { return op_.launch(given, mode); });
  }
  tools::Comparison verify() const override {
    return compare_sum(rows_of_rank(rank_), c_.as<std::uint16_t>());
  }
  /// A rank sends the sums of every other node's rows of its rail.
  Work work() const override {
    Work work;
    work.flops = flops();
    for (std::uint32_t node = 0; node < spec_.nodes; ++node) {
      if (node == rank_ / spec_.local) continue;
      const std::uint32_t owner = node * spec_.local + rank_ % spec_.local;
      const auto bytes = static_cast<double>(rows_of_rank(owner).count * partial_row_bytes());
      work.network_bytes += bytes;
      work.link_bytes = std::max(work.link_bytes, bytes);
    }
    return work;
  }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

 private:
  GemmReduceScatter op_;
};

class GemmRsCase : public GemmCase {
 public:
  const char* name() const override { return "gemm-rs"; }
  const char* title() const override { return "GEMM+ReduceScatter"; }
  const char* help() const override {
    return "C = sum over ranks of A B, each rank gets its share of C's rows";
  }
  void add_options(CLI::App& command) override {
    add_gemm_options(command,
                     {"rows of A and C", "columns of B and C", "inner dimension of each rank"});
    add_partials_option(command);
  }
  std::string describe(const BenchSpec& spec) const override {
    const GemmOptions& o = options_;
    return fmt::format("C[{}, {}] = sum of A[{}, {}] B[{}, {}], 1/{} of the rows each, {}", o.m,
                       o.n, o.m, o.k, o.k, o.n, spec.world(), spec.dtype) +
           describe_finish();
  }
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    return {problem(kernels::plan::Op::kGemmRs, spec)};
  }
  bool outputs_are_equal() const override { return false; }
  void keep_work_per_rank(std::uint32_t) override {}

  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const auto shape = shape_of<GemmReduceScatter::Shape>(spec);
    MK_ASSIGN_OR_RETURN(auto op, GemmReduceScatter::create(session, shape, tuning(spec)));
    return std::make_unique<GemmRsRank>(spec, options_, rank, std::move(op));
  }
};

}  // namespace

std::unique_ptr<OperatorCase> make_gemm_rs_case() { return std::make_unique<GemmRsCase>(); }

}  // namespace mk::bench
