// Compiled for avx512 where the compiler can; called only where the machine can.
#include "kernels/cpu/attention_math.h"

#if defined(__AVX512F__)
namespace mk::kernels::lanes {
constexpr int kVectorBytes = 64;
constexpr int kRows = 8;
}  // namespace mk::kernels::lanes

#include "kernels/cpu/attention_lanes.h"

namespace mk::kernels {
namespace {
constexpr AttentionMath kMath{"avx512", 150e9, multiply, softmax};
}  // namespace
const AttentionMath* const kAttentionMathAvx512 = &kMath;
}  // namespace mk::kernels
#else
namespace mk::kernels {
const AttentionMath* const kAttentionMathAvx512 = nullptr;
}  // namespace mk::kernels
#endif
