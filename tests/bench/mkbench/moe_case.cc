#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>

#include "client/tools/executor_matrices.h"
#include "client/tools/numeric/moe_reference.h"
#include "mkernel/moe_dispatch_gemm.h"
#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/expert_case.h"

namespace mk::bench {
namespace {

struct MoeOptions : ExpertOptions {
  MoeOptions() { tokens = 512, hidden = features = 1024; }
  std::uint64_t rows_max = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MoeOptions, tokens, hidden, features, rows_max, experts, top_k,
                                   routing, tile_m, tile_n, chunk_bytes, compute_blocks, partition)

class MoeRank : public RankCase {
 public:
  MoeRank(const BenchSpec& spec, const MoeOptions& options, std::uint32_t rank, MoeDispatchGemm op)
      : spec_(spec),
        options_(options),
        routing_(options.routing, options.tokens, options.experts, options.top_k, spec.world(),
                 spec.seed),
        rank_(rank),
        op_(std::move(op)),
        sources_(spec.world()) {
    const RankShare mine = share_of(options.experts, spec.world(), rank);
    const std::uint64_t any_routing =
        spec.world() * options.tokens * std::min<std::uint64_t>(options.top_k, mine.count);
    y_.resize((options.rows_max != 0 ? options.rows_max : any_routing) * row_bytes());
  }

  void make_inputs(std::uint32_t launch) override {
    launch_ = launch;
    for (std::uint32_t rank = 0; rank < spec_.world(); ++rank)
      routing_.draw(spec_, launch, rank, &sources_[rank]);
    sources_[rank_].values = rows_of(token_matrix(rank_), 0, sources_[rank_].tokens);
    experts_.clear();
    for (std::uint32_t expert = 0; expert < op_.expert_count(); ++expert) {
      const Elements weights = expert_weights(op_.first_expert() + expert);
      experts_.insert(experts_.end(), weights.begin(), weights.end());
    }
    put_ = put_tensors();
  }

  Result<LaunchStats> launch(LaunchMode mode) override {
    MK_RETURN_IF_ERROR(put_);
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, launch_with(kTokens, kY, mode));
    MK_RETURN_IF_ERROR(there_->get(kY, y_.whole()));
    rows_.resize(op_.rows().size());
    offsets_.resize(op_.expert_offsets().size());
    MK_RETURN_IF_ERROR(
        there_->get_from(op_.rows().data(), std::as_writable_bytes(std::span(rows_))));
    MK_RETURN_IF_ERROR(
        there_->get_from(op_.expert_offsets().data(), std::as_writable_bytes(std::span(offsets_))));
    return stats;
  }
  Status lead(LaunchMode mode, std::uint32_t launches) override {
    MK_RETURN_IF_ERROR(put_);
    for (std::uint32_t done = 0; done < launches; ++done)
      MK_RETURN_IF_ERROR(launch_with(kLeadTokens, kLeadY, mode));
    return {};
  }

  std::vector<Output*> outputs() override { return {&y_}; }

  /// Every row's origin and weight, every expert's rows, and that nothing lies behind the last row.
  tools::Comparison verify() const override {
    std::vector<tools::MoeSource> sources = sources_;
    for (std::uint32_t rank = 0; rank < spec_.world(); ++rank)
      sources[rank].values = rows_of(token_matrix(rank), 0, sources[rank].tokens);
    const tools::MoeJobShape shape{spec_.nodes,        spec_.local,     options_.experts,
                                   options_.top_k,     options_.hidden, options_.features,
                                   data_type_of(spec_)};
    const tools::MoeReference reference(shape, rank_, sources);
    tools::Comparison result = compare_rows(reference);
    if (result.wrong != 0) return result;  // which rows y has is not as expected
    for (std::uint32_t i = 0; i < reference.expert_count(); ++i) {
      result.add(reference.compare(i, expert_weights(reference.first_expert() + i).data(),
                                   y_.as<std::uint16_t>()));
    }
    const std::uint64_t written = reference.rows().size() * options_.features;
    for (std::uint64_t i = written; i < y_.bytes() / 2; ++i)
      if (y_.as<std::uint16_t>()[i] != 0xffff) result.add(i, 1, 0, 0);
    return result;
  }

  /// Each token goes to every node once.
  Work work() const override {
    Work work = ring_work(spec_, rank_, [this](std::uint32_t rank) {
      return static_cast<double>(sources_[rank].tokens * options_.hidden * 2);
    });
    std::uint64_t rows = 0;
    for (const tools::MoeSource& source : sources_)
      rows += static_cast<std::uint64_t>(std::count_if(
          source.ids.begin(), source.ids.end(), [this](std::int32_t id) { return is_mine(id); }));
    work.flops = 2.0 * static_cast<double>(rows * options_.hidden * options_.features);
    return work;
  }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

 private:
  enum Tensor : std::uint32_t { kTokens, kIds, kWeights, kExperts, kY, kLeadTokens, kLeadY };

  /// Inputs, and poisoned outputs, where the executor wants them.
  Status put_tensors() {
    if (!there_) {
      MK_ASSIGN_OR_RETURN(there_, tools::ExecutorMatrices::create(spec_.executor == "cuda"));
    }
    const auto put = [this](Tensor tensor, const auto& elements) {
      return there_->put(tensor, std::as_bytes(std::span(elements)));
    };
    const tools::MoeSource& mine = sources_[rank_];
    MK_RETURN_IF_ERROR(put(kTokens, mine.values));
    MK_RETURN_IF_ERROR(put(kIds, mine.ids));
    MK_RETURN_IF_ERROR(put(kWeights, mine.weights));
    MK_RETURN_IF_ERROR(put(kExperts, experts_));
    y_.poison();
    MK_RETURN_IF_ERROR(there_->put(kY, y_.whole()));
    if (spec_.lead == 0) return {};
    // Other values: what those launches leave behind must not pass for this launch's.
    MK_RETURN_IF_ERROR(put(kLeadTokens, Elements(mine.values.rbegin(), mine.values.rend())));
    return there_->put(kLeadY, y_.whole());
  }
  Result<LaunchStats> launch_with(Tensor tokens, Tensor y, LaunchMode mode) {
    MoeDispatchGemm::Input input;
    input.tokens = there_->at(tokens);
    input.ids = reinterpret_cast<const std::int32_t*>(there_->at(kIds));
    input.weights = reinterpret_cast<const float*>(there_->at(kWeights));
    input.count = sources_[rank_].tokens;
    input.expert_weights = there_->at(kExperts);
    return op_.launch(input, {there_->at(y) + Output::guard_bytes(), y_.bytes() / row_bytes()},
                      mode);
  }
  std::uint64_t row_bytes() const { return options_.features * sizeof(std::uint16_t); }
  bool is_mine(std::int32_t id) const {
    const auto expert = static_cast<std::uint32_t>(id);
    return id >= 0 && expert - op_.first_expert() < op_.expert_count();
  }
  tools::RandomMatrix token_matrix(std::uint32_t rank) const {
    return input_matrix(spec_, launch_, rank, 0, options_.hidden);
  }
  Elements expert_weights(std::uint32_t expert) const {
    return rows_of(input_matrix(spec_, launch_, expert, 1, options_.features), 0, options_.hidden);
  }

  tools::Comparison compare_rows(const tools::MoeReference& reference) const {
    tools::Comparison result;
    std::uint64_t index = 0;
    const auto equal = [&](double value, double expected) {
      result.add(index++, value, expected, 0);
    };
    const std::vector<MoeRow>& rows = rows_;
    equal(static_cast<double>(rows.size()), static_cast<double>(reference.rows().size()));
    equal(static_cast<double>(offsets_.size()), reference.expert_count() + 1);
    if (result.wrong != 0) return result;
    for (std::uint32_t i = 0; i <= reference.expert_count(); ++i)
      equal(offsets_[i], static_cast<double>(reference.offset(i)));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const tools::MoeReference::Row& expected = reference.rows()[i];
      equal(rows[i].rank, expected.rank);
      equal(rows[i].token, expected.token);
      equal(rows[i].slot, expected.slot);
      equal(rows[i].weight, expected.weight);
    }
    return result;
  }

  const BenchSpec& spec_;
  const MoeOptions options_;
  const MoeRouting routing_;
  const std::uint32_t rank_;
  MoeDispatchGemm op_;
  std::uint32_t launch_ = 0;
  std::vector<tools::MoeSource> sources_;  ///< of all ranks; values of this one only
  Elements experts_;                       ///< this rank's experts' weights
  Output y_;
  std::vector<MoeRow> rows_;  ///< of the last launch
  std::vector<std::uint32_t> offsets_;
  std::optional<tools::ExecutorMatrices> there_;
  Status put_;
};

class MoeCase : public ExpertCase<MoeOptions> {
 public:
  const char* name() const override { return "moe"; }
  const char* title() const override { return "MoE Dispatch+GEMM"; }
  const char* help() const override {
    return "every token to its top-k experts' ranks, a grouped GEMM there";
  }
  void add_options(CLI::App& command) override {
    ExpertCase::add_options(command);
    command.add_option("--rows-max", options_.rows_max,
                       "output rows of a rank; default: enough for any routing");
  }
  std::string describe(const BenchSpec& spec) const override {
    const MoeOptions& o = options_;
    return fmt::format(
        "{} tokens[{}] per rank, top {} of {} experts, W[{}, {}] each, {} routing, {}", o.tokens,
        o.hidden, o.top_k, o.experts, o.hidden, o.features, o.routing, spec.dtype);
  }
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    return {problem(kernels::plan::Op::kMoe, spec, options_.features, options_.hidden)};
  }
  void make_large() override {
    options_.tokens = 2048;
    options_.hidden = 2048;
    options_.features = 1024;
  }
  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const MoeOptions& o = options_;
    MK_RETURN_IF_ERROR(check_top_k());
    const MoeDispatchGemm::Shape shape{.tokens_max = o.tokens,
                                       .hidden = o.hidden,
                                       .features = o.features,
                                       .experts = o.experts,
                                       .top_k = o.top_k,
                                       .rows_max = o.rows_max,
                                       .dtype = data_type_of(spec)};
    const auto tuning = o.tuning<MoeDispatchGemm::Tuning>(spec);
    MK_ASSIGN_OR_RETURN(auto op, MoeDispatchGemm::create(session, shape, tuning));
    return std::make_unique<MoeRank>(spec, o, rank, std::move(op));
  }

 protected:
  const char* features_help() const override { return "columns of an expert's weights"; }
};

}  // namespace

std::unique_ptr<OperatorCase> make_moe_case() { return std::make_unique<MoeCase>(); }

}  // namespace mk::bench
