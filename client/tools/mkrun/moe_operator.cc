#include <algorithm>
#include <set>

#include "client/tools/mkrun/operators.h"
#include "client/tools/numeric/gemm_reference.h"
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

/// Y[t, slot] = tokens[t] experts[ids[t, slot]], and that expert's bias; 0 where the id is -1.
class MoeWork : public RankWork {
 public:
  MoeWork(const Job& job, std::uint32_t rank, const Tensors& tensors, MoeDispatchGemm op)
      : job_(job),
        rank_(rank),
        type_(type_of(job)),
        tokens_(tensors.at("tokens")),
        ids_(tensors.at("ids")),
        experts_(tensors.at("experts")),
        bias_(tensors.count("bias") == 0 ? nullptr : &tensors.at("bias")),
        hidden_(tokens_.shape()[1]),
        top_k_(ids_.shape()[1]),
        features_(job.out_shape[2]),
        op_(std::move(op)),
        there_(job) {
    own_experts_ = experts_.rows(op_.first_expert(), op_.expert_count(), type_);
    if (bias_ != nullptr) own_bias_ = bias_->rows(op_.first_expert(), op_.expert_count(), type_);
  }

  Result<LaunchStats> launch(std::uint64_t first, std::uint64_t rows) override {
    first_ = first;
    rows_ = rows;
    const RowRange own = rows_of_rank(rows, job_.world(), rank_);
    const Elements tokens = tokens_.rows(first + own.first, own.count, type_);
    const auto wide = ids_.integers((first + own.first) * top_k_, own.count * top_k_);
    std::vector<std::int32_t> ids(wide.size());
    std::transform(wide.begin(), wide.end(), ids.begin(),
                   [](std::int64_t id) { return static_cast<std::int32_t>(id); });
    const std::vector<float> weights(ids.size(), 1);
    const std::uint64_t capacity = rows * top_k_;
    y_.assign(capacity * features_, 0xffff);
    MoeDispatchGemm::Input input;
    input.count = own.count;
    MK_ASSIGN_OR_RETURN(input.tokens, there_.put(0, tokens));
    MK_ASSIGN_OR_RETURN(void* const its_ids, there_.put(1, ids));
    MK_ASSIGN_OR_RETURN(void* const its_weights, there_.put(2, weights));
    MK_ASSIGN_OR_RETURN(input.expert_weights, there_.put(3, own_experts_));
    MK_ASSIGN_OR_RETURN(void* const y, there_.put(4, y_));
    if (bias_ != nullptr) {
      MK_ASSIGN_OR_RETURN(input.bias, there_.put(5, own_bias_));
    }
    input.ids = static_cast<const std::int32_t*>(its_ids);
    input.weights = static_cast<const float*>(its_weights);
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, op_.launch(input, {y, capacity}));
    MK_RETURN_IF_ERROR(there_.get(4, y_));
    MK_ASSIGN_OR_RETURN(its_rows_, there_.copy_of(op_.rows()));
    MK_ASSIGN_OR_RETURN(offsets_, there_.copy_of(op_.expert_offsets()));
    return stats;
  }
  Status write(SafetensorsPart& out) override {
    const auto bytes = raw(y_);
    const std::uint64_t row_bytes = features_ * 2;
    for (std::size_t i = 0; i < its_rows_.size(); ++i) {
      const std::uint64_t to = token_of(its_rows_[i]) * top_k_ + its_rows_[i].slot;
      MK_RETURN_IF_ERROR(out.write(to * row_bytes, bytes.subspan(i * row_bytes, row_bytes)));
    }
    return {};
  }
  /// Every (token, slot) whose expert is here must be a row, once, and its elements right.
  Comparison check() override {
    Comparison result;
    std::set<std::pair<std::uint64_t, std::uint64_t>> expected;
    const auto ids = ids_.integers(first_ * top_k_, rows_ * top_k_);
    for (std::uint64_t i = 0; i < ids.size(); ++i) {
      const auto first = static_cast<std::int64_t>(op_.first_expert());
      if (ids[i] >= first && ids[i] < first + static_cast<std::int64_t>(op_.expert_count()))
        expected.emplace(first_ + i / top_k_, i % top_k_);
    }
    for (std::uint32_t expert = 0; expert < op_.expert_count(); ++expert) {
      const std::uint64_t begin = offsets_[expert];
      const std::uint64_t count = offsets_[expert + 1] - begin;
      Elements packed;
      for (std::uint64_t row = begin; row < begin + count; ++row) {
        const MoeRow& from = its_rows_[row];
        const std::uint64_t token = token_of(from);
        const bool right = ids_.integers(token * top_k_ + from.slot, 1)[0] ==
                               op_.first_expert() + std::int64_t{expert} &&
                           expected.erase({token, from.slot}) == 1;
        if (!right) result.add(row, 1, 0, 0);
        const Elements values = tokens_.rows(token, 1, type_);
        packed.insert(packed.end(), values.begin(), values.end());
      }
      if (count == 0) continue;
      Elements weights = experts_.rows(op_.first_expert() + expert, 1, type_);
      if (job_.transposed) weights = turned(weights, features_, hidden_);
      GemmReference reference(count, features_, 1, 1, type_);
      if (bias_ != nullptr)
        reference.finish(Activation::kNone, bias_->rows(op_.first_expert() + expert, 1, type_));
      reference.add_rank(packed.data(), weights.data(), hidden_, largest(packed, type_),
                         largest(weights, type_));
      result.add(reference.compare(y_.data() + begin * features_));
    }
    for (const auto& missing : expected) result.add(missing.first, 1, 0, 0);
    return result;
  }

 private:
  /// Of the whole.
  std::uint64_t token_of(const MoeRow& row) const {
    return first_ + rows_of_rank(rows_, job_.world(), row.rank).first + row.token;
  }

  const Job& job_;
  const std::uint32_t rank_;
  const DataType type_;
  const Tensor& tokens_;
  const Tensor& ids_;
  const Tensor& experts_;
  const Tensor* const bias_;  ///< or null
  const std::uint64_t hidden_, top_k_, features_;
  MoeDispatchGemm op_;
  WorkTensors there_;
  Elements own_experts_, own_bias_;
  std::uint64_t first_ = 0, rows_ = 0;  ///< of the last launch
  Elements y_;
  std::vector<MoeRow> its_rows_;
  std::vector<std::uint32_t> offsets_;
};

class Moe : public JobOperator {
 public:
  const char* name() const override { return "moe"; }
  const char* help() const override {
    return "Y[t, slot] = tokens[t] experts[ids[t, slot]], perhaps with a bias; the experts are "
           "split "
           "over all ranks";
  }
  std::vector<InputSpec> inputs() const override {
    return {{"tokens", "[t, h]", 2},
            {"ids", "[t, k]: each token's experts, -1 for none", 2, true},
            {"experts", "[e, h, f]: the experts' weights", 3},
            {"bias", "[e, f]: of each expert's columns", 2, false, true}};
  }
  std::vector<FlagSpec> flags() const override {
    return {
        {"experts-transposed", "the experts' weights lie as [e, f, h]", &JobOptions::transposed}};
  }
  Status plan(const Tensors& tensors, Job& job) const override {
    const auto& tokens = tensors.at("tokens").shape();
    const auto& ids = tensors.at("ids").shape();
    const auto& experts = tensors.at("experts").shape();
    const std::uint64_t hidden = experts[job.transposed ? 2 : 1];
    if (hidden != tokens[1]) {
      return fail(
          ErrorCode::kShapeMismatch,
          "--tokens is [{}] and --experts [{}]: tokens of {} elements do not fit experts of "
          "{}{}",
          fmt::join(tokens, ", "), fmt::join(experts, ", "), tokens[1], hidden,
          experts[job.transposed ? 1 : 2] != tokens[1] ? ""
          : job.transposed                             ? "; without --experts-transposed they fit"
                                                       : "; with --experts-transposed they fit");
    }
    if (ids[0] != tokens[0]) {
      return fail(ErrorCode::kShapeMismatch, "--ids has {} rows for {} tokens", ids[0], tokens[0]);
    }
    if (ids[1] > experts[0]) {
      return fail(ErrorCode::kInvalidArgument,
                  "--ids has {} experts for each token; there are only {}", ids[1], experts[0]);
    }
    const std::uint64_t features = experts[job.transposed ? 1 : 2];
    if (hidden % 8 != 0 || features % 8 != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "--experts: {} and {} elements; both must be multiples of 8", hidden, features);
    }
    if (const auto bias = tensors.find("bias"); bias != tensors.end()) {
      const auto& shape = bias->second.shape();
      if (shape[0] != experts[0] || shape[1] != features) {
        return fail(ErrorCode::kShapeMismatch, "--bias is [{}], but --experts give [{}, {}]",
                    fmt::join(shape, ", "), experts[0], features);
      }
    }
    // Before anything starts, and of the whole.
    const auto all = tensors.at("ids").integers(0, ids[0] * ids[1]);
    for (std::uint64_t i = 0; i < all.size(); ++i) {
      if (all[i] >= -1 && all[i] < static_cast<std::int64_t>(experts[0])) continue;
      return fail(
          ErrorCode::kInvalidArgument,
          "--ids: token {}, slot {} goes to expert {}; allowed are 0 to {}, and -1 for none",
          i / ids[1], i % ids[1], all[i], experts[0] - 1);
    }
    job.rows = tokens[0];
    job.out_shape = {tokens[0], ids[1], features};
    return {};
  }
  Result<std::unique_ptr<RankWork>> start(Session& session, const Job& job, std::uint32_t rank,
                                          const Tensors& tensors) const override {
    MoeDispatchGemm::Shape shape;
    shape.tokens_max = (job.rows_per_launch + job.world() - 1) / job.world();
    shape.hidden = tensors.at("tokens").shape()[1];
    shape.features = job.out_shape[2];
    shape.rows_max = job.world() * shape.tokens_max * job.out_shape[1];
    shape.experts = static_cast<std::uint32_t>(tensors.at("experts").shape()[0]);
    shape.top_k = static_cast<std::uint32_t>(job.out_shape[1]);
    shape.dtype = type_of(job);
    shape.b_layout = job.transposed ? BLayout::kNK : BLayout::kKN;
    shape.bias = job.inputs.count("bias") != 0;
    MK_ASSIGN_OR_RETURN(
        auto op, MoeDispatchGemm::create(session, shape, tuning_of<MoeDispatchGemm::Tuning>(job)));
    return std::make_unique<MoeWork>(job, rank, tensors, std::move(op));
  }
};

}  // namespace

const JobOperator& moe_operator() {
  static const Moe op;
  return op;
}

}  // namespace mk::tools
