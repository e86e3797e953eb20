/// \file
/// AllGather+GEMM for people: agrees with the other ranks on the plan, gives the executor its
/// memory, translates arguments.

#include "mkernel/all_gather_gemm.h"

#include <utility>

#include "client/src/operator_memory.h"
#include "client/src/operator_support.h"
#include "kernels/ag_gemm/plan.h"
#include "kernels/cpu/ag_gemm_cpu.h"

namespace mk {
namespace {

/// What must be equal on all ranks, for people to compare. n and the tiles are each rank's own.
std::string describe(const kernels::AgGemmPlan& plan) {
  return fmt::format("m_max={} k={} dtype={} chunk_bytes={} banks={} plan={:016x}", plan.max.m,
                     plan.max.k, kernels::name_of(plan.dtype), plan.gather.chunk_bytes,
                     plan.gather.banks, plan.fingerprint());
}

}  // namespace

class __attribute__((visibility("hidden"))) AllGatherGemm::Impl {
 public:
  Impl(std::shared_ptr<Session::Impl> session, OperatorMemory memory,
       std::unique_ptr<kernels::AgGemmCpu> cpu, const Shape& shape)
      : session_(std::move(session)),
        memory_(std::move(memory)),
        cpu_(std::move(cpu)),
        shape_(shape) {}

  Result<LaunchStats> launch(const void* a_shard, const void* b, void* c, std::uint64_t m,
                             LaunchMode mode, void* gathered) {
    if (m == 0 || m > shape_.m_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "ag-gemm was created for m from 1 to {}; launched with {}", shape_.m_max, m);
    }
    const std::uint64_t ldb = shape_.b_layout == BLayout::kKN ? shape_.n : shape_.k;
    return run_launch(*session_, [&] {
      return cpu_->launch(a_shard, shape_.k, b, ldb, c, shape_.n, static_cast<std::uint32_t>(m),
                          kernel_mode(mode), gathered);
    });
  }

  kernels::LaunchRunner& runner() { return cpu_->runner(); }

 private:
  std::shared_ptr<Session::Impl>
      session_;  ///< keeps the segment mapped while blocks may look at it
  OperatorMemory memory_;
  std::unique_ptr<kernels::AgGemmCpu> cpu_;  ///< goes first: its blocks use the memory above
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
  const AttachOptions& options = session.options();
  MK_ASSIGN_OR_RETURN(const auto plan,
                      kernels::AgGemmPlan::make(options.nodes, options.local_size, kernel_shape,
                                                dtype, kernel_tiling(tuning)));
  MK_ASSIGN_OR_RETURN(auto memory,
                      OperatorMemory::create(*session.impl(), "ag-gemm", describe(plan),
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
void AllGatherGemm::set_trace(bool on) { mk::set_trace(impl_->runner(), on); }
std::vector<TraceSpan> AllGatherGemm::trace() const { return trace_of(impl_->runner()); }

}  // namespace mk
