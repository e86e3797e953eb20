#include "tests/gpu/rank_operator.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/cuda/host/operator_frame.h"
#include "kernels/cuda/host/planned.h"

namespace mk::test {
namespace {

/// Leading dimensions.
struct Strides {
  std::uint64_t a, b, c;
};

/// AgGemmCuda, GemmRsCuda or GemmArCuda. `k`: what rows in the workspace are apart.
template <class Operator>
class GemmRank : public RankOperator {
 public:
  GemmRank(std::unique_ptr<Operator> op, Strides strides, std::uint64_t k)
      : op_(std::move(op)), strides_(strides), k_(k) {}
  Status launch(cudaStream_t stream, const void* a, const void* b, void* c, void* gathered,
                const void* bias, std::uint32_t m, kernels::Mode mode) override {
    const std::uint64_t lda = a != nullptr && a == input() ? k_ : strides_.a;
    return op_->launch(stream, {a, b, c, gathered, bias, lda, strides_.b, strides_.c}, m, mode);
  }
  Status status() const override { return op_->status(); }
  Result<kernels::LaunchStats> finish(cudaStream_t stream) override { return op_->finish(stream); }
  const kernels::RoleBlocks& blocks() const override { return op_->blocks(); }
  std::uint32_t stream_groups() const override { return op_->stream_groups(); }
  std::string progress() const override { return op_->progress(); }
  const kernels::AgGemmCuda* ag_gemm() const override {
    if constexpr (std::is_same_v<Operator, kernels::AgGemmCuda>) return op_.get();
    return nullptr;
  }
  void* input() const override {
    if constexpr (requires { op_->input(); }) return op_->input();
    return nullptr;
  }
  const void* output() const override {
    if constexpr (requires { op_->output(); }) return op_->output();
    return nullptr;
  }

 private:
  std::unique_ptr<Operator> op_;
  Strides strides_;
  std::uint64_t k_;
};

}  // namespace

const char* name(Op op) {
  return op == Op::kAgGemm ? "ag_gemm" : op == Op::kGemmRs ? "gemm_rs" : "gemm_ar";
}

Plan make_plan(const JobSetup& setup, std::uint32_t blocks) {
  const std::uint32_t nodes = setup.nodes;
  const std::uint32_t locals = setup.locals;
  // AG+GEMM: all ranks have one k; else the longest counts.
  const kernels::Shape shape{setup.m, setup.n, *std::max_element(setup.k.begin(), setup.k.end())};
  const auto job = or_exit(kernels::cuda::job_plan_of(setup.options));
  kernels::CudaOptions options = setup.options;
  options.result = setup.result;
  const auto tiling = [&](kernels::plan::Op op) {
    kernels::Tiling own = setup.tiling;
    if (setup.chunk_bytes != 0) own.chunk_bytes = setup.chunk_bytes;
    if (setup.local_banks != 0) own.local_banks = setup.local_banks;
    if (setup.banks != 0) own.banks = setup.banks;
    return or_exit(kernels::cuda::planned_tiling(op, nodes, locals, shape, setup.dtype, blocks,
                                                 *job, options, own));
  };
  Plan plan;
  switch (setup.op) {
    case Op::kAgGemm: {
      plan.ag = or_exit(kernels::AgGemmPlan::make(nodes, locals, shape, setup.dtype,
                                                  tiling(kernels::plan::Op::kAgGemm),
                                                  setup.result.epilogue));
      plan.workspace_bytes = plan.ag.workspace_bytes;
      plan.flags = plan.ag.flag_count();
      break;
    }
    case Op::kGemmRs: {
      plan.rs =
          or_exit(kernels::GemmRsPlan::make(nodes, locals, {setup.m, setup.n, 0}, setup.dtype,
                                            tiling(kernels::plan::Op::kGemmRs), setup.result));
      plan.workspace_bytes = plan.rs.workspace_bytes();
      plan.flags = plan.rs.flag_count();
      break;
    }
    case Op::kGemmAr: {
      plan.ar =
          or_exit(kernels::GemmArPlan::make(nodes, locals, {setup.m, setup.n, 0}, setup.dtype,
                                            tiling(kernels::plan::Op::kGemmAr), setup.result));
      plan.workspace_bytes = plan.ar.workspace_bytes();
      plan.flags = plan.ar.flag_count();
      break;
    }
  }
  return plan;
}

std::unique_ptr<RankOperator> make_operator(const JobSetup& setup, const Plan& plan,
                                            std::uint32_t rank, const kernels::RankContext& context,
                                            const kernels::CudaOptions& options) {
  const std::uint64_t k = setup.k[rank];
  const std::uint64_t b_length = options.b_layout == kernels::BLayout::kNK ? k : setup.n;
  const Strides strides{k + setup.gap, b_length + setup.gap, setup.c_columns() + setup.gap};
  switch (setup.op) {
    case Op::kAgGemm:
      return std::make_unique<GemmRank<kernels::AgGemmCuda>>(
          or_exit(kernels::AgGemmCuda::create(plan.ag, context, options)), strides, k);
    case Op::kGemmRs:
      return std::make_unique<GemmRank<kernels::GemmRsCuda>>(
          or_exit(kernels::GemmRsCuda::create(plan.rs, setup.k[rank], context, options)), strides,
          k);
    case Op::kGemmAr:
      return std::make_unique<GemmRank<kernels::GemmArCuda>>(
          or_exit(kernels::GemmArCuda::create(plan.ar, setup.k[rank], context, options)), strides,
          k);
  }
  std::abort();
}

}  // namespace mk::test
