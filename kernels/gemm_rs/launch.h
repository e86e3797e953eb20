/// \file
/// What the blocks of one GEMM + ReduceScatter launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/gemm_rs/geometry.h"

namespace mk::kernels {

struct GemmRsLaunch : Launch {
  GemmRsGeometry plan;
};

}  // namespace mk::kernels
