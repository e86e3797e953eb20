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

}  // namespace mk
