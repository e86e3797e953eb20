/// \file
/// Builds without the CUDA kernels.

#include "client/src/device_operator.h"
#include "kernels/ops/registry.h"

namespace mk::kernels {

#define MK_DECLARE(id, name, Class)                                                                \
  struct Class##Plan;                                                                              \
  Result<std::unique_ptr<CollectiveCuda>> make_##id##_cuda(const Class##Plan&, const RankContext&, \
                                                           const CudaOptions&);
MK_COLLECTIVES(MK_DECLARE)
#undef MK_DECLARE

}  // namespace mk::kernels

namespace mk {
namespace {

tl::unexpected<Error> refuse(const char* op) {
  return fail(ErrorCode::kUnsupported,
              "{} on a GPU is not in this build of libmkclient: it needs nvcc (MK_CUDA) and CuTe's "
              "headers when it is built",
              op);
}

}  // namespace

Result<std::uint64_t> device_workspace_ag_gemm(Session::Impl&, const DeviceShape&, const Tuning&) {
  return refuse("ag-gemm");
}
Result<std::uint64_t> device_workspace_gemm_rs(Session::Impl&, const DeviceShape&, const Tuning&) {
  return refuse("gemm-rs");
}
Result<std::uint64_t> device_workspace_gemm_ar(Session::Impl&, const DeviceShape&, const Tuning&) {
  return refuse("gemm-ar");
}

Result<std::unique_ptr<DeviceGemm>> make_device_ag_gemm(Session::Impl&, const DeviceShape&,
                                                        const Tuning&) {
  return refuse("ag-gemm");
}
Result<std::unique_ptr<DeviceGemm>> make_device_gemm_rs(Session::Impl&, const DeviceShape&,
                                                        const Tuning&) {
  return refuse("gemm-rs");
}
Result<std::unique_ptr<DeviceGemm>> make_device_gemm_ar(Session::Impl&, const DeviceShape&,
                                                        const Tuning&) {
  return refuse("gemm-ar");
}

Result<std::uint64_t> device_workspace_ring(Session::Impl&, const kernels::RingAttentionShape&,
                                            const Tuning&) {
  return refuse("ring");
}
Result<std::unique_ptr<DeviceRing>> make_device_ring(Session::Impl&,
                                                     const kernels::RingAttentionShape&,
                                                     const Tuning&) {
  return refuse("ring");
}

Result<std::uint64_t> device_workspace_moe(Session::Impl&, const DeviceMoeShape&, const Tuning&) {
  return refuse("moe-dispatch");
}
Result<std::unique_ptr<DeviceMoe>> make_device_moe(Session::Impl&, const DeviceMoeShape&,
                                                   const Tuning&) {
  return refuse("moe-dispatch");
}

Result<std::uint64_t> device_workspace_combine(Session::Impl&, const DeviceCombineShape&,
                                               const Tuning&) {
  return refuse("combine");
}
Result<std::unique_ptr<DeviceCombine>> make_device_combine(Session::Impl&,
                                                           const DeviceCombineShape&,
                                                           const Tuning&) {
  return refuse("combine");
}

Status expect_device(Session::Impl&) { return refuse("a collective"); }
Result<std::unique_ptr<DeviceCollective>> make_device_collective(Session::Impl&,
                                                                 const DeviceCollectivePlan& plan,
                                                                 const Tuning&) {
  return refuse(plan.op.data());
}

#define MK_OFF(id, name, Class)                                                                \
  Result<std::unique_ptr<kernels::CollectiveCuda>> kernels::make_##id##_cuda(                  \
      const kernels::Class##Plan&, const kernels::RankContext&, const kernels::CudaOptions&) { \
    return refuse(name);                                                                       \
  }
MK_COLLECTIVES(MK_OFF)
#undef MK_OFF

}  // namespace mk
