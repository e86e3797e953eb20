#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "client/tools/numeric/gemm_reference.h"
#include "mkernel/all_gather_gemm.h"
#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/gemm_case.h"

namespace mk::bench {
namespace {

/// A is one matrix for all ranks; it is made as rank 0's.
class AgGemmRank : public GemmRank {
 public:
  AgGemmRank(const BenchSpec& spec, const GemmOptions& options, std::uint32_t rank,
             AllGatherGemm op)
      : GemmRank(spec, options, rank), op_(std::move(op)) {}

  void make_inputs(std::uint32_t launch) override {
    begin(launch);
    const RankShare mine = rows_of_rank(rank_);
    a_ = rows_of(matrix_a(0), mine.first, mine.count);
    b_ = rows_of(matrix_b(rank_), 0, options_.k);
    c_.resize(m_ * c_columns() * sizeof(std::uint16_t));
    gathered_.resize(options_.gathered ? m_ * row_bytes() : 0);
    upload(gathered());
  }
  Result<LaunchStats> launch(LaunchMode mode) override {
    return launch_with([&](const GemmArguments& given) { return op_.launch(given, mode); },
                       gathered());
  }
  std::vector<Output*> outputs() override { return {&c_, &gathered_}; }
  tools::Comparison verify() const override {
    const Elements a = rows_of(matrix_a(0), 0, m_);
    tools::GemmReference reference(m_, options_.n, 1, 1, data_type_of(spec_));
    reference.random_inputs();
    reference.use_threads(tools::share_of_cores(spec_.world()));
    reference.finish(activation_of(options_), bias_);
    reference.add_rank(a.data(), b_.data(), options_.k, 1, 1);
    tools::Comparison result = reference.compare(c_.as<std::uint16_t>());
    if (options_.gathered) {
      for (std::uint64_t i = 0; i < a.size(); ++i)
        result.add(m_ * options_.n + i, gathered_.as<std::uint16_t>()[i], a[i], 0);
    }
    return result;
  }
  Work work() const override {
    Work work = ring_work(spec_, rank_, [this](std::uint32_t rank) {
      return static_cast<double>(rows_of_rank(rank).count * row_bytes());
    });
    work.flops = flops();
    return work;
  }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

 private:
  std::uint32_t bias_rank() const override { return rank_; }
  Output* gathered() { return options_.gathered ? &gathered_ : nullptr; }
  std::uint64_t row_bytes() const { return options_.k * sizeof(std::uint16_t); }

  AllGatherGemm op_;
  Output gathered_;
};

class AgGemmCase : public GemmCase {
 public:
  const char* name() const override { return "ag-gemm"; }
  const char* title() const override { return "AllGather+GEMM"; }
  const char* help() const override { return "C_r = A B_r, A's rows spread over the ranks"; }
  void add_options(CLI::App& command) override {
    add_gemm_options(command, {"rows of the whole A, and of C", "columns of each rank's B and C",
                               "columns of A"});
    command.add_flag("--gathered", options_.gathered, "put out the whole A as well");
  }
  std::string describe(const BenchSpec& spec) const override {
    const GemmOptions& o = options_;
    return fmt::format("C[{}, {}] = A[{}, {}] B[{}, {}], 1/{} of A's rows from each, {}", o.m, o.n,
                       o.m, o.k, o.k, o.n, spec.world(), spec.dtype) +
           describe_finish();
  }
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    return {problem(kernels::plan::Op::kAgGemm, spec)};
  }
  bool outputs_are_equal() const override { return false; }
  void make_large() override {
    options_.m = 4096;
    options_.n = 1024;
    options_.k = 2048;
  }
  void keep_work_per_rank(std::uint32_t) override {}

  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const auto shape = shape_of<AllGatherGemm::Shape>(spec);
    MK_ASSIGN_OR_RETURN(auto op, AllGatherGemm::create(session, shape, options_.tuning(spec)));
    return std::make_unique<AgGemmRank>(spec, options_, rank, std::move(op));
  }
};

}  // namespace

std::unique_ptr<OperatorCase> make_ag_gemm_case() { return std::make_unique<AgGemmCase>(); }

}  // namespace mk::bench
