/// \file
/// Public GEMM+ReduceScatter API: what it adds to gemm_operator.h.

#include "mkernel/gemm_reduce_scatter.h"

#include <memory>
#include <vector>

#include "client/src/gemm_operator.h"
#include "kernels/ops/gemm_rs/cpu.h"
#include "kernels/ops/gemm_rs/spec.h"

namespace mk {
namespace {

struct GemmReduceScatterKind {
  static constexpr std::string_view kName = "gemm-rs";
  using Shape = GemmReduceScatter::Shape;
  static constexpr bool kAddsPartials = true;
  static constexpr bool kKeepsOutput = false;
  using Plan = kernels::GemmRsPlan;
  using Cpu = kernels::GemmRsCpu;
  static constexpr auto make_device = &make_device_gemm_rs;
  static constexpr auto device_bytes = &device_workspace_gemm_rs;

  static Result<Plan> make_plan(const AttachOptions& options, const DeviceShape& of,
                                const kernels::Tiling& tiling) {
    return Plan::make(options.nodes, options.local_size, of.shape, of.dtype, tiling, of.result);
  }
  static GemmRows rows(const AttachOptions& options, std::uint64_t m) {
    return {m, rows_of_rank(m, options.world, options.rank).count};
  }
  static auto make_cpu(const Plan& plan, std::uint32_t k, const kernels::RankContext& context,
                       const kernels::GemmCpuOptions& options) {
    return Cpu::create(plan, k, context, options);
  }
  static Status check(const kernels::GemmMatrices&) { return {}; }  // the executors do

  static auto launch(Cpu& cpu, const kernels::GemmMatrices& given, std::uint32_t m,
                     kernels::Mode mode) {
    return cpu.launch(given.a, given.lda, given.b, given.ldb, given.c, given.ldc, m, mode,
                      given.bias);
  }
};

}  // namespace

class __attribute__((visibility("hidden"))) GemmReduceScatter::Impl
    : public GemmOperator<GemmReduceScatterKind> {
 public:
  using GemmOperator::GemmOperator;
};

Result<GemmReduceScatter> GemmReduceScatter::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}
Result<GemmReduceScatter> GemmReduceScatter::create(Session& session, const Shape& shape,
                                                    const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::make<Impl>(session, shape, tuning));
  return GemmReduceScatter(std::move(made));
}

Result<std::uint64_t> GemmReduceScatter::workspace_bytes(const Session& session, const Shape& shape,
                                                         const Tuning& tuning) {
  return Impl::workspace_bytes(session, shape, tuning);
}
Result<std::uint64_t> GemmReduceScatter::workspace_bytes(const Session& session,
                                                         const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

GemmReduceScatter::GemmReduceScatter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmReduceScatter::GemmReduceScatter(GemmReduceScatter&&) noexcept = default;
GemmReduceScatter& GemmReduceScatter::operator=(GemmReduceScatter&&) noexcept = default;
GemmReduceScatter::~GemmReduceScatter() = default;

Result<LaunchStats> GemmReduceScatter::launch(const void* a, const void* b, void* c,
                                              std::uint64_t m, LaunchOptions options) {
  return impl_->launch({a, b, c}, m, options);
}
Status GemmReduceScatter::launch_on(CudaStream stream, const void* a, const void* b, void* c,
                                    std::uint64_t m, LaunchOptions options) {
  return impl_->launch_on(stream, {a, b, c}, m, options);
}
Result<LaunchStats> GemmReduceScatter::launch(const GemmArguments& arguments,
                                              LaunchOptions options) {
  return impl_->launch(matrices_of(arguments), arguments.m, options);
}
Status GemmReduceScatter::launch_on(CudaStream stream, const GemmArguments& arguments,
                                    LaunchOptions options) {
  return impl_->launch_on(stream, matrices_of(arguments), arguments.m, options);
}
Status GemmReduceScatter::status() const { return impl_->status(); }
Result<LaunchStats> GemmReduceScatter::finish(CudaStream stream) { return impl_->finish(stream); }
void GemmReduceScatter::set_trace(bool on) { impl_->set_trace(on); }
std::vector<TraceSpan> GemmReduceScatter::trace() const { return impl_->trace(); }

}  // namespace mk
