#include <fmt/format.h>

#include <algorithm>
#include <type_traits>

#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/gemm_case.h"

namespace mk::bench {
namespace {

/// Whether each rank gets its share of the sum's rows. Otherwise all get the whole sum.
template <class Op>
constexpr bool kScatters = std::is_same_v<Op, GemmReduceScatter>;

template <class Op>
class GemmSumRank : public GemmRank {
 public:
  GemmSumRank(const BenchSpec& spec, const GemmOptions& options, std::uint32_t rank, Op op)
      : GemmRank(spec, options, rank), op_(std::move(op)) {}

  void make_inputs(std::uint32_t launch) override {
    begin(launch);
    a_ = rows_of(matrix_a(rank_), 0, m_);
    b_ = rows_of(matrix_b(rank_), 0, options_.k);
    const std::uint64_t rows = kScatters<Op> ? rows_of_rank(rank_).count : m_;
    c_.resize(rows * c_columns() * sizeof(std::uint16_t));
    upload();
  }
  Result<LaunchStats> launch(LaunchMode mode) override {
    return launch_with([&](const GemmArguments& given) { return op_.launch(given, mode); });
  }
  tools::Comparison verify() const override {
    const RankShare rows = rows_of_rank(rank_);
    return compare_sum(rows,
                       c_.as<std::uint16_t>() + (kScatters<Op> ? 0 : rows.first * c_columns()));
  }
  /// A scattered sum: a rank sends its rail peers its node's sums of their rows. The whole sum: it
  /// owns 1/L of the rows, and sends its node's sum of those to each rail peer.
  Work work() const override {
    Work work;
    work.flops = flops();
    for (std::uint32_t node = 0; node < spec_.nodes; ++node) {
      if (node == rank_ / spec_.local) continue;
      const std::uint32_t peer = node * spec_.local + rank_ % spec_.local;
      const double rows = kScatters<Op>
                              ? static_cast<double>(rows_of_rank(peer).count)
                              : static_cast<double>(m_) / static_cast<double>(spec_.local);
      const double bytes = rows * static_cast<double>(partial_row_bytes());
      work.network_bytes += bytes;
      work.link_bytes = std::max(work.link_bytes, bytes);
    }
    return work;
  }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

 private:
  Op op_;
};

template <class Op>
class GemmSumCase : public GemmCase {
 public:
  const char* name() const override { return kScatters<Op> ? "gemm-rs" : "gemm-ar"; }
  const char* title() const override {
    return kScatters<Op> ? "GEMM+ReduceScatter" : "GEMM+AllReduce";
  }
  const char* help() const override {
    return kScatters<Op> ? "C = sum over ranks of A B, each rank gets its share of C's rows"
                         : "C = sum over ranks of A B, on every rank";
  }
  void add_options(CLI::App& command) override {
    add_gemm_options(command,
                     {"rows of A and C", "columns of B and C", "inner dimension of each rank"});
    add_partials_option(command);
  }
  std::string describe(const BenchSpec& spec) const override {
    const GemmOptions& o = options_;
    const std::string share =
        kScatters<Op> ? fmt::format("1/{} of the rows each, ", spec.world()) : "";
    return fmt::format("C[{}, {}] = sum of A[{}, {}] B[{}, {}], {}{}", o.m, o.n, o.m, o.k, o.k, o.n,
                       share, spec.dtype) +
           describe_finish();
  }
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    return {problem(kScatters<Op> ? kernels::plan::Op::kGemmRs : kernels::plan::Op::kGemmAr, spec)};
  }
  bool outputs_are_equal() const override { return !kScatters<Op>; }
  void keep_work_per_rank(std::uint32_t) override {}

  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const auto shape = shape_of<typename Op::Shape>(spec);
    MK_ASSIGN_OR_RETURN(auto op, Op::create(session, shape, options_.tuning(spec)));
    return std::make_unique<GemmSumRank<Op>>(spec, options_, rank, std::move(op));
  }
};

}  // namespace

std::unique_ptr<OperatorCase> make_gemm_ar_case() {
  return std::make_unique<GemmSumCase<GemmAllReduce>>();
}
std::unique_ptr<OperatorCase> make_gemm_rs_case() {
  return std::make_unique<GemmSumCase<GemmReduceScatter>>();
}

}  // namespace mk::bench
