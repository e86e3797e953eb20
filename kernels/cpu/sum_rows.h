/// \file
/// SumJob on the CPU.
#pragma once

#include "kernels/comm/sum_job.h"
#include "kernels/cpu/row_math.h"

namespace mk::kernels {

/// Does the job on the calling thread. `job.columns` ≤ kTileSideMax.
void sum_rows(const RowMath& math, const SumJob& job);

}  // namespace mk::kernels
