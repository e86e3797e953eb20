/// \file
/// Plan and options of operators on a GPU: a rank's own, and those on which all agree.
#pragma once

#include "client/src/cuda/cuda_operator.h"
#include "client/src/job_plan.h"

namespace mk {

/// This rank's files, of its GPU.
Result<kernels::plan::JobPlan> plan_of_device(Session::Impl& session, const Tuning& tuning);
/// Of operators that are no products: ranks need not agree.
Result<kernels::CudaOptions> own_options(Session::Impl& session, const DeviceShare& share,
                                         const Tuning& tuning);

/// What all ranks plan by: collective.
Result<AgreedPlan> agree_device_plan(Session::Impl& session, const kernels::Shape& shape,
                                     const Tuning& tuning);
/// What that would answer, by what is known here: not collective.
Result<AgreedPlan> expected_device_plan(Session::Impl& session, const kernels::Shape& shape,
                                        const Tuning& tuning);

/// The operator of a plan on which all ranks have agreed. Collective. `Kind`: as in
/// planned_by_shape.h.
template <class Kind, class Shape, class Plan>
Result<std::unique_ptr<typename Kind::Device>> make_planned(Session::Impl& session,
                                                            const Shape& shape,
                                                            const Tuning& tuning, const Plan& plan,
                                                            kernels::CudaOptions options) {
  if constexpr (requires { shape.b_layout; }) options.b_layout = shape.b_layout;
  return make_device_operator<typename Kind::Operator>(
      session, Kind::kOp, DeviceMemoryNeeds::of(plan, tuning),
      moved_plan_maker(plan, [options](const auto& moved, const kernels::RankContext& context) {
        return Kind::Cuda::create(moved, context, options);
      }));
}

}  // namespace mk
