#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <optional>
#include <span>

#include "client/tools/executor_matrices.h"
#include "client/tools/numeric/combine_reference.h"
#include "client/tools/numeric/moe_reference.h"
#include "mkernel/gemm_combine.h"
#include "mkernel/moe_dispatch_gemm.h"
#include "tests/bench/mkbench/cases.h"
#include "tests/bench/mkbench/expert_case.h"

namespace mk::bench {
namespace {

struct MoeLayerOptions : ExpertOptions {
  MoeLayerOptions() { tokens = features = 256, hidden = 512; }
  std::string partials = "element";
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MoeLayerOptions, tokens, hidden, features, experts, top_k,
                                   routing, partials, tile_m, tile_n, chunk_bytes, compute_blocks,
                                   partition)

/// GEMM+Combine, of rows as a dispatch would leave them; or a whole layer, whose dispatch (with its
/// gated SiLU) comes first in each launch.
class MoeLayerRank : public RankCase {
 public:
  MoeLayerRank(const BenchSpec& spec, const MoeLayerOptions& options, std::uint32_t rank,
               std::optional<MoeDispatchGemm> dispatch, GemmCombine combine)
      : spec_(spec),
        options_(options),
        routing_(options.routing, options.tokens, options.experts, options.top_k, spec.world(),
                 spec.seed),
        rank_(rank),
        dispatch_(std::move(dispatch)),
        combine_(std::move(combine)),
        sources_(spec.world()) {}

  void make_inputs(std::uint32_t launch) override {
    launch_ = launch;
    for (std::uint32_t rank = 0; rank < spec_.world(); ++rank)
      routing_.draw(spec_, launch, rank, &sources_[rank]);
    const tools::MoeReference reference(shape(), rank_, sources_);
    rows_.clear();
    for (const tools::MoeReference::Row& row : reference.rows())
      rows_.push_back({row.rank, row.token, row.slot, row.weight});
    offsets_.clear();
    for (std::uint32_t i = 0; i <= combine_.expert_count(); ++i)
      offsets_.push_back(static_cast<std::uint32_t>(reference.offset(i)));
    y_.assign(rows_.size() * options_.features, 0);
    gate_up_.clear();
    down_.clear();
    const auto append = [](Elements& to, const Elements& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    for (std::uint32_t i = 0; i < combine_.expert_count(); ++i) {
      append(down_, down_of(combine_.first_expert() + i));
      if (dispatch_) append(gate_up_, gate_up_of(combine_.first_expert() + i));
    }
    if (dispatch_) {
      mine().values = values_of_tokens();
    } else {
      for (std::size_t i = 0; i < rows_.size(); ++i) {
        const Elements row = y_row(rows_[i].rank, rows_[i].token, rows_[i].slot);
        std::copy(row.begin(), row.end(),
                  y_.begin() + static_cast<std::ptrdiff_t>(i * options_.features));
      }
    }
    out_.resize(mine().tokens * options_.hidden * 2);
    put_ = put_tensors();
  }

  Result<LaunchStats> launch(LaunchMode mode) override {
    MK_RETURN_IF_ERROR(put_);
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, launch_with(false, mode));
    MK_RETURN_IF_ERROR(there_->get(kOut, out_.whole()));
    return stats;
  }
  Status lead(LaunchMode mode, std::uint32_t launches) override {
    MK_RETURN_IF_ERROR(put_);
    for (std::uint32_t done = 0; done < launches; ++done)
      MK_RETURN_IF_ERROR(launch_with(true, mode));
    return {};
  }

  std::vector<Output*> outputs() override { return {&out_}; }

  tools::Comparison verify() const override {
    tools::CombineReference reference({spec_.nodes, options_.top_k, options_.hidden,
                                       options_.features, data_type_of(spec_),
                                       options_.partials == "f32", true});
    const tools::MoeSource& own = sources_[rank_];
    const DataType type = data_type_of(spec_);
    std::map<std::uint32_t, Elements> gate_ups, downs;
    tools::Comparison result;
    for (std::uint32_t token = 0; token < own.tokens; ++token) {
      std::vector<std::vector<double>> rows(options_.top_k), offs(options_.top_k),
          spreads(options_.top_k);
      std::vector<tools::CombineTerm> terms;
      for (std::uint32_t slot = 0; slot < options_.top_k; ++slot) {
        const std::size_t at = std::size_t{token} * options_.top_k + slot;
        if (own.ids[at] < 0) continue;
        const auto expert = static_cast<std::uint32_t>(own.ids[at]);
        if (downs[expert].empty()) downs[expert] = down_of(expert);
        if (dispatch_) {
          if (gate_ups[expert].empty()) gate_ups[expert] = gate_up_of(expert);
          tools::moe_row(shape(), own.values.data() + token * options_.hidden,
                         gate_ups[expert].data(), nullptr, &rows[slot], &offs[slot],
                         &spreads[slot]);
        } else {
          for (const std::uint16_t value : y_row(rank_, token, slot))
            rows[slot].push_back(tools::to_float(type, value));
        }
        terms.push_back(
            {rows[slot], offs[slot], downs[expert].data(), own.weights[at], spreads[slot]});
      }
      const std::uint64_t first = token * options_.hidden;
      reference.compare(terms, nullptr, out_.as<std::uint16_t>() + first, first, &result);
    }
    result.judge_mean();
    return result;
  }

  /// A token's sum crosses once from each other node that has any of its experts. In a whole layer
  /// the tokens go round the ring before.
  Work work() const override {
    Work work;
    if (dispatch_) {
      work = ring_work(spec_, rank_, [this](std::uint32_t rank) {
        return static_cast<double>(sources_[rank].tokens * options_.hidden * 2);
      });
    }
    const double sum_bytes =
        static_cast<double>(options_.hidden) * (options_.partials == "f32" ? 4 : 2);
    double sent = 0;
    for (std::uint32_t node = 0; node < spec_.nodes; ++node) {
      const std::uint32_t peer = node * spec_.local + rank_ % spec_.local;
      if (node == rank_ / spec_.local) continue;
      const std::vector<std::int32_t>& ids = sources_[peer].ids;
      for (std::size_t token = 0; token < ids.size(); token += options_.top_k) {
        const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(token);
        if (std::any_of(begin, begin + options_.top_k,
                        [this](std::int32_t id) { return is_on_my_node(id); }))
          sent += sum_bytes;
      }
    }
    work.network_bytes += sent;
    work.link_bytes += sent;
    const auto rows = static_cast<double>(rows_.size());
    const auto product = static_cast<double>(options_.hidden * options_.features);
    work.flops = 2 * rows * product * (dispatch_ ? 3 : 1);
    return work;
  }
  void set_trace(bool on) override { combine_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return combine_.trace(); }

 private:
  /// kLead: tokens, or y where nobody dispatches, of launches that lead up to the one that counts.
  enum Tensor : std::uint32_t {
    kTokens,
    kIds,
    kWeights,
    kGateUp,
    kDown,
    kY,
    kRows,
    kOffsets,
    kOut,
    kLead,
    kLeadOut
  };

  tools::MoeSource& mine() { return sources_[rank_]; }
  /// Inputs, and a poisoned output, where the executor wants them.
  Status put_tensors() {
    if (!there_) {
      MK_ASSIGN_OR_RETURN(there_, tools::ExecutorMatrices::create(spec_.executor == "cuda"));
    }
    const auto put = [this](Tensor tensor, const auto& elements) {
      return there_->put(tensor, std::as_bytes(std::span(elements)));
    };
    MK_RETURN_IF_ERROR(put(kTokens, mine().values));
    MK_RETURN_IF_ERROR(put(kIds, mine().ids));
    MK_RETURN_IF_ERROR(put(kWeights, mine().weights));
    MK_RETURN_IF_ERROR(put(kGateUp, gate_up_));
    MK_RETURN_IF_ERROR(put(kDown, down_));
    MK_RETURN_IF_ERROR(put(kY, y_));
    MK_RETURN_IF_ERROR(put(kRows, rows_));
    MK_RETURN_IF_ERROR(put(kOffsets, offsets_));
    out_.poison();
    MK_RETURN_IF_ERROR(there_->put(kOut, out_.whole()));
    if (spec_.lead == 0) return {};
    // Other values: what those launches leave behind must not pass for this launch's.
    const Elements& own = dispatch_ ? mine().values : y_;
    MK_RETURN_IF_ERROR(put(kLead, Elements(own.rbegin(), own.rend())));
    return there_->put(kLeadOut, out_.whole());
  }
  Result<LaunchStats> launch_with(bool leading, LaunchMode mode) {
    const std::uint64_t tokens = mine().tokens;
    const auto* const ids = reinterpret_cast<const std::int32_t*>(there_->at(kIds));
    GemmCombine::Input input;
    LaunchStats before;
    if (dispatch_) {
      const auto* const weights = reinterpret_cast<const float*>(there_->at(kWeights));
      MK_ASSIGN_OR_RETURN(before, dispatch_->launch({there_->at(leading ? kLead : kTokens), ids,
                                                     weights, tokens, there_->at(kGateUp)},
                                                    {there_->at(kY), rows_.size()}, mode));
      input.y = there_->at(kY);
      input.rows = dispatch_->rows();
      input.expert_offsets = dispatch_->expert_offsets();
    } else {
      input.y = there_->at(leading ? kLead : kY);
      input.rows = {reinterpret_cast<const MoeRow*>(there_->at(kRows)), rows_.size()};
      input.expert_offsets = {reinterpret_cast<const std::uint32_t*>(there_->at(kOffsets)),
                              offsets_.size()};
    }
    input.expert_weights = there_->at(kDown);
    input.ids = ids;
    input.count = tokens;
    std::byte* const out = there_->at(leading ? kLeadOut : kOut) + Output::guard_bytes();
    MK_ASSIGN_OR_RETURN(LaunchStats stats, combine_.launch(input, out, mode));
    stats.total_ns += before.total_ns;
    stats.compute_ns += before.compute_ns;
    stats.compute_wait_ns += before.compute_wait_ns;
    stats.network_bytes += before.network_bytes;
    stats.network_commands += before.network_commands;
    stats.estimated_fused_ns += before.estimated_fused_ns;
    stats.estimated_unfused_ns += before.estimated_unfused_ns;
    return stats;
  }
  tools::MoeJobShape shape() const {
    return {spec_.nodes,     spec_.local,       options_.experts,    options_.top_k,
            options_.hidden, options_.features, data_type_of(spec_), MoeEpilogue::kGatedSilu};
  }
  bool is_on_my_node(std::int32_t id) const {
    if (id < 0) return false;
    const std::uint32_t first = rank_ / spec_.local * spec_.local;
    for (std::uint32_t rank = first; rank < first + spec_.local; ++rank) {
      const RankShare experts = share_of(options_.experts, spec_.world(), rank);
      if (static_cast<std::uint64_t>(id) - experts.first < experts.count) return true;
    }
    return false;
  }
  Elements values_of_tokens() const {
    return rows_of(input_matrix(spec_, launch_, rank_, 0, options_.hidden), 0,
                   sources_[rank_].tokens);
  }
  Elements gate_up_of(std::uint32_t expert) const {
    return rows_of(input_matrix(spec_, launch_, expert, 1, 2 * options_.features), 0,
                   options_.hidden);
  }
  Elements down_of(std::uint32_t expert) const {
    return rows_of(input_matrix(spec_, launch_, expert, 2, options_.hidden), 0, options_.features);
  }
  /// What a dispatch would have left of that slot.
  Elements y_row(std::uint32_t rank, std::uint64_t token, std::uint64_t slot) const {
    return rows_of(input_matrix(spec_, launch_, rank, 3, options_.features),
                   token * options_.top_k + slot, 1);
  }

  const BenchSpec& spec_;
  const MoeLayerOptions options_;
  const MoeRouting routing_;
  const std::uint32_t rank_;
  std::optional<MoeDispatchGemm> dispatch_;
  GemmCombine combine_;
  std::uint32_t launch_ = 0;
  std::vector<tools::MoeSource> sources_;  ///< of all ranks; values of this one only
  std::vector<MoeRow> rows_;               ///< of this rank's experts
  std::vector<std::uint32_t> offsets_;
  Elements y_, gate_up_, down_;
  Output out_;
  std::optional<tools::ExecutorMatrices> there_;
  Status put_;
};

class MoeLayerCase : public ExpertCase<MoeLayerOptions> {
 public:
  explicit MoeLayerCase(bool whole) : whole_(whole) {}
  const char* name() const override { return whole_ ? "moe-layer" : "combine"; }
  const char* title() const override { return whole_ ? "MoE layer" : "GEMM+Combine"; }
  const char* help() const override {
    return whole_ ? "tokens to their experts' ranks, gated SiLU, down projection, and home"
                  : "the experts' rows times their down projections, summed at the tokens' ranks";
  }
  void add_options(CLI::App& command) override {
    ExpertCase::add_options(command);
    command.add_option("--partials", options_.partials, "as what rows and sums travel")
        ->check(CLI::IsMember({"element", "f32"}))
        ->capture_default_str();
  }
  std::string describe(const BenchSpec& spec) const override {
    const MoeLayerOptions& o = options_;
    return fmt::format(
        "{} tokens[{}] per rank, top {} of {} experts with {} features, {} routing, {}", o.tokens,
        o.hidden, o.top_k, o.experts, o.features, o.routing, spec.dtype);
  }
  std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const override {
    const MoeLayerOptions& o = options_;
    auto combine = problem(kernels::plan::Op::kCombine, spec, o.hidden, o.features);
    if (o.partials == "f32") combine.result.partials = kernels::Partials::kF32;
    if (!whole_) return {combine};
    return {problem(kernels::plan::Op::kMoe, spec, 2 * o.features, o.hidden), combine};
  }
  void make_large() override {
    options_.tokens = 2048;
    options_.hidden = 1024;
    options_.features = 512;
  }
  Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                          std::uint32_t rank) const override {
    const MoeLayerOptions& o = options_;
    MK_RETURN_IF_ERROR(check_top_k());
    Tuning tuning = o.tuning(spec);
    // On CPUs these threads sum each token's rows.
    if (tuning.executor == Executor::kCpu) tuning.receive_sms = tuning.reduce_sms;
    std::optional<MoeDispatchGemm> dispatch;
    if (whole_) {
      const MoeDispatchGemm::Shape shape{.tokens_max = o.tokens,
                                         .hidden = o.hidden,
                                         .features = o.features,
                                         .experts = o.experts,
                                         .top_k = o.top_k,
                                         .dtype = data_type_of(spec),
                                         .epilogue = MoeEpilogue::kGatedSilu};
      MK_ASSIGN_OR_RETURN(auto made, MoeDispatchGemm::create(session, shape, tuning));
      dispatch.emplace(std::move(made));
    }
    const GemmCombine::Shape shape{
        .tokens_max = o.tokens,
        .hidden = o.hidden,
        .features = o.features,
        .experts = o.experts,
        .top_k = o.top_k,
        .dtype = data_type_of(spec),
        .partials = o.partials == "f32" ? Partials::kF32 : Partials::kElement};
    MK_ASSIGN_OR_RETURN(auto combine, GemmCombine::create(session, shape, tuning));
    return std::make_unique<MoeLayerRank>(spec, o, rank, std::move(dispatch), std::move(combine));
  }

 protected:
  const char* features_help() const override { return "elements of an expert's inner rows"; }

 private:
  const bool whole_;
};

}  // namespace

std::unique_ptr<OperatorCase> make_combine_case() { return std::make_unique<MoeLayerCase>(false); }
std::unique_ptr<OperatorCase> make_moe_layer_case() { return std::make_unique<MoeLayerCase>(true); }

}  // namespace mk::bench
