#include <algorithm>
#include <map>

#include "client/tools/mkrun/operators.h"
#include "client/tools/numeric/combine_reference.h"
#include "client/tools/numeric/moe_reference.h"
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

/// Y[t] = sum over slots of weights[t, slot] (silu(tokens[t] gate) * (tokens[t] up)) down, gate, up
/// and down of expert ids[t, slot].
class MoeLayerWork : public RankWork {
 public:
  MoeLayerWork(const Job& job, std::uint32_t rank, const Tensors& tensors, MoeDispatchGemm dispatch,
               GemmCombine combine)
      : job_(job),
        rank_(rank),
        type_(type_of(job)),
        tokens_(tensors.at("tokens")),
        ids_(tensors.at("ids")),
        weights_(tensors.at("weights")),
        gate_up_(tensors.at("gate-up")),
        down_(tensors.at("down")),
        hidden_(tokens_.shape()[1]),
        top_k_(ids_.shape()[1]),
        inner_(down_.shape()[job.transposed ? 2 : 1]),
        dispatch_(std::move(dispatch)),
        combine_(std::move(combine)),
        there_(job) {
    own_gate_up_ = gate_up_.rows(dispatch_.first_expert(), dispatch_.expert_count(), type_);
    own_down_ = down_.rows(dispatch_.first_expert(), dispatch_.expert_count(), type_);
  }

  Result<LaunchStats> launch(std::uint64_t first, std::uint64_t rows) override {
    const RowRange own = rows_of_rank(rows, job_.world(), rank_);
    first_ = first + own.first;
    count_ = own.count;
    values_ = tokens_.rows(first_, count_, type_);
    const auto wide = ids_.integers(first_ * top_k_, count_ * top_k_);
    own_ids_.resize(wide.size());
    std::transform(wide.begin(), wide.end(), own_ids_.begin(),
                   [](std::int64_t id) { return static_cast<std::int32_t>(id); });
    own_weights_ = weights_.floats(first_ * top_k_, count_ * top_k_);
    const std::uint64_t capacity = rows * top_k_;
    y_.assign(capacity * inner_, 0xffff);
    out_.assign(count_ * hidden_, 0xffff);
    MK_ASSIGN_OR_RETURN(void* const values, there_.put(0, values_));
    MK_ASSIGN_OR_RETURN(void* const ids, there_.put(1, own_ids_));
    MK_ASSIGN_OR_RETURN(void* const weights, there_.put(2, own_weights_));
    MK_ASSIGN_OR_RETURN(void* const gate_up, there_.put(3, own_gate_up_));
    MK_ASSIGN_OR_RETURN(void* const down, there_.put(4, own_down_));
    MK_ASSIGN_OR_RETURN(void* const y, there_.put(5, y_));
    MK_ASSIGN_OR_RETURN(void* const out, there_.put(6, out_));
    const auto* const its_ids = static_cast<const std::int32_t*>(ids);
    MK_ASSIGN_OR_RETURN(
        const LaunchStats before,
        dispatch_.launch({values, its_ids, static_cast<const float*>(weights), count_, gate_up},
                         {y, capacity}));
    MK_ASSIGN_OR_RETURN(
        LaunchStats stats,
        combine_.launch({y, dispatch_.rows(), dispatch_.expert_offsets(), down, its_ids, count_},
                        out));
    MK_RETURN_IF_ERROR(there_.get(6, out_));
    stats.total_ns += before.total_ns;
    stats.network_bytes += before.network_bytes;
    return stats;
  }
  Status write(SafetensorsPart& out) override { return out.write(first_ * hidden_ * 2, raw(out_)); }
  Comparison check() override {
    const MoeJobShape dispatched{job_.nodes,
                                 job_.local,
                                 static_cast<std::uint32_t>(gate_up_.shape()[0]),
                                 static_cast<std::uint32_t>(top_k_),
                                 hidden_,
                                 inner_,
                                 type_,
                                 epilogue_of(job_)};
    CombineReference reference(
        {job_.nodes, static_cast<std::uint32_t>(top_k_), hidden_, inner_, type_, false});
    Comparison result;
    for (std::uint64_t token = 0; token < count_; ++token) {
      std::vector<std::vector<double>> rows(top_k_), offs(top_k_);
      std::vector<CombineTerm> terms;
      for (std::uint64_t slot = 0; slot < top_k_; ++slot) {
        const std::int32_t id = own_ids_[token * top_k_ + slot];
        if (id < 0) continue;
        const Expert& expert = expert_at(static_cast<std::uint64_t>(id));
        moe_row(dispatched, values_.data() + token * hidden_, expert.gate_up.data(), nullptr,
                &rows[slot], &offs[slot]);
        terms.push_back(
            {rows[slot], offs[slot], expert.down.data(), own_weights_[token * top_k_ + slot]});
      }
      reference.compare(terms, nullptr, out_.data() + token * hidden_, token * hidden_, &result);
    }
    return result;
  }

  static MoeEpilogue epilogue_of(const Job& job) {
    return job.interleaved ? MoeEpilogue::kGatedSiluInterleaved : MoeEpilogue::kGatedSilu;
  }

 private:
  /// Its weights, [h, 2 i] and [i, h].
  struct Expert {
    Elements gate_up, down;
  };
  const Expert& expert_at(std::uint64_t id) {
    const auto [found, made] = experts_.try_emplace(id);
    if (made) {
      Expert& expert = found->second;
      expert.gate_up = gate_up_.rows(id, 1, type_);
      expert.down = down_.rows(id, 1, type_);
      if (job_.transposed) {
        expert.gate_up = turned(expert.gate_up, 2 * inner_, hidden_);
        expert.down = turned(expert.down, hidden_, inner_);
      }
    }
    return found->second;
  }

  const Job& job_;
  const std::uint32_t rank_;
  const DataType type_;
  const Tensor& tokens_;
  const Tensor& ids_;
  const Tensor& weights_;
  const Tensor& gate_up_;
  const Tensor& down_;
  const std::uint64_t hidden_, top_k_, inner_;
  MoeDispatchGemm dispatch_;
  GemmCombine combine_;
  WorkTensors there_;
  Elements own_gate_up_, own_down_;
  std::map<std::uint64_t, Expert> experts_;  ///< those that a check has needed
  // Of the last launch; this rank's tokens.
  std::uint64_t first_ = 0, count_ = 0;
  Elements values_, y_, out_;
  std::vector<std::int32_t> own_ids_;
  std::vector<float> own_weights_;
};

class MoeLayer : public JobOperator {
 public:
  const char* name() const override { return "moe-layer"; }
  const char* help() const override {
    return "Y[t] = the sum of weights[t, slot] (silu(tokens[t] gate) * (tokens[t] up)) down, of "
           "the "
           "experts ids[t, slot], which are split over all ranks";
  }
  std::vector<InputSpec> inputs() const override {
    return {{"tokens", "[t, h]", 2},
            {"ids", "[t, k]: each token's experts, -1 for none", 2, true},
            {"weights", "[t, k]: their routing weights", 2},
            {"gate-up", "[e, h, 2 i]: the experts' gates, then their up projections", 3},
            {"down", "[e, i, h]: the experts' down projections", 3}};
  }
  std::vector<FlagSpec> flags() const override {
    return {{"experts-transposed", "the experts' weights lie as [e, 2 i, h] and [e, h, i]",
             &JobOptions::transposed},
            {"interleaved", "gates and up projections alternate", &JobOptions::interleaved}};
  }
  Status plan(const Tensors& tensors, Job& job) const override {
    const auto& tokens = tensors.at("tokens").shape();
    const auto& ids = tensors.at("ids").shape();
    const auto& weights = tensors.at("weights").shape();
    const auto& gate_up = tensors.at("gate-up").shape();
    const auto& down = tensors.at("down").shape();
    const std::uint64_t hidden = tokens[1];
    const std::uint64_t inner = down[job.transposed ? 2 : 1];
    if (gate_up[0] != down[0] || gate_up[job.transposed ? 2 : 1] != hidden ||
        gate_up[job.transposed ? 1 : 2] != 2 * inner || down[job.transposed ? 1 : 2] != hidden) {
      return fail(ErrorCode::kShapeMismatch,
                  "--tokens is [{}], --gate-up [{}] and --down [{}]; they must be [t, h], {} (see "
                  "--experts-transposed)",
                  fmt::join(tokens, ", "), fmt::join(gate_up, ", "), fmt::join(down, ", "),
                  job.transposed ? "[e, 2 i, h] and [e, h, i]" : "[e, h, 2 i] and [e, i, h]");
    }
    if (ids[0] != tokens[0] || weights != ids) {
      return fail(
          ErrorCode::kShapeMismatch,
          "--ids is [{}] and --weights [{}]; both must have a row for each of {} tokens, and "
          "be alike",
          fmt::join(ids, ", "), fmt::join(weights, ", "), tokens[0]);
    }
    if (ids[1] > down[0]) {
      return fail(ErrorCode::kInvalidArgument,
                  "--ids has {} experts for each token; there are only {}", ids[1], down[0]);
    }
    if (hidden % 8 != 0 || inner % 8 != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "--down: {} and {} elements; both must be multiples of 8", inner, hidden);
    }
    // Before anything starts, and of the whole.
    const auto all = tensors.at("ids").integers(0, ids[0] * ids[1]);
    for (std::uint64_t i = 0; i < all.size(); ++i) {
      if (all[i] >= -1 && all[i] < static_cast<std::int64_t>(down[0])) continue;
      return fail(
          ErrorCode::kInvalidArgument,
          "--ids: token {}, slot {} goes to expert {}; allowed are 0 to {}, and -1 for none",
          i / ids[1], i % ids[1], all[i], down[0] - 1);
    }
    job.rows = tokens[0];
    job.out_shape = {tokens[0], hidden};
    return {};
  }
  Result<std::unique_ptr<RankWork>> start(Session& session, const Job& job, std::uint32_t rank,
                                          const Tensors& tensors) const override {
    MoeDispatchGemm::Shape first;
    first.tokens_max = (job.rows_per_launch + job.world() - 1) / job.world();
    first.hidden = job.out_shape[1];
    first.features = tensors.at("down").shape()[job.transposed ? 2 : 1];
    first.experts = static_cast<std::uint32_t>(tensors.at("down").shape()[0]);
    first.top_k = static_cast<std::uint32_t>(tensors.at("ids").shape()[1]);
    first.dtype = type_of(job);
    first.b_layout = job.transposed ? BLayout::kNK : BLayout::kKN;
    first.epilogue = MoeLayerWork::epilogue_of(job);
    GemmCombine::Shape second;
    second.tokens_max = first.tokens_max;
    second.hidden = first.hidden;
    second.features = first.features;
    second.experts = first.experts;
    second.top_k = first.top_k;
    second.dtype = first.dtype;
    second.b_layout = first.b_layout;
    const auto tuning = tuning_of<Tuning>(job);
    MK_ASSIGN_OR_RETURN(auto dispatch, MoeDispatchGemm::create(session, first, tuning));
    MK_ASSIGN_OR_RETURN(auto combine, GemmCombine::create(session, second, tuning));
    return std::make_unique<MoeLayerWork>(job, rank, tensors, std::move(dispatch),
                                          std::move(combine));
  }
};

}  // namespace

const JobOperator& combine_operator() {
  static const MoeLayer op;
  return op;
}

}  // namespace mk::tools
