#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>

#include "client/tools/numeric/attention_reference.h"
#include "mkernel/ring_attention.h"
#include "tests/bench/mkbench/at_least_one.h"
#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/inputs.h"

namespace mk::bench {
namespace {

struct RingOptions {
  std::uint64_t seq = 2048;
  std::uint32_t query_heads = 8, key_heads = 2, head_dim = 64;
  bool causal = false, lse = false;
  std::uint32_t tile_q = 0, tile_k = 128, remote_passes = 0, chunk_bytes = 0, compute_blocks = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RingOptions, seq, query_heads, key_heads, head_dim, causal, lse,
                                   tile_q, tile_k, remote_passes, chunk_bytes, compute_blocks)

class RingRank : public RankCase {
 public:
  RingRank(const BenchSpec& spec, const RingOptions& options, std::uint32_t rank, RingAttention op)
      : spec_(spec), options_(options), rank_(rank), op_(std::move(op)) {}

  void make_inputs(std::uint32_t launch) override {
    launch_ = launch;
    seq_ = extent_of(spec_, launch, parts(), options_.seq);
    q_ = rows_of_rank(kQ);
    k_ = rows_of_rank(kK);
    v_ = rows_of_rank(kV);
    out_.resize(q_.size() * sizeof(std::uint16_t));
    lse_.resize(options_.lse ? q_.size() / options_.head_dim * sizeof(float) : 0);
  }

  Result<LaunchStats> launch(LaunchMode mode) override {
    return op_.launch({.q = q_.data(), .k = k_.data(), .v = v_.data()},
                      {.out = out_.as<void>(), .lse = options_.lse ? lse_.as<float>() : nullptr},
                      seq_, mode);
  }

  std::vector<Output*> outputs() override { return {&out_, &lse_}; }

  tools::Comparison verify() const override {
    tools::AttentionProblem problem;
    problem.sequence = seq_;
    problem.query_heads = options_.query_heads;
    problem.key_heads = options_.key_heads;
    problem.head_dim = options_.head_dim;
    problem.causal = options_.causal;
    problem.scale = 1 / std::sqrt(static_cast<double>(options_.head_dim));
    problem.type = data_type_of(spec_);
    problem.tile_keys = options_.tile_k;
    // Tiles of keys end with their part, each of which has at most so many rows.
    const std::uint64_t rows_of_part = (seq_ + parts() - 1) / parts();
    problem.tiles = parts() * ((rows_of_part + options_.tile_k - 1) / options_.tile_k);
    const Elements k = rows_of(matrix(kK), 0, seq_);
    const Elements v = rows_of(matrix(kV), 0, seq_);
    const tools::AttentionReference reference(problem, k.data(), v.data());
    tools::Comparison result;
    std::uint64_t row = 0;
    for (const RankShare& part : parts_of(rank_)) {
      const std::uint64_t at = row * row_elements(kQ);
      const auto compared =
          reference.compare(part.first, part.count, q_.data() + at, out_.as<std::uint16_t>() + at,
                            options_.lse ? lse_.as<float>() + row * options_.query_heads : nullptr);
      result.add(compared.out);
      result.add(compared.lse);
      row += part.count;
    }
    return result;
  }

  /// Two products of head_dim per query head and key seen; each rank's keys and values go to every
  /// rank.
  Work work() const override {
    Work work = gather_work(spec_, rank_, [this](std::uint32_t rank) {
      std::uint64_t rows = 0;
      for (const RankShare& part : parts_of(rank)) rows += part.count;
      return 2.0 * static_cast<double>(rows * row_elements(kK) * sizeof(std::uint16_t));
    });
    double keys_seen = 0;
    for (const RankShare& part : parts_of(rank_)) {
      const auto count = static_cast<double>(part.count);
      keys_seen += options_.causal ? count * (static_cast<double>(part.first) + (count + 1) / 2)
                                   : count * static_cast<double>(seq_);
    }
    work.flops = 4.0 * options_.head_dim * options_.query_heads * keys_seen;
    return work;
  }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

 private:
  enum Tensor : std::uint32_t { kQ = 0, kK = 1, kV = 2 };

  std::uint64_t row_elements(Tensor tensor) const {
    return std::uint64_t{tensor == kQ ? options_.query_heads : options_.key_heads} *
           options_.head_dim;
  }
  /// Of the whole sequence.
  tools::RandomMatrix matrix(Tensor tensor) const {
    return input_matrix(spec_, launch_, 0, tensor, row_elements(tensor));
  }
  std::uint32_t parts() const { return spec_.world() * (options_.causal ? 2 : 1); }
  std::vector<RankShare> parts_of(std::uint32_t rank) const {
    std::vector<RankShare> shares = {share_of(seq_, parts(), rank)};
    if (options_.causal) shares.push_back(share_of(seq_, parts(), parts() - 1 - rank));
    return shares;
  }
  Elements rows_of_rank(Tensor tensor) const {
    Elements rows;
    for (const RankShare& part : parts_of(rank_)) {
      const Elements more = rows_of(matrix(tensor), part.first, part.count);
      rows.insert(rows.end(), more.begin(), more.end());
    }
    return rows;
  }

  const BenchSpec& spec_;
  const RingOptions options_;
  const std::uint32_t rank_;
  RingAttention op_;
  std::uint32_t launch_ = 0;
  std::uint64_t seq_ = 0;
  Elements q_, k_, v_;
  Output out_, lse_;
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
    const auto positive = [&](const char* flag, auto& value, const char* text) {
      command.add_option(flag, value, text)->check(at_least_one())->capture_default_str();
    };
    positive("--seq", o.seq, "rows of the sequence, over all ranks");
    positive("--query-heads", o.query_heads, "a multiple of the key heads");
    positive("--key-heads", o.key_heads, "of K and V");
    positive("--head-dim", o.head_dim, "64 or 128");
    command.add_flag("--causal", o.causal, "a row sees only what is before it");
    command.add_flag("--lse", o.lse, "put out the log-sum-exp as well");
    command.add_option("--tile-q", o.tile_q);
    positive("--tile-k", o.tile_k, "keys of a tile");
    command.add_option("--remote-passes", o.remote_passes);
    command.add_option("--chunk-bytes", o.chunk_bytes, "payload of a network command");
    command.add_option("--compute-blocks", o.compute_blocks, "compute threads of a rank");
  }
  std::string describe(const BenchSpec& spec) const override {
    const RingOptions& o = options_;
    return fmt::format("{} rows, {} query heads, {} key heads, D {}{}, {}", o.seq, o.query_heads,
                       o.key_heads, o.head_dim, o.causal ? ", causal" : "", spec.dtype);
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
    const RingOptions& o = options_;
    const RingAttention::Shape shape{o.seq,      o.query_heads, o.key_heads,
                                     o.head_dim, o.causal,      data_type_of(spec)};
    RingAttention::Tuning tuning;
    if (spec.executor == "cuda") tuning.executor = Executor::kCuda;
    tuning.tile_m = o.tile_q;
    tuning.tile_n = o.tile_k;
    tuning.remote_passes = o.remote_passes;
    tuning.chunk_bytes = o.chunk_bytes;
    tuning.compute_blocks = o.compute_blocks;
    tuning.wait_timeout = std::chrono::milliseconds{spec.timeout_ms};
    MK_ASSIGN_OR_RETURN(auto op, RingAttention::create(session, shape, tuning));
    return std::make_unique<RingRank>(spec, o, rank, std::move(op));
  }
};

}  // namespace

std::unique_ptr<OperatorCase> make_ring_case() { return std::make_unique<RingCase>(); }

}  // namespace mk::bench
