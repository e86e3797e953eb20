#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>

#include "client/tools/executor_matrices.h"
#include "client/tools/numeric/sum_reference.h"
#include "mkernel/mkernel.h"
#include "tests/bench/mkbench/at_least_one.h"
#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/inputs.h"

namespace mk::bench {
namespace {

struct CollectiveOptions {
  std::uint64_t m = 1024, n = 1024;
  std::uint32_t chunk_bytes = 0;  ///< 0: the operator chooses
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CollectiveOptions, m, n, chunk_bytes)

/// One rank's operator, its input and its output.
template <class Op>
class CollectiveRank : public RankCase {
 public:
  CollectiveRank(const BenchSpec& spec, const CollectiveOptions& options, std::uint32_t rank, Op op)
      : spec_(spec), options_(options), rank_(rank), op_(std::move(op)) {}

  void make_inputs(std::uint32_t launch) override {
    launch_ = launch;
    m_ = extent_of(spec_, launch, 1, options_.m);
    input_ = rows_of_rank(rank_, Op::input_rows(m_, spec_.world(), rank_));
    output_.resize(gets().count * row_bytes());
    upload_ = upload();
  }
  Result<LaunchStats> launch(LaunchMode mode) override {
    MK_RETURN_IF_ERROR(upload_);
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, run(kInput, kOutput, mode));
    MK_RETURN_IF_ERROR(there_->get(kOutput, output_.whole()));
    return stats;
  }
  Status lead(LaunchMode mode, std::uint32_t launches) override {
    MK_RETURN_IF_ERROR(upload_);
    for (std::uint32_t done = 0; done < launches; ++done)
      if (const auto stats = run(kLeadInput, kLeadOutput, mode); !stats) return propagate(stats);
    return {};
  }
  std::vector<Output*> outputs() override { return {&output_}; }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

  /// Against the sum over the ranks that bring a row, or the one that does.
  tools::Comparison verify() const override {
    const RowRange here = gets();
    if constexpr (Op::kSums) {
      tools::SumReference sums(here.count * options_.n, spec_.nodes, spec_.local,
                               data_type_of(spec_));
      for (std::uint32_t rank = 0; rank < spec_.world(); ++rank)
        sums.add_rank(rows_of_rank(rank, here).data());
      return sums.compare(output_.as<std::uint16_t>());
    } else {
      tools::Comparison result;
      std::uint64_t at = 0;
      for (std::uint32_t rank = 0; rank < spec_.world(); ++rank) {
        for (const std::uint16_t expected :
             rows_of_rank(rank, Op::input_rows(m_, spec_.world(), rank))) {
          result.add(at, output_.as<std::uint16_t>()[at], expected, 0);
          ++at;
        }
      }
      return result;
    }
  }
  /// A rank that sums sends the sums of every other node's rows of its rail.
  Work work() const override {
    const auto share = [this](std::uint32_t rank) {
      return static_cast<double>(share_of(m_, spec_.world(), rank).count * row_bytes());
    };
    if (!Op::kSums) return ring_work(spec_, rank_, share);
    Work work;
    for (std::uint32_t node = 0; node < spec_.nodes; ++node) {
      if (node == rank_ / spec_.local) continue;
      const double bytes = share(node * spec_.local + rank_ % spec_.local);
      work.network_bytes += bytes;
      work.link_bytes = std::max(work.link_bytes, bytes);
    }
    return work;
  }

 private:
  enum Place : std::size_t { kInput, kOutput, kLeadInput, kLeadOutput };

  std::uint64_t row_bytes() const { return options_.n * sizeof(std::uint16_t); }
  RowRange gets() const { return Op::output_rows(m_, spec_.world(), rank_); }
  Elements rows_of_rank(std::uint32_t rank, const RowRange& rows) const {
    return rows_of(input_matrix(spec_, launch_, rank, 0, options_.n), rows.first, rows.count);
  }

  Result<LaunchStats> run(Place input, Place output, LaunchMode mode) {
    return op_.launch(there_->at(input), there_->at(output) + Output::guard_bytes(), m_, mode);
  }
  Status upload() {
    if (!there_) {
      MK_ASSIGN_OR_RETURN(there_, tools::ExecutorMatrices::create(spec_.executor == "cuda"));
    }
    output_.poison();
    MK_RETURN_IF_ERROR(there_->put(kInput, std::as_bytes(std::span(input_))));
    MK_RETURN_IF_ERROR(there_->put(kOutput, output_.whole()));
    if (spec_.lead == 0) return {};
    // Other values: what those launches leave behind must not pass for this launch's.
    const Elements other(input_.rbegin(), input_.rend());
    MK_RETURN_IF_ERROR(there_->put(kLeadInput, std::as_bytes(std::span(other))));
    return there_->put(kLeadOutput, output_.whole());
  }

  const BenchSpec& spec_;
  const CollectiveOptions options_;
  const std::uint32_t rank_;
  std::uint32_t launch_ = 0;
  std::uint64_t m_ = 0;
  Output output_;
  Op op_;
  Elements input_;
  std::optional<tools::ExecutorMatrices> there_;
  Status upload_;
};

template <class Op>
class CollectiveCase : public CaseWithOptions<CollectiveOptions> {
 public:
  CollectiveCase(const char* name, const char* title) : name_(name), title_(title) {}

  const char* name() const override { return name_; }
  const char* title() const override { return title_; }
  const char* help() const override { return Op::kSummary; }
  void add_options(CLI::App& command) override {
    add_positive(command, "--m", options_.m, "rows of the whole");
    add_positive(command, "--n", options_.n, "elements of a row");
    command.add_option("--chunk-bytes", options_.chunk_bytes, "payload of a network command");
  }
  std::string describe(const BenchSpec& spec) const override {
    return fmt::format("[{}, {}], 1/{} of the rows {} each, {}", options_.m, options_.n,
                       spec.world(), Op::kSums ? "to" : "from", spec.dtype);
  }
  void make_large() override { options_.m = 16384; }
  void keep_work_per_rank(std::uint32_t) override {}
  bool outputs_are_equal() const override {
    return Op::output_rows(options_.m, 2, 0).count == options_.m;
  }
  /// The product that moves the same rows, with next to nothing to multiply.
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    constexpr std::uint32_t kLeast = 8;
    const auto m = static_cast<std::uint32_t>(options_.m);
    const auto n = static_cast<std::uint32_t>(options_.n);
    kernels::plan::Problem problem =
        planned_problem(Op::kSums ? kernels::plan::Op::kGemmRs : kernels::plan::Op::kAgGemm, spec);
    problem.shape = Op::kSums ? kernels::Shape{m, n, kLeast} : kernels::Shape{m, kLeast, n};
    problem.rows_alone = true;
    problem.named.tiling.chunk_bytes = options_.chunk_bytes;
    return {problem};
  }

  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const typename Op::Shape shape{options_.m, options_.n, data_type_of(spec)};
    Tuning tuning;
    tuning.chunk_bytes = options_.chunk_bytes;
    tuning.wait_timeout = std::chrono::milliseconds{spec.timeout_ms};
    if (spec.executor == "cuda") tuning.executor = Executor::kCuda;
    MK_ASSIGN_OR_RETURN(auto op, Op::create(session, shape, tuning));
    return std::make_unique<CollectiveRank<Op>>(spec, options_, rank, std::move(op));
  }

 private:
  const char* name_;
  const char* title_;
};

}  // namespace

#define MK_CASE(id, name, Class)                                  \
  std::unique_ptr<OperatorCase> make_##id##_case() {              \
    return std::make_unique<CollectiveCase<Class>>(name, #Class); \
  }
MK_COLLECTIVES(MK_CASE)
#undef MK_CASE

}  // namespace mk::bench
