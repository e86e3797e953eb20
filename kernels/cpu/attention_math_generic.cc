#include "kernels/cpu/attention_math.h"

namespace mk::kernels::lanes {
constexpr int kVectorBytes = 16;
constexpr int kRows = 4;
}  // namespace mk::kernels::lanes

#include "kernels/cpu/attention_lanes.h"

namespace mk::kernels {

const AttentionMath& attention_math_generic() {
  static constexpr AttentionMath kMath{"generic", 35e9, multiply, softmax};
  return kMath;
}

}  // namespace mk::kernels
