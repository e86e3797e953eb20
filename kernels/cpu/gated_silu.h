/// \file
/// SiLU and the gated SiLU of a row on the CPU, in fp32.
#pragma once

#include <cmath>
#include <cstdint>

namespace mk::kernels {

/// x / (1 + exp(-x))
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

/// target[i] = silu(gate[i * step]) * up[i * step]. `target` may be `gate`.
inline void gated_silu(const float* gate, const float* up, std::uint32_t step, float* target,
                       std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    target[i] = silu(gate[i * step]) * up[i * step];
  }
}

}  // namespace mk::kernels
