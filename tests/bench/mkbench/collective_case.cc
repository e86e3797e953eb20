#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <optional>

#include "client/tools/executor_matrices.h"
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
    input_ = input_of(rank_);
    output_.resize(output_rows() * row_bytes());
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

 protected:
  RankShare rows_of_rank(std::uint32_t rank) const { return share_of(m_, spec_.world(), rank); }
  std::uint64_t row_bytes() const { return options_.n * sizeof(std::uint16_t); }
  virtual Elements input_of(std::uint32_t rank) const = 0;
  virtual std::uint64_t output_rows() const = 0;

  const BenchSpec& spec_;
  const CollectiveOptions options_;
  const std::uint32_t rank_;
  std::uint32_t launch_ = 0;
  std::uint64_t m_ = 0;
  Output output_;

 private:
  enum Place : std::size_t { kInput, kOutput, kLeadInput, kLeadOutput };

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

  Op op_;
  Elements input_;
  std::optional<tools::ExecutorMatrices> there_;
  Status upload_;
};

class CollectiveCase : public CaseWithOptions<CollectiveOptions> {
 public:
  void add_options(CLI::App& command) override {
    const auto size = [&](const char* flag, std::uint64_t& value, const char* text) {
      command.add_option(flag, value, text)->check(at_least_one())->capture_default_str();
    };
    size("--m", options_.m, "rows of the whole");
    size("--n", options_.n, "elements of a row");
    command.add_option("--chunk-bytes", options_.chunk_bytes, "payload of a network command");
  }
  void make_large() override { options_.m = 16384; }
  void keep_work_per_rank(std::uint32_t) override {}

 protected:
  Tuning tuning(const BenchSpec& spec) const {
    Tuning tuning;
    tuning.chunk_bytes = options_.chunk_bytes;
    tuning.wait_timeout = std::chrono::milliseconds{spec.timeout_ms};
    if (spec.executor == "cuda") tuning.executor = Executor::kCuda;
    return tuning;
  }
  static constexpr std::uint64_t kColumnStep = 8;
  kernels::plan::Problem problem(kernels::plan::Op op, const BenchSpec& spec, std::uint64_t n,
                                 std::uint64_t k) const {
    kernels::plan::Problem problem = planned_problem(op, spec);
    problem.shape = {static_cast<std::uint32_t>(options_.m), static_cast<std::uint32_t>(n),
                     static_cast<std::uint32_t>(k)};
    problem.named.tiling.chunk_bytes = options_.chunk_bytes;
    return problem;
  }
};

class AllGatherRank : public CollectiveRank<AllGather> {
 public:
  using CollectiveRank::CollectiveRank;

  tools::Comparison verify() const override {
    tools::Comparison result;
    std::uint64_t at = 0;
    for (std::uint32_t rank = 0; rank < spec_.world(); ++rank) {
      for (const std::uint16_t expected : input_of(rank)) {
        result.add(at, output_.as<std::uint16_t>()[at], expected, 0);
        ++at;
      }
    }
    return result;
  }
  Work work() const override {
    return ring_work(spec_, rank_, [this](std::uint32_t rank) {
      return static_cast<double>(rows_of_rank(rank).count * row_bytes());
    });
  }

 private:
  Elements input_of(std::uint32_t rank) const override {
    return rows_of(input_matrix(spec_, launch_, rank, 0, options_.n), 0, rows_of_rank(rank).count);
  }
  std::uint64_t output_rows() const override { return m_; }
};

class AllGatherCase : public CollectiveCase {
 public:
  const char* name() const override { return "all-gather"; }
  const char* title() const override { return "AllGather"; }
  const char* help() const override { return "all ranks' rows to every rank"; }
  std::string describe(const BenchSpec& spec) const override {
    return fmt::format("[{}, {}], 1/{} of the rows from each, {}", options_.m, options_.n,
                       spec.world(), spec.dtype);
  }
  bool outputs_are_equal() const override { return true; }
  /// Those that move the same rows, with a product next to none.
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    return {problem(kernels::plan::Op::kAgGemm, spec, kColumnStep, options_.n)};
  }

  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const AllGather::Shape shape{options_.m, options_.n, data_type_of(spec)};
    MK_ASSIGN_OR_RETURN(auto op, AllGather::create(session, shape, tuning(spec)));
    return std::make_unique<AllGatherRank>(spec, options_, rank, std::move(op));
  }
};

}  // namespace

std::unique_ptr<OperatorCase> make_all_gather_case() { return std::make_unique<AllGatherCase>(); }

}  // namespace mk::bench
