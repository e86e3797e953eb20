/// \file
/// The three products over all ranks on a GPU: the plan on which all ranks agree, and launches.

#include <memory>
#include <string_view>
#include <utility>

#include "client/src/cuda/own_plan.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/ops/ag_gemm/sm90.h"
#include "kernels/ops/gemm_ar/sm90.h"
#include "kernels/ops/gemm_rs/sm90.h"
#include "kernels/plan/candidate.h"

namespace mk {
namespace {

/// The tiles, chunks and banks on which all ranks agree, but for what the caller chose.
Result<kernels::Tiling> tiling_for(kernels::plan::Op op, const Session::Impl& session,
                                   const DeviceShape& shape, const Tuning& tuning,
                                   const DeviceShare& share, const AgreedPlan& agreed) {
  const AttachOptions& options = session.options();
  // As any rank would have it.
  kernels::CudaOptions all;
  all.ranks_per_device = share.most_ranks;
  all.result = shape.result;
  return kernels::cuda::planned_tiling(op, options.nodes, options.local_size, agreed.shape,
                                       shape.dtype, share.blocks, *agreed.job, all,
                                       kernel_tiling(tuning));
}

kernels::CudaOptions gemm_options(const DeviceShare& share, const AgreedPlan& agreed,
                                  const DeviceShape& shape, const Tuning& tuning) {
  kernels::CudaOptions options = cuda_options(share, tuning);
  options.b_layout = shape.b_layout;
  options.job_plan = agreed.job;
  options.rates = {};  // rank 0's are in the plan
  return options;
}

/// An operator's own part.
struct AgGemm {
  using Cuda = kernels::AgGemmCuda;
  static constexpr const char* kName = "ag-gemm";
  static constexpr auto kOp = kernels::plan::Op::kAgGemm;
  static auto plan(const AttachOptions& place, const DeviceShape& of,
                   const kernels::Tiling& tiling) {
    return kernels::AgGemmPlan::make(place.nodes, place.local_size, of.shape, of.dtype, tiling,
                                     of.result.epilogue);
  }
  static auto create(const kernels::AgGemmPlan& plan, std::uint32_t /*k*/,
                     const kernels::RankContext& context, const kernels::CudaOptions& options) {
    return Cuda::create(plan, context, options);
  }
};
/// Of the two that add up partial sums.
template <class Operator, class Plan, kernels::plan::Op kIs>
struct GemmSum {
  using Cuda = Operator;
  static constexpr auto kOp = kIs;
  static auto plan(const AttachOptions& place, const DeviceShape& of,
                   const kernels::Tiling& tiling) {
    return Plan::make(place.nodes, place.local_size, of.shape, of.dtype, tiling, of.result);
  }
  static auto create(const Plan& plan, std::uint32_t k, const kernels::RankContext& context,
                     const kernels::CudaOptions& options) {
    return Cuda::create(plan, k, context, options);
  }
};
struct GemmRs : GemmSum<kernels::GemmRsCuda, kernels::GemmRsPlan, kernels::plan::Op::kGemmRs> {
  static constexpr const char* kName = "gemm-rs";
};
struct GemmAr : GemmSum<kernels::GemmArCuda, kernels::GemmArPlan, kernels::plan::Op::kGemmAr> {
  static constexpr const char* kName = "gemm-ar";
};

template <class Kind>
class CudaGemm final : public CudaOperator<DeviceGemm, typename Kind::Cuda> {
  using Base = CudaOperator<DeviceGemm, typename Kind::Cuda>;
  using Base::cuda;

 public:
  using Base::Base;

  Status launch(CudaStream stream, const kernels::GemmMatrices& of, std::uint32_t m,
                kernels::Mode mode) override {
    MK_RETURN_IF_ERROR(check_on_gpu(Kind::kName, "a", of.a));
    MK_RETURN_IF_ERROR(check_on_gpu(Kind::kName, "b", of.b));
    MK_RETURN_IF_ERROR(check_on_gpu(Kind::kName, "c", of.c));
    MK_RETURN_IF_ERROR(check_on_gpu(Kind::kName, "gathered", of.gathered));
    MK_RETURN_IF_ERROR(check_on_gpu(Kind::kName, "bias", of.bias));
    return cuda().launch(stream, of, m, mode);
  }
  const void* output() const override {
    if constexpr (requires { cuda().output(); }) return cuda().output();
    return nullptr;
  }
  void* input() const override {
    if constexpr (requires { cuda().input(); }) return cuda().input();
    return nullptr;
  }
};

template <class Kind>
auto plan_of(const Session::Impl& session, const DeviceShape& shape, const Tuning& tuning,
             const DeviceShare& share, const AgreedPlan& agreed)
    -> decltype(Kind::plan(session.options(), shape, {})) {
  MK_ASSIGN_OR_RETURN(const kernels::Tiling tiling,
                      tiling_for(Kind::kOp, session, shape, tuning, share, agreed));
  return Kind::plan(session.options(), shape, tiling);
}

template <class Kind>
Result<std::uint64_t> workspace_of(Session::Impl& session, const DeviceShape& shape,
                                   const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, expected_share(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed, expected_device_plan(session, shape.shape, tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of<Kind>(session, shape, tuning, share, agreed));
  return workspace_bytes_of(plan);
}

template <class Kind>
Result<std::unique_ptr<DeviceGemm>> make(Session::Impl& session, const DeviceShape& shape,
                                         const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed, agree_device_plan(session, shape.shape, tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of<Kind>(session, shape, tuning, share, agreed));
  return make_device_operator<CudaGemm<Kind>>(
      session, Kind::kName, DeviceMemoryNeeds::of(plan, tuning),
      moved_plan_maker(plan,
                       [k = shape.shape.k, options = gemm_options(share, agreed, shape, tuning)](
                           const auto& moved, const kernels::RankContext& context) {
                         return Kind::create(moved, k, context, options);
                       }));
}

}  // namespace

Result<std::uint64_t> device_workspace_ag_gemm(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning) {
  return workspace_of<AgGemm>(session, shape, tuning);
}
Result<std::uint64_t> device_workspace_gemm_rs(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning) {
  return workspace_of<GemmRs>(session, shape, tuning);
}
Result<std::uint64_t> device_workspace_gemm_ar(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning) {
  return workspace_of<GemmAr>(session, shape, tuning);
}

Result<std::unique_ptr<DeviceGemm>> make_device_ag_gemm(Session::Impl& session,
                                                        const DeviceShape& shape,
                                                        const Tuning& tuning) {
  return make<AgGemm>(session, shape, tuning);
}
Result<std::unique_ptr<DeviceGemm>> make_device_gemm_rs(Session::Impl& session,
                                                        const DeviceShape& shape,
                                                        const Tuning& tuning) {
  return make<GemmRs>(session, shape, tuning);
}
Result<std::unique_ptr<DeviceGemm>> make_device_gemm_ar(Session::Impl& session,
                                                        const DeviceShape& shape,
                                                        const Tuning& tuning) {
  return make<GemmAr>(session, shape, tuning);
}

}  // namespace mk
