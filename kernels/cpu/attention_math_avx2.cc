// Compiled for avx2 where the compiler can; called only where the machine can.
#include "kernels/cpu/attention_math.h"

#if defined(__AVX2__) && defined(__FMA__)
namespace mk::kernels::lanes {
constexpr int kVectorBytes = 32;
constexpr int kRows = 4;
}  // namespace mk::kernels::lanes

#include "kernels/cpu/attention_lanes.h"

namespace mk::kernels {
namespace {
constexpr AttentionMath kMath{"avx2", 90e9, multiply, softmax};
}  // namespace
const AttentionMath* const kAttentionMathAvx2 = &kMath;
}  // namespace mk::kernels
#else
namespace mk::kernels {
const AttentionMath* const kAttentionMathAvx2 = nullptr;
}  // namespace mk::kernels
#endif
