#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <tuple>
#include <vector>

#include "client/tools/executor_matrices.h"
#include "client/tools/numeric/attention_reference.h"
#include "client/tools/numeric/gemm_reference.h"
#include "mkernel/ring_attention.h"
#include "tests/bench/mkbench/at_least_one.h"
#include "tests/bench/mkbench/attention_core.h"
#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/inputs.h"
#include "tests/bench/mkbench/tuning_options.h"

namespace mk::bench {
namespace {

struct RingOptions {
  std::uint64_t seq = 2048;
  std::uint32_t batch = 1, query_heads = 8, key_heads = 2, head_dim = 64;
  bool causal = false, lse = false;
  std::uint32_t tile_q = 0, tile_k = 0, remote_passes = 0, chunk_bytes = 0, compute_blocks = 0;
  std::uint64_t check_rows = 0;
  std::string partition = "planned";
  std::vector<std::uint32_t> lengths;  ///< of packed sequences; none: one length

  TuningOptions tuning_options() const {
    return {tile_q, tile_k, chunk_bytes, compute_blocks, partition};
  }
  std::uint64_t rows() const {
    return lengths.empty() ? seq : std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{});
  }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RingOptions, seq, batch, query_heads, key_heads, head_dim,
                                   causal, lse, tile_q, tile_k, remote_passes, chunk_bytes,
                                   compute_blocks, check_rows, partition, lengths)

constexpr std::uint32_t kTileKeys = 128;  // on CPUs

class RingRank : public RankCase {
 public:
  RingRank(const BenchSpec& spec, const RingOptions& options, std::uint32_t rank, RingAttention op)
      : spec_(spec), options_(options), rank_(rank), op_(std::move(op)) {}

  void make_inputs(std::uint32_t launch) override {
    launch_ = launch;
    if (options_.lengths.empty()) {
      seq_ = extent_of(spec_, launch, parts(), options_.seq);
      starts_ = {0, static_cast<std::uint32_t>(seq_)};
    } else {
      set_lengths();
    }
    q_ = rows_of_rank(kQ);
    k_ = rows_of_rank(kK);
    v_ = rows_of_rank(kV);
    out_.resize(q_.size() * sizeof(std::uint16_t));
    lse_.resize(options_.lse ? q_.size() / options_.head_dim * sizeof(float) : 0);
    put_ = put_tensors();
  }

  Result<LaunchStats> launch(LaunchMode mode) override {
    MK_RETURN_IF_ERROR(put_);
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, launch_with(kQ, kOut, kLse, mode));
    MK_RETURN_IF_ERROR(there_->get(kOut, out_.whole()));
    MK_RETURN_IF_ERROR(there_->get(kLse, lse_.whole()));
    return stats;
  }
  Status lead(LaunchMode mode, std::uint32_t launches) override {
    MK_RETURN_IF_ERROR(put_);
    for (std::uint32_t done = 0; done < launches; ++done)
      MK_RETURN_IF_ERROR(launch_with(kLeadQ, kLeadOut, kLeadLse, mode));
    return {};
  }

  std::vector<Output*> outputs() override { return {&out_, &lse_}; }

  tools::Comparison verify() const override {
    tools::Comparison result;
    for (std::uint32_t batch = 0; batch < options_.batch; ++batch) {
      std::uint64_t own = batch * rows_per_batch();
      for (std::size_t i = 0; i + 1 < starts_.size(); ++i)
        verify_sequence(batch, {starts_[i], starts_[i + 1] - starts_[i]}, own, result);
    }
    result.judge_mean();
    return result;
  }

  /// Two products of head_dim per query head and key seen; each rank's keys and values go to every
  /// node.
  Work work() const override {
    Work work = ring_work(spec_, rank_, [this](std::uint32_t rank) {
      std::uint64_t rows = 0;
      for (const Part& part : parts_of(rank)) rows += part.count;
      return 2.0 *
             static_cast<double>(options_.batch * rows * row_elements(kK) * sizeof(std::uint16_t));
    });
    double keys_seen = 0;
    for (const Part& part : parts_of(rank_)) {
      const auto count = static_cast<double>(part.count);
      keys_seen += options_.causal ? count * (static_cast<double>(part.first) + (count + 1) / 2)
                                   : count * static_cast<double>(part.sequence.count);
    }
    work.flops = 4.0 * options_.head_dim * options_.query_heads * options_.batch * keys_seen;
    return work;
  }
  Result<std::uint64_t> core_ns() override {
    if (spec_.sizes != "fixed") return 0;
    if (core_ == nullptr) {
      CoreProblem problem{data_type_of(spec_), options_.batch,    options_.query_heads,
                          options_.key_heads,  options_.head_dim, options_.causal};
      for (const Part& part : parts_of(rank_)) {
        problem.parts.push_back(
            {part.count, options_.causal ? part.first + part.count : part.sequence.count});
      }
      MK_ASSIGN_OR_RETURN(core_, AttentionCore::create(problem));
    }
    return core_->measure_ns();
  }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

 private:
  enum Tensor : std::uint32_t {
    kQ = 0,
    kK = 1,
    kV = 2,
    kOut,
    kLse,
    kLeadQ,
    kLeadOut,
    kLeadLse,
    kStarts,
  };
  /// Rows of a sequence that a rank has.
  struct Part {
    std::uint64_t first = 0, count = 0;
    RankShare sequence;  ///< among the rows of all
  };

  bool on_gpu() const { return spec_.executor == "cuda"; }
  /// Inputs, and poisoned outputs, where the executor wants them.
  Status put_tensors() {
    if (!there_) {
      MK_ASSIGN_OR_RETURN(there_, tools::ExecutorMatrices::create(on_gpu()));
    }
    const auto put = [this](Tensor tensor, const Elements& elements) {
      return there_->put(tensor, std::as_bytes(std::span(elements)));
    };
    MK_RETURN_IF_ERROR(put(kQ, q_));
    MK_RETURN_IF_ERROR(put(kK, k_));
    MK_RETURN_IF_ERROR(put(kV, v_));
    MK_RETURN_IF_ERROR(there_->put(kStarts, std::as_bytes(std::span(starts_))));
    const bool leads = spec_.lead != 0;
    // Other values: what those launches leave behind must not pass for this launch's.
    if (leads) MK_RETURN_IF_ERROR(put(kLeadQ, Elements(q_.rbegin(), q_.rend())));
    out_.poison();
    lse_.poison();
    for (const auto& [output, at, lead_at] :
         {std::tuple{&out_, kOut, kLeadOut}, {&lse_, kLse, kLeadLse}}) {
      MK_RETURN_IF_ERROR(there_->put(at, output->whole()));
      if (leads) MK_RETURN_IF_ERROR(there_->put(lead_at, output->whole()));
    }
    return {};
  }
  Result<LaunchStats> launch_with(Tensor q, Tensor out, Tensor lse, LaunchMode mode) {
    std::byte* const its_lse = there_->at(lse) + Output::guard_bytes();
    RingAttention::Input input{.q = there_->at(q), .k = there_->at(kK), .v = there_->at(kV)};
    if (!options_.lengths.empty()) {
      input.sequence_starts = reinterpret_cast<const std::uint32_t*>(there_->at(kStarts));
      input.sequences = static_cast<std::uint32_t>(starts_.size() - 1);
      input.rows = rows_per_batch();
    }
    return op_.launch(input,
                      {.out = there_->at(out) + Output::guard_bytes(),
                       .lse = options_.lse ? reinterpret_cast<float*>(its_lse) : nullptr},
                      seq_, mode);
  }

  /// Packed sequences; with sizes that vary, in another order for each launch.
  void set_lengths() {
    std::vector<std::uint32_t> lengths = options_.lengths;
    if (spec_.sizes != "fixed")
      std::rotate(lengths.begin(), lengths.begin() + launch_ % lengths.size(), lengths.end());
    starts_ = {0};
    for (const std::uint32_t length : lengths) starts_.push_back(starts_.back() + length);
    seq_ = starts_.back();
  }

  /// This rank's rows of one sequence: all of them, or `check_rows` in all that are spread over its
  /// parts, each part's last among them. `own`: where its rows begin among the rank's, and then
  /// those of the next one.
  void verify_sequence(std::uint32_t batch, const RankShare& sequence, std::uint64_t& own,
                       tools::Comparison& result) const {
    if (sequence.count == 0) return;
    tools::AttentionProblem problem;
    problem.sequence = sequence.count;
    problem.query_heads = options_.query_heads;
    problem.key_heads = options_.key_heads;
    problem.head_dim = options_.head_dim;
    problem.causal = options_.causal;
    problem.scale = 1 / std::sqrt(static_cast<double>(options_.head_dim));
    problem.type = data_type_of(spec_);
    problem.on_gpu = on_gpu();
    problem.random = true;
    problem.tile_keys = on_gpu() ? tools::AttentionProblem::gpu_tile_keys(options_.head_dim)
                                 : (options_.tile_k != 0 ? options_.tile_k : kTileKeys);
    // Tiles of keys end with their part.
    problem.tiles = tools::AttentionProblem::tiles_over(sequence.count, parts(), problem.tile_keys);
    const Elements k = rows_of(matrix(kK, batch), sequence.first, sequence.count);
    const Elements v = rows_of(matrix(kV, batch), sequence.first, sequence.count);
    const tools::AttentionReference reference(problem, k.data(), v.data());
    struct Row {
      std::uint64_t own, position;
    };
    std::vector<Row> rows;
    const auto its_parts = parts_of_sequence(rank_, sequence);
    for (const Part& part : its_parts) {
      const std::uint64_t wanted = rows_to_check() / its_parts.size();
      const std::uint64_t count =
          std::clamp<std::uint64_t>(wanted, 1, std::max<std::uint64_t>(part.count, 1));
      for (std::uint64_t i = 1; part.count != 0 && i <= count; ++i) {
        const std::uint64_t row = part.count * i / count - 1;
        rows.push_back({own + row, part.first + row});
      }
      own += part.count;
    }
    const std::uint32_t threads = on_gpu() ? tools::share_of_cores(spec_.world()) : 1;
    std::vector<tools::Comparison> found(threads);
    const auto compare = [&](std::uint32_t thread) {
      for (std::size_t i = thread; i < rows.size(); i += threads) {
        const std::uint64_t at = rows[i].own * row_elements(kQ);
        const auto compared = reference.compare(
            rows[i].position, 1, q_.data() + at, out_.as<std::uint16_t>() + at,
            options_.lse ? lse_.as<float>() + rows[i].own * options_.query_heads : nullptr);
        found[thread].add(compared.out);
        found[thread].add(compared.lse);
      }
    };
    std::vector<std::thread> others;
    for (std::uint32_t thread = 1; thread < threads; ++thread) others.emplace_back(compare, thread);
    compare(0);
    for (std::thread& other : others) other.join();
    for (const tools::Comparison& one : found) result.add(one);
  }
  std::uint64_t rows_to_check() const {
    if (options_.check_rows != 0) return options_.check_rows;
    if (!on_gpu()) return seq_ * 2;  // all of each part, even or not
    const auto per_row = static_cast<double>(seq_ * row_elements(kQ) * options_.batch);
    return static_cast<std::uint64_t>(kCheckedProducts / per_row) + 2;
  }
  /// Of the two products, that a check on a GPU takes some seconds for.
  static constexpr double kCheckedProducts = 4e9;

  std::uint64_t row_elements(Tensor tensor) const {
    return std::uint64_t{tensor == kQ ? options_.query_heads : options_.key_heads} *
           options_.head_dim;
  }
  /// Of a whole sequence.
  tools::RandomMatrix matrix(Tensor tensor, std::uint32_t batch) const {
    return input_matrix(spec_, launch_, batch, tensor, row_elements(tensor));
  }
  std::uint32_t parts() const { return spec_.world() * (options_.causal ? 2 : 1); }
  std::vector<Part> parts_of_sequence(std::uint32_t rank, const RankShare& sequence) const {
    std::vector<Part> made;
    const auto add = [&](std::uint32_t part) {
      const RankShare share = share_of(sequence.count, parts(), part);
      made.push_back({share.first, share.count, sequence});
    };
    add(rank);
    if (options_.causal) add(parts() - 1 - rank);
    return made;
  }
  std::vector<Part> parts_of(std::uint32_t rank) const {
    std::vector<Part> all;
    for (std::size_t i = 0; i + 1 < starts_.size(); ++i) {
      for (const Part& part : parts_of_sequence(rank, {starts_[i], starts_[i + 1] - starts_[i]}))
        all.push_back(part);
    }
    return all;
  }
  std::uint64_t rows_per_batch() const {
    std::uint64_t rows = 0;
    for (const Part& part : parts_of(rank_)) rows += part.count;
    return rows;
  }
  Elements rows_of_rank(Tensor tensor) const {
    Elements rows;
    for (std::uint32_t batch = 0; batch < options_.batch; ++batch) {
      for (const Part& part : parts_of(rank_)) {
        const Elements more =
            rows_of(matrix(tensor, batch), part.sequence.first + part.first, part.count);
        rows.insert(rows.end(), more.begin(), more.end());
      }
    }
    return rows;
  }

  const BenchSpec& spec_;
  const RingOptions options_;
  const std::uint32_t rank_;
  RingAttention op_;
  std::uint32_t launch_ = 0;
  std::uint64_t seq_ = 0;
  std::vector<std::uint32_t> starts_;  ///< of the launch's sequences, and the last one's end
  Elements q_, k_, v_;
  Output out_, lse_;
  std::optional<tools::ExecutorMatrices> there_;
  Status put_;
  std::unique_ptr<AttentionCore> core_;
};

class RingCase : public CaseWithOptions<RingOptions> {
 public:
  const char* name() const override { return "ring"; }
  const char* title() const override { return "Ring Attention"; }
  const char* help() const override {
    return "O = softmax(Q K^T / sqrt(D)) V over a sequence spread over all ranks";
  }
  void add_options(CLI::App& command) override {
    RingOptions& o = options_;
    add_positive(command, "--seq", o.seq, "rows of the sequence, over all ranks");
    add_positive(command, "--batch", o.batch, "sequences of that length");
    command
        .add_option("--lengths", o.lengths,
                    "of packed sequences, instead of --seq and --batch, e.g. 300,0,5000; with "
                    "--sizes vary in another order for each launch")
        ->delimiter(',');
    add_positive(command, "--query-heads", o.query_heads, "a multiple of the key heads");
    add_positive(command, "--key-heads", o.key_heads, "of K and V");
    add_positive(command, "--head-dim", o.head_dim, "64 or 128");
    command.add_flag("--causal", o.causal, "a row sees only what is before it");
    command.add_flag("--lse", o.lse, "put out the log-sum-exp as well");
    command.add_option("--tile-q", o.tile_q, "queries of a tile; default: the planner's choice");
    command.add_option("--tile-k", o.tile_k, "keys of a tile");
    command.add_option(
        "--remote-passes", o.remote_passes,
        "stretches in which queries meet other nodes' keys, 1 to 8; default: the planner's choice");
    TuningOptions::add_shares(command, o.chunk_bytes, o.compute_blocks, o.partition);
    command.add_option(
        "--check-rows", o.check_rows,
        "rows of each sequence that a rank compares; without it all, on GPUs as many "
        "as take some seconds");
  }
  std::string describe(const BenchSpec& spec) const override {
    const RingOptions& o = options_;
    return fmt::format("{} rows{}, {}{} query heads, {} key heads, D {}{}, {}", o.rows(),
                       o.lengths.empty() ? "" : fmt::format(" in {} sequences", o.lengths.size()),
                       o.batch > 1 ? fmt::format("batch {}, ", o.batch) : "", o.query_heads,
                       o.key_heads, o.head_dim, o.causal ? ", causal" : "", spec.dtype);
  }
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    const RingOptions& o = options_;
    kernels::plan::Problem problem = planned_problem(kernels::plan::Op::kRing, spec);
    problem.shape = {static_cast<std::uint32_t>(o.rows()), o.query_heads, o.head_dim};
    problem.heads = {o.key_heads, o.batch, o.causal};
    o.tuning_options().name_in(problem);
    return {problem};
  }
  bool outputs_are_equal() const override { return false; }
  void make_large() override { options_.seq = 4096; }
  /// A rank's work grows with the square of the sequence, and falls with the ranks.
  void keep_work_per_rank(std::uint32_t nodes) override {
    options_.seq = static_cast<std::uint64_t>(
        std::lround(static_cast<double>(options_.seq) * std::sqrt(static_cast<double>(nodes))));
  }
  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    RingOptions o = options_;
    // A GPU's weights are rounded: of a long sequence the LSE says more than the output.
    if (spec.executor == "cuda") o.lse = true;
    // Packed sequences may be too short to give every rank a row.
    if (o.lengths.empty() && o.seq < spec.world() * (o.causal ? 2u : 1u)) {
      o.lengths.assign(o.batch, static_cast<std::uint32_t>(o.seq));
      o.batch = 1;
    }
    const RingAttention::Shape shape{
        o.rows(), o.query_heads,      o.key_heads, o.head_dim,
        o.causal, data_type_of(spec), o.batch,     static_cast<std::uint32_t>(o.lengths.size())};
    auto tuning = o.tuning_options().tuning<RingAttention::Tuning>(spec);
    tuning.remote_passes = o.remote_passes;
    MK_ASSIGN_OR_RETURN(auto op, RingAttention::create(session, shape, tuning));
    return std::make_unique<RingRank>(spec, o, rank, std::move(op));
  }
};

}  // namespace

std::unique_ptr<OperatorCase> make_ring_case() { return std::make_unique<RingCase>(); }

}  // namespace mk::bench
