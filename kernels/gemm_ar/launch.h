/// \file
/// What the blocks of one GEMM + AllReduce launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/gemm_ar/geometry.h"

namespace mk::kernels {

struct GemmArLaunch : Launch {
  GemmArGeometry plan;
};

}  // namespace mk::kernels
