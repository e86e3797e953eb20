/// \file
/// AllGather+GEMM for people: agrees with the other ranks on the plan, gives the executor its
/// memory, translates arguments.

#include "mkernel/all_gather_gemm.h"

#include <optional>
#include <utility>

#include "client/src/operator_memory.h"
#include "client/src/operator_support.h"
#include "kernels/ag_gemm/plan.h"
#include "kernels/cpu/ag_gemm_cpu.h"

namespace mk {

class __attribute__((visibility("hidden"))) AllGatherGemm::Impl {
 public:
  Impl(std::shared_ptr<Session::Impl> session, OperatorMemory memory,
       std::unique_ptr<kernels::AgGemmCpu> cpu, const Shape& shape)
      : session_(std::move(session)),
        memory_(std::move(memory)),
        cpu_(std::move(cpu)),
        shape_(shape) {}
  Impl(std::shared_ptr<Session::Impl> session, std::unique_ptr<DeviceOperator> device,
       const Shape& shape)
      : session_(std::move(session)), device_(std::move(device)), shape_(shape) {}

  Result<LaunchStats> launch(const void* a_shard, const void* b, void* c, std::uint64_t m,
                             LaunchMode mode, void* gathered) {
    if (m == 0 || m > shape_.m_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "ag-gemm was created for m from 1 to {}; launched with {}", shape_.m_max, m);
    }
    if (device_ != nullptr)
      return run_on_device("ag-gemm", *session_, *device_, {a_shard, b, c, gathered}, m,
                           shape_.m_max, mode);
    const std::uint64_t ldb = shape_.b_layout == BLayout::kKN ? shape_.n : shape_.k;
    return run_launch(*session_, [&] {
      return cpu_->launch(a_shard, shape_.k, b, ldb, c, shape_.n, static_cast<std::uint32_t>(m),
                          kernel_mode(mode), gathered);
    });
  }

  Status launch_on(CudaStream stream, const DeviceArguments& arguments, std::uint64_t m,
                   LaunchMode mode) {
    return launch_on_device("ag-gemm", *session_, device_.get(), stream, arguments, m, shape_.m_max,
                            mode);
  }
  Status status() const { return device_status(*session_, device_.get()); }
  Result<LaunchStats> finish(CudaStream stream) {
    return finish_on_device("ag-gemm", *session_, device_.get(), stream);
  }

  /// Null on a GPU.
  kernels::LaunchRunner* runner() { return cpu_ != nullptr ? &cpu_->runner() : nullptr; }

 private:
  std::shared_ptr<Session::Impl>
      session_;  ///< keeps the segment mapped while blocks may look at it
  std::optional<OperatorMemory> memory_;
  std::unique_ptr<kernels::AgGemmCpu> cpu_;  ///< goes first: its blocks use the memory above
  std::unique_ptr<DeviceOperator> device_;   ///< one of the two
  Shape shape_;
};

Result<AllGatherGemm> AllGatherGemm::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<AllGatherGemm> AllGatherGemm::create(Session& session, const Shape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const kernels::Shape kernel_shape,
                      checked_shape("ag-gemm", shape.m_max, shape.n, shape.k));
  MK_ASSIGN_OR_RETURN(const auto dtype, checked_dtype("ag-gemm", shape.dtype));
  kernels::GemmCpuOptions cpu_options{kernel_options(tuning, session.options().lanes)};
  MK_ASSIGN_OR_RETURN(cpu_options.b_layout, checked_layout("ag-gemm", shape.b_layout));
  MK_ASSIGN_OR_RETURN(const bool on_device, wants_device("ag-gemm", tuning.executor));
  if (on_device) {
    MK_ASSIGN_OR_RETURN(
        auto device,
        make_device_ag_gemm(*session.impl(), {kernel_shape, dtype, cpu_options.b_layout}, tuning));
    return AllGatherGemm(std::make_unique<Impl>(session.impl(), std::move(device), shape));
  }
  const AttachOptions& options = session.options();
  MK_ASSIGN_OR_RETURN(const auto plan,
                      kernels::AgGemmPlan::make(options.nodes, options.local_size, kernel_shape,
                                                dtype, kernel_tiling(tuning)));
  MK_ASSIGN_OR_RETURN(auto memory,
                      OperatorMemory::create(*session.impl(), "ag-gemm", describe_plan(plan),
                                             plan.workspace_bytes, plan.flag_count()));
  MK_ASSIGN_OR_RETURN(auto cpu, kernels::AgGemmCpu::create(plan, memory.context(), cpu_options));
  return AllGatherGemm(
      std::make_unique<Impl>(session.impl(), std::move(memory), std::move(cpu), shape));
}

AllGatherGemm::AllGatherGemm(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AllGatherGemm::AllGatherGemm(AllGatherGemm&&) noexcept = default;
AllGatherGemm& AllGatherGemm::operator=(AllGatherGemm&&) noexcept = default;
AllGatherGemm::~AllGatherGemm() = default;

Result<LaunchStats> AllGatherGemm::launch(const void* a_shard, const void* b, void* c,
                                          std::uint64_t m, LaunchMode mode, void* gathered) {
  return impl_->launch(a_shard, b, c, m, mode, gathered);
}
Status AllGatherGemm::launch_on(CudaStream stream, const void* a_shard, const void* b, void* c,
                                std::uint64_t m, LaunchMode mode, void* gathered) {
  return impl_->launch_on(stream, {a_shard, b, c, gathered}, m, mode);
}
Status AllGatherGemm::status() const { return impl_->status(); }
Result<LaunchStats> AllGatherGemm::finish(CudaStream stream) { return impl_->finish(stream); }
void AllGatherGemm::set_trace(bool on) {
  if (auto* const runner = impl_->runner()) mk::set_trace(*runner, on);
}
std::vector<TraceSpan> AllGatherGemm::trace() const {
  auto* const runner = impl_->runner();
  return runner != nullptr ? trace_of(*runner) : std::vector<TraceSpan>{};
}

}  // namespace mk
