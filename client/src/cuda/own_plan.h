/// \file
/// Plan and options of operators on a GPU, as far as a rank decides them alone.
#pragma once

#include "client/src/cuda/cuda_operator.h"
#include "client/src/job_plan.h"

namespace mk {

/// This rank's files, of its GPU.
Result<kernels::plan::JobPlan> plan_of_device(Session::Impl& session, const Tuning& tuning);
/// Of operators that are no products: ranks need not agree.
Result<kernels::CudaOptions> own_options(Session::Impl& session, const DeviceShare& share,
                                         const Tuning& tuning);

}  // namespace mk
