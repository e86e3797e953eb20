#include <algorithm>

#include "client/tools/mkrun/operators.h"
#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/hash.h"
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

/// By Activation.
const std::vector<std::string>& activations() {
  static const std::vector<std::string> all = {"none", "relu", "gelu", "silu", "gated-silu"};
  return all;
}
Activation activation_of(const Job& job) {
  const auto found = std::find(activations().begin(), activations().end(), job.activation);
  return static_cast<Activation>(found - activations().begin());
}
/// Of a rank's product with `n` columns.
template <class Shape>
Shape shape_of(const Job& job, std::uint64_t n, std::uint64_t k) {
  Shape shape{job.rows_per_launch, n, k, type_of(job),
              job.transposed ? BLayout::kNK : BLayout::kKN};
  shape.epilogue = {activation_of(job), job.inputs.count("bias") != 0};
  if constexpr (requires { shape.partials; }) shape.partials = partials_of(job);
  return shape;
}

/// C = A B, A [m, k], B [k, n], or [n, k] when transposed.
class Gemm : public JobOperator {
 public:
  std::vector<InputSpec> inputs() const override {
    return {{"a", "[m, k]", 2}, {"b", "[k, n]", 2}, {"bias", "[n]", 1, false, true}};
  }
  std::vector<FlagSpec> flags() const override {
    return {{"b-transposed", "B lies as [n, k], like a linear layer's weight",
             &JobOptions::transposed}};
  }
  std::vector<ChoiceSpec> choices() const override {
    std::vector<ChoiceSpec> all = {
        {"activation",
         "of each element of the whole sum, after the bias; gated-silu makes n / 2 columns",
         activations(), &JobOptions::activation}};
    if (has_partials()) all.push_back(partials_choice());
    return all;
  }
  Status plan(const Tensors& tensors, Job& job) const override {
    const auto& a = tensors.at("a").shape();
    const auto& b = tensors.at("b").shape();
    const std::uint64_t n = b[job.transposed ? 0 : 1];
    if (const std::uint64_t b_k = b[job.transposed ? 1 : 0]; b_k != a[1]) {
      return fail(ErrorCode::kShapeMismatch,
                  "--a is [{}] and --b [{}]: the inner dimensions {} and {} differ{}",
                  fmt::join(a, ", "), fmt::join(b, ", "), a[1], b_k,
                  n != a[1]        ? ""
                  : job.transposed ? "; without --b-transposed they fit"
                                   : "; with --b-transposed they fit");
    }
    const bool gated = activation_of(job) == Activation::kGatedSilu;
    if (gated && n % 2 != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "--activation gated-silu takes columns by two, and B has {}", n);
    }
    if (const auto bias = tensors.find("bias");
        bias != tensors.end() && bias->second.shape()[0] != n) {
      return fail(ErrorCode::kShapeMismatch, "--bias has {} elements, but B has {} columns",
                  bias->second.shape()[0], n);
    }
    job.rows = a[0];
    job.out_shape = {a[0], gated ? n / 2 : n};
    const auto& [what, divided] = split(a[1], job.out_shape[1]);
    if (divided < job.world()) {
      return fail(ErrorCode::kInvalidArgument, "{} {} can't be split over {} ranks; use fewer",
                  what, divided, job.world());
    }
    return {};
  }

 protected:
  virtual bool has_partials() const { return true; }
  /// What is dealt out over the ranks so that each must have some, and how much of it there is.
  virtual std::pair<const char*, std::uint64_t> split(std::uint64_t k, std::uint64_t n) const = 0;
};

/// What the ranks of any of them share.
class GemmWork : public RankWork {
 public:
  GemmWork(const Job& job, std::uint32_t rank, const Tensors& tensors)
      : job_(job),
        rank_(rank),
        type_(type_of(job)),
        a_(tensors.at("a")),
        b_(tensors.at("b")),
        bias_(tensors.count("bias") == 0 ? nullptr : &tensors.at("bias")),
        step_(activation_of(job) == Activation::kGatedSilu ? 2 : 1),
        k_(a_.shape()[1]),
        n_(job.out_shape[1]),
        there_(job) {}

 protected:
  RowRange share(std::uint64_t whole, std::uint32_t rank) const {
    return rows_of_rank(whole, job_.world(), rank);
  }
  /// The columns of the product that make the columns `c` of C.
  RowRange columns_for(RowRange c) const { return {c.first * step_, c.count * step_}; }
  /// Of those columns; none if there is none.
  Elements bias(RowRange n) const {
    return bias_ == nullptr ? Elements{} : bias_->block(n.first, n.count, 0, 1, type_);
  }
  /// B's rows `k` and columns `n`, as it lies in the file.
  Elements b_as_is(RowRange k, RowRange n) const {
    return job_.transposed ? b_.block(n.first, n.count, k.first, k.count, type_)
                           : b_.block(k.first, k.count, n.first, n.count, type_);
  }
  Elements b_as_kn(RowRange k, RowRange n) const {
    return job_.transposed ? turned(b_as_is(k, n), n.count, k.count) : b_as_is(k, n);
  }
  BLayout layout() const { return job_.transposed ? BLayout::kNK : BLayout::kKN; }
  /// Launches with these where the executor wants them.
  template <class Operator>
  Result<LaunchStats> launch_with(Operator& op, const Elements& a, const Elements& b,
                                  const Elements& bias, Elements& c, std::uint64_t m) {
    GemmArguments arguments;
    MK_ASSIGN_OR_RETURN(arguments.a, there_.put(0, a));
    MK_ASSIGN_OR_RETURN(arguments.b, there_.put(1, b));
    MK_ASSIGN_OR_RETURN(arguments.c, there_.put(2, c));
    if (!bias.empty()) {
      MK_ASSIGN_OR_RETURN(arguments.bias, there_.put(3, bias));
    }
    arguments.m = m;
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, op.launch(arguments));
    MK_RETURN_IF_ERROR(there_.get(2, c));
    return stats;
  }

  const Job& job_;
  const std::uint32_t rank_;
  const DataType type_;
  const Tensor& a_;
  const Tensor& b_;
  const Tensor* const bias_;
  const std::uint64_t step_;            ///< columns of the product that make one of C
  const std::uint64_t k_, n_;           ///< n: C's
  std::uint64_t first_ = 0, rows_ = 0;  ///< of the last launch

 private:
  WorkTensors there_;
};

/// The inner dimension is split; rows of the sum are this rank's to write: its share of them.
template <class Operator>
class SumWork : public GemmWork {
 public:
  SumWork(const Job& job, std::uint32_t rank, const Tensors& tensors, Operator op)
      : GemmWork(job, rank, tensors), op_(std::move(op)), own_k_(share(k_, rank)) {
    own_b_ = b_as_is(own_k_, columns_for({0, n_}));
    own_bias_ = bias(columns_for({0, n_}));
  }

  Result<LaunchStats> launch(std::uint64_t first, std::uint64_t rows) override {
    first_ = first;
    rows_ = rows;
    const Elements a = a_.block(first, rows, own_k_.first, own_k_.count, type_);
    const bool whole = std::is_same_v<Operator, GemmAllReduce>;
    const RowRange own = share(rows, rank_);
    Elements c((whole ? rows : own.count) * n_, 0xffff);  // NaN, until the operator writes it
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, launch_with(op_, a, own_b_, own_bias_, c, rows));
    if (whole && job_.check) copy_hash_ = hash_of(raw(c));
    const std::uint64_t skip = whole ? own.first * n_ : 0;
    c_.assign(c.begin() + static_cast<std::ptrdiff_t>(skip),
              c.begin() + static_cast<std::ptrdiff_t>(skip + own.count * n_));
    return stats;
  }
  Status write(SafetensorsPart& out) override {
    return out.write((first_ + share(rows_, rank_).first) * n_ * 2, raw(c_));
  }
  Comparison check() override {
    const RowRange own = share(rows_, rank_);
    if (own.count == 0) return {};
    const RowRange columns = columns_for({0, n_});
    GemmReference reference(own.count, columns.count, job_.nodes, job_.local, type_,
                            partials_of(job_));
    reference.use_threads(share_of_cores(job_.world()));
    reference.finish(activation_of(job_), own_bias_);
    for (std::uint32_t rank = 0; rank < job_.world(); ++rank) {
      const RowRange k = share(k_, rank);
      const Elements a = a_.block(first_ + own.first, own.count, k.first, k.count, type_);
      const Elements b = b_as_kn(k, columns);
      reference.add_rank(a.data(), b.data(), k.count, largest(a, type_), largest(b, type_));
    }
    return reference.compare(c_.data());
  }
  std::uint64_t copy_hash() const override { return copy_hash_; }

 private:
  Operator op_;
  std::uint64_t copy_hash_ = 0;  ///< of the whole sum, if every rank has it
  RowRange own_k_;
  Elements own_b_, own_bias_;
  Elements c_;  ///< this rank's rows
};

template <class Operator>
class SumGemm : public Gemm {
 public:
  SumGemm(const char* name, const char* help) : name_(name), help_(help) {}
  const char* name() const override { return name_; }
  const char* help() const override { return help_; }
  Result<std::unique_ptr<RankWork>> start(Session& session, const Job& job, std::uint32_t rank,
                                          const Tensors& tensors) const override {
    const RowRange k = rows_of_rank(tensors.at("a").shape()[1], job.world(), rank);
    const auto shape = shape_of<typename Operator::Shape>(
        job, tensors.at("b").shape()[job.transposed ? 0 : 1], k.count);
    MK_ASSIGN_OR_RETURN(
        auto op, Operator::create(session, shape, tuning_of<typename Operator::Tuning>(job)));
    return std::make_unique<SumWork<Operator>>(job, rank, tensors, std::move(op));
  }

 private:
  std::pair<const char*, std::uint64_t> split(std::uint64_t k, std::uint64_t) const override {
    return {"the inner dimension", k};
  }
  const char* name_;
  const char* help_;
};

/// Rows of A and columns of B are split; columns of C are this rank's.
class AgGemmWork : public GemmWork {
 public:
  AgGemmWork(const Job& job, std::uint32_t rank, const Tensors& tensors, AllGatherGemm op)
      : GemmWork(job, rank, tensors), op_(std::move(op)), own_n_(share(n_, rank)) {
    own_b_ = b_as_is({0, k_}, columns_for(own_n_));
    own_bias_ = bias(columns_for(own_n_));
  }

  Result<LaunchStats> launch(std::uint64_t first, std::uint64_t rows) override {
    first_ = first;
    rows_ = rows;
    const RowRange own = share(rows, rank_);
    const Elements a = a_.rows(first + own.first, own.count, type_);
    c_.assign(rows * own_n_.count, 0xffff);
    return launch_with(op_, a, own_b_, own_bias_, c_, rows);
  }
  Status write(SafetensorsPart& out) override {
    const auto bytes = raw(c_);
    const std::uint64_t row_bytes = own_n_.count * 2;
    for (std::uint64_t row = 0; row < rows_; ++row) {
      MK_RETURN_IF_ERROR(out.write(((first_ + row) * n_ + own_n_.first) * 2,
                                   bytes.subspan(row * row_bytes, row_bytes)));
    }
    return {};
  }
  Comparison check() override {
    const RowRange columns = columns_for(own_n_);
    GemmReference reference(rows_, columns.count, 1, 1, type_);
    reference.finish(activation_of(job_), own_bias_);
    const Elements a = a_.rows(first_, rows_, type_);
    const Elements b = b_as_kn({0, k_}, columns);
    reference.use_threads(share_of_cores(job_.world()));
    reference.add_rank(a.data(), b.data(), k_, largest(a, type_), largest(b, type_));
    return reference.compare(c_.data());
  }

 private:
  AllGatherGemm op_;
  RowRange own_n_;  ///< of C
  Elements own_b_, own_bias_;
  Elements c_;
};

class AgGemm : public Gemm {
 public:
  const char* name() const override { return "ag-gemm"; }
  const char* help() const override {
    return "C = A B, A's rows and B's columns split over all ranks";
  }
  Result<std::unique_ptr<RankWork>> start(Session& session, const Job& job, std::uint32_t rank,
                                          const Tensors& tensors) const override {
    const RowRange n = rows_of_rank(job.out_shape[1], job.world(), rank);
    const bool gated = activation_of(job) == Activation::kGatedSilu;
    const auto shape = shape_of<AllGatherGemm::Shape>(job, gated ? 2 * n.count : n.count,
                                                      tensors.at("a").shape()[1]);
    MK_ASSIGN_OR_RETURN(
        auto op, AllGatherGemm::create(session, shape, tuning_of<AllGatherGemm::Tuning>(job)));
    return std::make_unique<AgGemmWork>(job, rank, tensors, std::move(op));
  }

 private:
  bool has_partials() const override { return false; }
  std::pair<const char*, std::uint64_t> split(std::uint64_t, std::uint64_t n) const override {
    return {"the columns of C,", n};
  }
};

}  // namespace

const JobOperator& ag_gemm_operator() {
  static const AgGemm op;
  return op;
}
const JobOperator& gemm_rs_operator() {
  static const SumGemm<GemmReduceScatter> op(
      "gemm-rs", "C = A B, the inner dimension split over all ranks, each gets its rows of C");
  return op;
}
const JobOperator& gemm_ar_operator() {
  static const SumGemm<GemmAllReduce> op(
      "gemm-ar", "C = A B, the inner dimension split over all ranks, each gets the whole C");
  return op;
}

}  // namespace mk::tools
