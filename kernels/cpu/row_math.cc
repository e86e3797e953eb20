#include "kernels/cpu/row_math.h"

namespace mk::kernels {

const RowMath& row_math(DType dtype) {
  static const RowMath* const best[2] = {row_math_avx2(DType::kBf16), row_math_avx2(DType::kF16)};
  const RowMath* found = best[static_cast<std::uint32_t>(dtype)];
  return found != nullptr ? *found : row_math_generic(dtype);
}

}  // namespace mk::kernels
