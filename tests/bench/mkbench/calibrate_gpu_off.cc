#include "tests/bench/mkbench/calibrate.h"

namespace mk::bench {

Result<GpuMeasured> measure_gpu() {
  return fail(ErrorCode::kUnsupported,
              "this mkbench was built without the kernels for GPUs (MK_CUDA); take one with them, "
              "or leave --executor out");
}

}  // namespace mk::bench
