#include <cmath>

#include "client/tools/mkrun/operators.h"
#include "client/tools/numeric/attention_reference.h"
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

/// Keys of a tile on CPUs, which the reference's bound depends on.
constexpr std::uint32_t kTileKeys = 128;

bool on_gpu(const Job& job) { return job.executor == "cuda"; }

std::uint64_t parts_of(const Job& job) { return std::uint64_t{job.world()} * (job.causal ? 2 : 1); }

/// O = softmax(Q K^T / sqrt(D)) V over the whole sequence, in one launch.
class RingWork : public RankWork {
 public:
  RingWork(const Job& job, std::uint32_t rank, const Tensors& tensors, RingAttention op)
      : job_(job),
        type_(type_of(job)),
        k_(tensors.at("k")),
        v_(tensors.at("v")),
        own_(sequence_rows_of_rank(job.rows, job.causal, job.world(), rank)),
        row_elements_(tensors.at("q").row_elements()),
        op_(std::move(op)),
        there_(job) {
    own_q_ = own_rows(tensors.at("q"));
  }

  Result<LaunchStats> launch(std::uint64_t, std::uint64_t rows) override {
    const Elements k = own_rows(k_);
    const Elements v = own_rows(v_);
    out_.assign(own_q_.size(), 0xffff);
    RingAttention::Input input;
    MK_ASSIGN_OR_RETURN(input.q, there_.put(0, own_q_));
    MK_ASSIGN_OR_RETURN(input.k, there_.put(1, k));
    MK_ASSIGN_OR_RETURN(input.v, there_.put(2, v));
    MK_ASSIGN_OR_RETURN(void* const out, there_.put(3, out_));
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, op_.launch(input, {.out = out}, rows));
    MK_RETURN_IF_ERROR(there_.get(3, out_));
    return stats;
  }
  Status write(SafetensorsPart& out) override {
    auto bytes = raw(out_);
    for (const RowRange& part : own_.parts) {
      const std::uint64_t size = part.count * row_elements_ * 2;
      MK_RETURN_IF_ERROR(out.write(part.first * row_elements_ * 2, bytes.first(size)));
      bytes = bytes.subspan(size);
    }
    return {};
  }
  Comparison check() override {
    AttentionProblem problem;
    problem.sequence = job_.rows;
    problem.query_heads = static_cast<std::uint32_t>(job_.out_shape[1]);
    problem.key_heads = static_cast<std::uint32_t>(k_.shape()[1]);
    problem.head_dim = static_cast<std::uint32_t>(job_.out_shape[2]);
    problem.causal = job_.causal;
    problem.scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
    problem.type = type_;
    problem.on_gpu = on_gpu(job_);
    problem.tile_keys =
        problem.on_gpu ? AttentionProblem::gpu_tile_keys(problem.head_dim) : kTileKeys;
    problem.tiles = AttentionProblem::tiles_over(job_.rows, parts_of(job_), problem.tile_keys);
    const AttentionReference reference(problem, k_.rows(0, job_.rows, type_).data(),
                                       v_.rows(0, job_.rows, type_).data());
    Comparison result;
    std::uint64_t at = 0;
    for (const RowRange& part : own_.parts) {
      result.add(
          reference.compare(part.first, part.count, own_q_.data() + at, out_.data() + at, nullptr)
              .out);
      at += part.count * row_elements_;
    }
    return result;
  }

 private:
  Elements own_rows(const Tensor& tensor) const {
    Elements all;
    for (const RowRange& part : own_.parts) {
      const Elements rows = tensor.rows(part.first, part.count, type_);
      all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
  }

  const Job& job_;
  const DataType type_;
  const Tensor& k_;
  const Tensor& v_;
  const SequenceRows own_;
  const std::uint64_t row_elements_;  ///< of Q and the output
  RingAttention op_;
  WorkTensors there_;
  Elements own_q_;
  Elements out_;
};

class Ring : public JobOperator {
 public:
  const char* name() const override { return "ring"; }
  const char* help() const override {
    return "O = softmax(Q K^T / sqrt(d)) V, the sequence split over all ranks";
  }
  std::vector<InputSpec> inputs() const override {
    return {{"q", "[s, query heads, d]", 3}, {"k", "[s, key heads, d]", 3}, {"v", "like k", 3}};
  }
  std::vector<FlagSpec> flags() const override {
    return {{"causal", "a position sees itself and those before it", &JobOptions::causal}};
  }
  Status plan(const Tensors& tensors, Job& job) const override {
    const auto& q = tensors.at("q").shape();
    const auto& k = tensors.at("k").shape();
    const auto& v = tensors.at("v").shape();
    if (k != v || q[0] != k[0] || q[2] != k[2]) {
      return fail(
          ErrorCode::kShapeMismatch,
          "--q is [{}], --k [{}] and --v [{}]: k and v must be alike, and like q but for the "
          "number of heads",
          fmt::join(q, ", "), fmt::join(k, ", "), fmt::join(v, ", "));
    }
    if (q[2] != 64 && q[2] != 128) {
      return fail(ErrorCode::kInvalidArgument, "heads of {} elements; 64 and 128 are possible",
                  q[2]);
    }
    if (q[1] % k[1] != 0) {
      return fail(ErrorCode::kInvalidArgument, "{} query heads cannot share {} key heads evenly",
                  q[1], k[1]);
    }
    if (q[0] < parts_of(job)) {
      return fail(ErrorCode::kInvalidArgument,
                  "a sequence of {} can't be split into {} parts for {} ranks; use fewer", q[0],
                  parts_of(job), job.world());
    }
    job.rows = job.rows_per_launch = q[0];
    job.out_shape = q;
    return {};
  }
  Result<std::unique_ptr<RankWork>> start(Session& session, const Job& job, std::uint32_t rank,
                                          const Tensors& tensors) const override {
    RingAttention::Shape shape;
    shape.seq_max = job.rows;
    shape.query_heads = static_cast<std::uint32_t>(job.out_shape[1]);
    shape.key_heads = static_cast<std::uint32_t>(tensors.at("k").shape()[1]);
    shape.head_dim = static_cast<std::uint32_t>(job.out_shape[2]);
    shape.causal = job.causal;
    shape.dtype = type_of(job);
    auto tuning = tuning_of<RingAttention::Tuning>(job);
    if (!on_gpu(job)) tuning.tile_n = kTileKeys;
    MK_ASSIGN_OR_RETURN(auto op, RingAttention::create(session, shape, tuning));
    return std::make_unique<RingWork>(job, rank, tensors, std::move(op));
  }
};

}  // namespace

const JobOperator& ring_operator() {
  static const Ring op;
  return op;
}

}  // namespace mk::tools
