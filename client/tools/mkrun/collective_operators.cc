#include "client/tools/mkrun/operators.h"
#include "client/tools/numeric/sum_reference.h"
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

/// Each rank brings its rows of x, which has those of one rank after the other's, and writes its
/// share of the result: of an output that all ranks have, the next one's, so that all that is
/// written has travelled.
template <class Op>
class CollectiveWork : public RankWork {
 public:
  CollectiveWork(const Job& job, std::uint32_t rank, const Tensors& tensors, Op op)
      : job_(job),
        rank_(rank),
        type_(type_of(job)),
        x_(tensors.at("x")),
        n_(job.out_shape[1]),
        op_(std::move(op)),
        there_(job) {}

  Result<LaunchStats> launch(std::uint64_t first, std::uint64_t rows) override {
    first_ = first;
    rows_ = rows;
    const RowRange own = brings(rank_);
    out_.assign(gets(rank_).count * n_, 0xffff);  // NaN, until the operator writes it
    const Elements input = rows_of(rank_, own.first, own.count);
    MK_ASSIGN_OR_RETURN(const void* const in, there_.put(0, input));
    MK_ASSIGN_OR_RETURN(void* const out, there_.put(1, out_));
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, op_.launch(in, out, rows));
    MK_RETURN_IF_ERROR(there_.get(1, out_));
    return stats;
  }
  Status write(SafetensorsPart& out) override {
    const RowRange here = gets(rank_);
    const RowRange part =
        kWhole ? rows_of_rank(rows_, job_.world(), (rank_ + 1) % job_.world()) : here;
    return out.write((first_ + part.first) * n_ * 2,
                     raw(out_).subspan((part.first - here.first) * n_ * 2, part.count * n_ * 2));
  }
  Comparison check() override {
    const RowRange here = gets(rank_);
    if constexpr (Op::kSums) {
      SumReference sums(out_.size(), job_.nodes, job_.local, type_, partials_of(job_));
      for (std::uint32_t rank = 0; rank < job_.world(); ++rank)
        sums.add_rank(rows_of(rank, here.first, here.count).data());
      return sums.compare(out_.data());
    } else {
      const Elements all = x_.rows(first_, rows_, type_);
      Comparison result;
      for (std::uint64_t i = 0; i < all.size(); ++i) result.add(i, out_[i], all[i], 0);
      return result;
    }
  }

 private:
  static constexpr bool kWhole = Op::output_rows(2, 2, 0).count == 2;  ///< every rank gets it

  RowRange brings(std::uint32_t rank) const { return Op::input_rows(rows_, job_.world(), rank); }
  RowRange gets(std::uint32_t rank) const { return Op::output_rows(rows_, job_.world(), rank); }
  /// A rank's rows from row `first` of the launch on.
  Elements rows_of(std::uint32_t rank, std::uint64_t first, std::uint64_t count) const {
    const std::uint64_t before = Op::kSums ? rank * job_.rows : 0;
    return x_.rows(before + first_ + first, count, type_);
  }

  const Job& job_;
  const std::uint32_t rank_;
  const DataType type_;
  const Tensor& x_;
  const std::uint64_t n_;
  std::uint64_t first_ = 0, rows_ = 0;  ///< of the last launch
  Elements out_;
  Op op_;
  WorkTensors there_;
};

template <class Op>
class CollectiveJobOperator : public JobOperator {
 public:
  explicit CollectiveJobOperator(const char* name) : name_(name) {}

  const char* name() const override { return name_; }
  const char* help() const override { return Op::kSummary; }
  std::vector<InputSpec> inputs() const override {
    return {{"x", Op::kSums ? "[ranks m, n], a rank's rows after the other's" : "[m, n]", 2}};
  }
  std::vector<FlagSpec> flags() const override { return {}; }
  std::vector<ChoiceSpec> choices() const override {
    if constexpr (!kHasPartials) return {};
    return {partials_choice()};
  }
  Status plan(const Tensors& tensors, Job& job) const override {
    const auto& shape = tensors.at("x").shape();
    const std::uint32_t stacked = Op::kSums ? job.world() : 1;
    if (shape[0] % stacked != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "--x has {} rows, which are not a multiple of {}: it takes the rows of {} ranks, "
                  "as many of each; change --nodes or --local, or give other rows",
                  shape[0], stacked, stacked);
    }
    job.out_shape = {shape[0] / stacked, shape[1]};
    job.rows = job.out_shape[0];
    return {};
  }
  Result<std::unique_ptr<RankWork>> start(Session& session, const Job& job, std::uint32_t rank,
                                          const Tensors& tensors) const override {
    typename Op::Shape shape{job.rows_per_launch, job.out_shape[1], type_of(job)};
    if constexpr (kHasPartials) shape.partials = partials_of(job);
    MK_ASSIGN_OR_RETURN(auto op, Op::create(session, shape, tuning_of<typename Op::Tuning>(job)));
    return std::make_unique<CollectiveWork<Op>>(job, rank, tensors, std::move(op));
  }

 private:
  static constexpr bool kHasPartials = requires(typename Op::Shape shape) { shape.partials; };
  const char* name_;
};

}  // namespace

#define MK_OPERATOR(id, name, Class)                    \
  const JobOperator& id##_operator() {                  \
    static const CollectiveJobOperator<Class> op(name); \
    return op;                                          \
  }
MK_COLLECTIVES(MK_OPERATOR)
#undef MK_OPERATOR

}  // namespace mk::tools
