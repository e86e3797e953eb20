#include "kernels/cpu/row_math.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mk::kernels {
namespace {

/// AVX2 (which the compiler asks the operating system about, too) and the half-precision
/// conversions.
bool machine_has_avx2_and_f16c() {
#if defined(__x86_64__)
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  // Clang 14's __builtin_cpu_supports does not know "f16c".
  return __builtin_cpu_supports("avx2") != 0 && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 &&
         (ecx & bit_F16C) != 0;
#else
  return false;
#endif
}

}  // namespace

const RowMath* row_math_avx2(DType dtype) {
  static const bool usable = machine_has_avx2_and_f16c();
  return usable ? kRowMathAvx2[static_cast<std::uint32_t>(dtype)] : nullptr;
}

const RowMath& row_math(DType dtype) {
  const RowMath* avx2 = row_math_avx2(dtype);
  return avx2 != nullptr ? *avx2 : row_math_generic(dtype);
}

}  // namespace mk::kernels
