#include <cmath>
#include <numeric>
#include <vector>

#include "client/tools/mkrun/operators.h"
#include "client/tools/numeric/attention_reference.h"
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

/// Keys of a tile on CPUs, which the reference's bound depends on.
constexpr std::uint32_t kTileKeys = 128;

bool on_gpu(const Job& job) { return job.executor == "cuda"; }

std::uint64_t parts_of(const Job& job) { return std::uint64_t{job.world()} * (job.causal ? 2 : 1); }

/// The job's sequences, in the order of their rows.
std::vector<RowRange> sequences_of(const Job& job) {
  if (job.lengths.empty()) return {{0, job.rows}};
  std::vector<RowRange> all;
  std::uint64_t first = 0;
  for (const std::uint32_t length : job.lengths) {
    all.push_back({first, length});
    first += length;
  }
  return all;
}

/// What a rank has of a sequence.
struct OwnPart {
  RowRange sequence;
  RowRange rows;  ///< within that
};
std::vector<OwnPart> parts_of_rank(const Job& job, std::uint32_t rank) {
  std::vector<OwnPart> all;
  for (const RowRange& sequence : sequences_of(job)) {
    const auto own = sequence_rows_of_rank(sequence.count, job.causal, job.world(), rank);
    for (const RowRange& part : own.parts) {
      if (part.count != 0) all.push_back({sequence, part});
    }
  }
  return all;
}

/// O = softmax(Q K^T / sqrt(D)) V over the whole sequence, or each of several, in one launch.
class RingWork : public RankWork {
 public:
  RingWork(const Job& job, std::uint32_t rank, const Tensors& tensors, RingAttention op)
      : job_(job),
        type_(type_of(job)),
        k_(tensors.at("k")),
        v_(tensors.at("v")),
        own_(parts_of_rank(job, rank)),
        row_elements_(tensors.at("q").row_elements()),
        op_(std::move(op)),
        there_(job) {
    own_q_ = own_rows(tensors.at("q"));
    for (const RowRange& sequence : sequences_of(job))
      starts_.push_back(static_cast<std::uint32_t>(sequence.first));
    starts_.push_back(static_cast<std::uint32_t>(job.rows));
  }

  Result<LaunchStats> launch(std::uint64_t, std::uint64_t rows) override {
    const Elements k = own_rows(k_);
    const Elements v = own_rows(v_);
    out_.assign(own_q_.size(), 0xffff);
    RingAttention::Input input;
    MK_ASSIGN_OR_RETURN(input.q, there_.put(0, own_q_));
    MK_ASSIGN_OR_RETURN(input.k, there_.put(1, k));
    MK_ASSIGN_OR_RETURN(input.v, there_.put(2, v));
    if (!job_.lengths.empty()) {
      MK_ASSIGN_OR_RETURN(void* const starts, there_.put(4, starts_));
      input.sequence_starts = static_cast<const std::uint32_t*>(starts);
      input.sequences = static_cast<std::uint32_t>(job_.lengths.size());
      for (const OwnPart& part : own_) input.rows += part.rows.count;
    }
    MK_ASSIGN_OR_RETURN(void* const out, there_.put(3, out_));
    RingAttention::Output output{.out = out};
    if (job_.check) {
      lse_.assign(out_.size() / job_.out_shape[2], std::nanf(""));
      MK_ASSIGN_OR_RETURN(void* const lse, there_.put(5, lse_));
      output.lse = static_cast<float*>(lse);
    }
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, op_.launch(input, output, rows));
    MK_RETURN_IF_ERROR(there_.get(3, out_));
    if (job_.check) MK_RETURN_IF_ERROR(there_.get(5, lse_));
    return stats;
  }
  Status write(SafetensorsPart& out) override {
    auto bytes = raw(out_);
    for (const auto& [sequence, part] : own_) {
      const std::uint64_t size = part.count * row_elements_ * 2;
      const std::uint64_t first = sequence.first + part.first;
      MK_RETURN_IF_ERROR(out.write(first * row_elements_ * 2, bytes.first(size)));
      bytes = bytes.subspan(size);
    }
    return {};
  }
  Comparison check() override {
    Comparison result;
    std::uint64_t at = 0;
    for (auto part = own_.begin(); part != own_.end();) {
      const RowRange sequence = part->sequence;
      const AttentionReference reference(problem_of(sequence.count),
                                         k_.rows(sequence.first, sequence.count, type_).data(),
                                         v_.rows(sequence.first, sequence.count, type_).data());
      for (; part != own_.end() && part->sequence.first == sequence.first; ++part) {
        const RowRange& rows = part->rows;
        const auto found =
            reference.compare(rows.first, rows.count, own_q_.data() + at, out_.data() + at,
                              lse_.data() + at / job_.out_shape[2]);
        result.add(found.out);
        // On GPUs it shows a missing key that the bound of the output has room for.
        result.add(found.lse);
        at += rows.count * row_elements_;
      }
    }
    return result;
  }

 private:
  AttentionProblem problem_of(std::uint64_t rows) const {
    AttentionProblem problem;
    problem.sequence = rows;
    problem.query_heads = static_cast<std::uint32_t>(job_.out_shape[1]);
    problem.key_heads = static_cast<std::uint32_t>(k_.shape()[1]);
    problem.head_dim = static_cast<std::uint32_t>(job_.out_shape[2]);
    problem.causal = job_.causal;
    problem.scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
    problem.type = type_;
    problem.on_gpu = on_gpu(job_);
    problem.tile_keys =
        problem.on_gpu ? AttentionProblem::gpu_tile_keys(problem.head_dim) : kTileKeys;
    problem.tiles = AttentionProblem::tiles_over(rows, parts_of(job_), problem.tile_keys);
    return problem;
  }
  Elements own_rows(const Tensor& tensor) const {
    Elements all;
    for (const auto& [sequence, part] : own_) {
      const Elements rows = tensor.rows(sequence.first + part.first, part.count, type_);
      all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
  }

  const Job& job_;
  const DataType type_;
  const Tensor& k_;
  const Tensor& v_;
  const std::vector<OwnPart> own_;
  const std::uint64_t row_elements_;  ///< of Q and the output
  RingAttention op_;
  WorkTensors there_;
  std::vector<std::uint32_t> starts_;
  Elements own_q_;
  Elements out_;
  std::vector<float> lse_;  ///< of a launch that is checked
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
  std::vector<NumbersSpec> numbers() const override {
    return {{"lengths", "of packed sequences, which see nothing of each other, e.g. 300,0,5000",
             &JobOptions::lengths}};
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
    if (!job.lengths.empty()) {
      const std::uint64_t rows =
          std::accumulate(job.lengths.begin(), job.lengths.end(), std::uint64_t{});
      if (rows != q[0]) {
        return fail(ErrorCode::kShapeMismatch,
                    "--lengths are of {} rows in all, and the tensors have {}", rows, q[0]);
      }
    } else if (q[0] == 0) {
      return fail(ErrorCode::kInvalidArgument, "a sequence of 0 rows");
    } else if (q[0] < parts_of(job)) {
      // A packed sequence may be too short to give every rank a row.
      job.lengths = {static_cast<std::uint32_t>(q[0])};
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
    shape.sequences_max = static_cast<std::uint32_t>(job.lengths.size());
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
