#include <algorithm>

#include "client/tools/mkrun/operators.h"
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

/// Launches with the tensors where the executor wants them.
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

 protected:
  RowRange share(std::uint32_t rank) const { return rows_of_rank(rows_, job_.world(), rank); }
  /// Of rows [first, first + rows) of the whole.
  Result<LaunchStats> launch_with(std::uint64_t first, std::uint64_t rows, const Elements& input,
                                  std::uint64_t output_rows) {
    first_ = first;
    out_.assign(output_rows * n_, 0xffff);  // NaN, until the operator writes it
    MK_ASSIGN_OR_RETURN(const void* const in, there_.put(0, input));
    MK_ASSIGN_OR_RETURN(void* const out, there_.put(1, out_));
    MK_ASSIGN_OR_RETURN(const LaunchStats stats, op_.launch(in, out, rows));
    MK_RETURN_IF_ERROR(there_.get(1, out_));
    return stats;
  }

  const Job& job_;
  const std::uint32_t rank_;
  const DataType type_;
  const Tensor& x_;
  const std::uint64_t n_;
  std::uint64_t first_ = 0, rows_ = 0;  ///< of the last launch
  Elements out_;

 private:
  Op op_;
  WorkTensors there_;
};

/// Each rank brings its rows, and writes those of the next one: all that is written was gathered.
class AllGatherWork : public CollectiveWork<AllGather> {
 public:
  using CollectiveWork::CollectiveWork;

  Result<LaunchStats> launch(std::uint64_t first, std::uint64_t rows) override {
    rows_ = rows;
    const RowRange own = share(rank_);
    return launch_with(first, rows, x_.rows(first + own.first, own.count, type_), rows);
  }
  Status write(SafetensorsPart& out) override {
    const RowRange next = share((rank_ + 1) % job_.world());
    return out.write((first_ + next.first) * n_ * 2,
                     raw(out_).subspan(next.first * n_ * 2, next.count * n_ * 2));
  }
  Comparison check() override {
    const Elements all = x_.rows(first_, rows_, type_);
    Comparison result;
    for (std::uint64_t i = 0; i < all.size(); ++i) result.add(i, out_[i], all[i], 0);
    return result;
  }
};

class AllGatherOperator : public JobOperator {
 public:
  const char* name() const override { return "all-gather"; }
  const char* help() const override { return "x's rows split over all ranks, each gets all"; }
  std::vector<InputSpec> inputs() const override { return {{"x", "[m, n]", 2}}; }
  std::vector<FlagSpec> flags() const override { return {}; }
  Status plan(const Tensors& tensors, Job& job) const override {
    job.out_shape = tensors.at("x").shape();
    job.rows = job.out_shape[0];
    return {};
  }
  Result<std::unique_ptr<RankWork>> start(Session& session, const Job& job, std::uint32_t rank,
                                          const Tensors& tensors) const override {
    const AllGather::Shape shape{job.rows_per_launch, job.out_shape[1], type_of(job)};
    MK_ASSIGN_OR_RETURN(auto op,
                        AllGather::create(session, shape, tuning_of<AllGather::Tuning>(job)));
    return std::make_unique<AllGatherWork>(job, rank, tensors, std::move(op));
  }
};

}  // namespace

const JobOperator& all_gather_operator() {
  static const AllGatherOperator op;
  return op;
}

}  // namespace mk::tools
