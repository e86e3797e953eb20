#include "kernels/cpu/attention_math.h"

namespace mk::kernels {
namespace {

// The compiler's checks ask the operating system about the wider registers, too.
bool machine_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
#else
  return false;
#endif
}

bool machine_has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") != 0;
#else
  return false;
#endif
}

}  // namespace

const AttentionMath* attention_math_avx2() {
  static const bool usable = machine_has_avx2();
  return usable ? kAttentionMathAvx2 : nullptr;
}

const AttentionMath* attention_math_avx512() {
  static const bool usable = machine_has_avx512();
  return usable ? kAttentionMathAvx512 : nullptr;
}

const AttentionMath& attention_math() {
  if (const AttentionMath* math = attention_math_avx512()) return *math;
  if (const AttentionMath* math = attention_math_avx2()) return *math;
  return attention_math_generic();
}

}  // namespace mk::kernels
