/// \file
/// Public AllGather+GEMM API: what it adds to gemm_operator.h.

#include "mkernel/all_gather_gemm.h"

#include <memory>
#include <vector>

#include "client/src/gemm_operator.h"
#include "kernels/ops/ag_gemm/cpu.h"
#include "kernels/ops/ag_gemm/spec.h"

namespace mk {
namespace {

struct AllGatherGemmKind {
  static constexpr std::string_view kName = "ag-gemm";
  using Shape = AllGatherGemm::Shape;
  static constexpr bool kAddsPartials = false;
  static constexpr bool kKeepsOutput = false;
  using Plan = kernels::AgGemmPlan;
  using Cpu = kernels::AgGemmCpu;
  static constexpr auto make_device = &make_device_ag_gemm;
  static constexpr auto device_bytes = &device_workspace_ag_gemm;

  static Result<Plan> make_plan(const AttachOptions& options, const DeviceShape& of,
                                const kernels::Tiling& tiling) {
    return Plan::make(options.nodes, options.local_size, of.shape, of.dtype, tiling,
                      of.result.epilogue);
  }
  static GemmRows rows(const AttachOptions& options, std::uint64_t m) {
    return {rows_of_rank(m, options.world, options.rank).count, m};
  }
  static auto make_cpu(const Plan& plan, std::uint32_t /*k*/, const kernels::RankContext& context,
                       const kernels::GemmCpuOptions& options) {
    return Cpu::create(plan, context, options);
  }
  static Status check(const kernels::GemmMatrices&) { return {}; }  // the executors do

  static auto launch(Cpu& cpu, const kernels::GemmMatrices& given, std::uint32_t m,
                     kernels::Mode mode) {
    return cpu.launch(given.a, given.lda, given.b, given.ldb, given.c, given.ldc, m, mode,
                      given.gathered, given.bias);
  }
};

}  // namespace

class __attribute__((visibility("hidden"))) AllGatherGemm::Impl
    : public GemmOperator<AllGatherGemmKind> {
 public:
  using GemmOperator::GemmOperator;
};

Result<AllGatherGemm> AllGatherGemm::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}
Result<AllGatherGemm> AllGatherGemm::create(Session& session, const Shape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::make<Impl>(session, shape, tuning));
  return AllGatherGemm(std::move(made));
}

Result<std::uint64_t> AllGatherGemm::workspace_bytes(const Session& session, const Shape& shape,
                                                     const Tuning& tuning) {
  return Impl::workspace_bytes(session, shape, tuning);
}
Result<std::uint64_t> AllGatherGemm::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

AllGatherGemm::AllGatherGemm(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AllGatherGemm::AllGatherGemm(AllGatherGemm&&) noexcept = default;
AllGatherGemm& AllGatherGemm::operator=(AllGatherGemm&&) noexcept = default;
AllGatherGemm::~AllGatherGemm() = default;

Result<LaunchStats> AllGatherGemm::launch(const void* a_shard, const void* b, void* c,
                                          std::uint64_t m, LaunchOptions options, void* gathered) {
  return impl_->launch({a_shard, b, c, gathered}, m, options);
}
void* AllGatherGemm::input() const { return impl_->input(); }
Status AllGatherGemm::launch_on(CudaStream stream, const void* a_shard, const void* b, void* c,
                                std::uint64_t m, LaunchOptions options, void* gathered) {
  return impl_->launch_on(stream, {a_shard, b, c, gathered}, m, options);
}
Result<LaunchStats> AllGatherGemm::launch(const GemmArguments& arguments, LaunchOptions options) {
  return impl_->launch(matrices_of(arguments), arguments.m, options);
}
Status AllGatherGemm::launch_on(CudaStream stream, const GemmArguments& arguments,
                                LaunchOptions options) {
  return impl_->launch_on(stream, matrices_of(arguments), arguments.m, options);
}
Status AllGatherGemm::status() const { return impl_->status(); }
Result<LaunchStats> AllGatherGemm::finish(CudaStream stream) { return impl_->finish(stream); }
void AllGatherGemm::set_trace(bool on) { impl_->set_trace(on); }
std::vector<TraceSpan> AllGatherGemm::trace() const { return impl_->trace(); }

}  // namespace mk
