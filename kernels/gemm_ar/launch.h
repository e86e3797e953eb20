/// \file
/// What the blocks of one GEMM + AllReduce launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/gemm_ar/schedule.h"

namespace mk::kernels {

struct GemmArLaunch : Launch {
  GemmArGeometry plan;
  GemmArSchedule schedule;  ///< make_schedule()

  /// When m is settled, before the blocks begin.
  void make_schedule() { schedule = GemmArSchedule(plan, m); }
};

}  // namespace mk::kernels
