/// \file
/// Public GEMM+AllReduce API: what it adds to gemm_operator.h.

#include "mkernel/gemm_all_reduce.h"

#include <memory>
#include <vector>

#include "client/src/gemm_operator.h"
#include "kernels/ops/gemm_ar/cpu.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "kernels/plan/operator_plan.h"

namespace mk {
namespace {

struct GemmAllReduceKind {
  static constexpr std::string_view kName = "gemm-ar";
  using Shape = GemmAllReduce::Shape;
  static constexpr bool kAddsPartials = true;
  static constexpr bool kKeepsOutput = true;
  using Plan = kernels::GemmArPlan;
  using Cpu = kernels::GemmArCpu;
  static constexpr auto make_device = &make_device_gemm_ar;
  static constexpr auto device_bytes = &device_workspace_gemm_ar;

  static Result<Plan> make_plan(const AttachOptions& options, const DeviceShape& of,
                                const kernels::Tiling& tiling) {
    kernels::plan::Problem problem;
    problem.op = kernels::plan::Op::kGemmAr;
    problem.nodes = options.nodes;
    problem.locals = options.local_size;
    // k is each rank's own, and the choice is that of all.
    problem.shape = {of.shape.m, of.shape.n, 1};
    problem.dtype = of.dtype;
    problem.result = of.result;
    return Plan::make(options.nodes, options.local_size, of.shape, of.dtype,
                      kernels::plan::with_exchange(problem, tiling), of.result);
  }
  static GemmRows rows(const AttachOptions&, std::uint64_t m) { return {m, m}; }
  static auto make_cpu(const Plan& plan, std::uint32_t k, const kernels::RankContext& context,
                       const kernels::GemmCpuOptions& options) {
    return Cpu::create(plan, k, context, options);
  }
  static Status check(const kernels::GemmMatrices& given) {
    if (given.a != nullptr && given.b != nullptr) return {};
    return fail(ErrorCode::kInvalidArgument, "gemm-ar was launched without A or B");
  }

  static auto launch(Cpu& cpu, const kernels::GemmMatrices& given, std::uint32_t m,
                     kernels::Mode mode) {
    return cpu.launch(given.a, given.lda, given.b, given.ldb, given.c, given.ldc, m, mode,
                      given.bias);
  }
};

}  // namespace

class __attribute__((visibility("hidden"))) GemmAllReduce::Impl
    : public GemmOperator<GemmAllReduceKind> {
 public:
  using GemmOperator::GemmOperator;
};

Result<GemmAllReduce> GemmAllReduce::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}
Result<GemmAllReduce> GemmAllReduce::create(Session& session, const Shape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::make<Impl>(session, shape, tuning));
  return GemmAllReduce(std::move(made));
}

Result<std::uint64_t> GemmAllReduce::workspace_bytes(const Session& session, const Shape& shape,
                                                     const Tuning& tuning) {
  return Impl::workspace_bytes(session, shape, tuning);
}
Result<std::uint64_t> GemmAllReduce::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

GemmAllReduce::GemmAllReduce(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmAllReduce::GemmAllReduce(GemmAllReduce&&) noexcept = default;
GemmAllReduce& GemmAllReduce::operator=(GemmAllReduce&&) noexcept = default;
GemmAllReduce::~GemmAllReduce() = default;

Result<LaunchStats> GemmAllReduce::launch(const void* a, const void* b, void* c, std::uint64_t m,
                                          LaunchOptions options) {
  return impl_->launch({a, b, c}, m, options);
}
const void* GemmAllReduce::output() const { return impl_->output(); }
Status GemmAllReduce::launch_on(CudaStream stream, const void* a, const void* b, void* c,
                                std::uint64_t m, LaunchOptions options) {
  return impl_->launch_on(stream, {a, b, c}, m, options);
}
Result<LaunchStats> GemmAllReduce::launch(const GemmArguments& arguments, LaunchOptions options) {
  return impl_->launch(matrices_of(arguments), arguments.m, options);
}
Status GemmAllReduce::launch_on(CudaStream stream, const GemmArguments& arguments,
                                LaunchOptions options) {
  return impl_->launch_on(stream, matrices_of(arguments), arguments.m, options);
}
Status GemmAllReduce::status() const { return impl_->status(); }
Result<LaunchStats> GemmAllReduce::finish(CudaStream stream) { return impl_->finish(stream); }
void GemmAllReduce::set_trace(bool on) { impl_->set_trace(on); }
std::vector<TraceSpan> GemmAllReduce::trace() const { return impl_->trace(); }

}  // namespace mk
