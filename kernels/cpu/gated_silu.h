/// \file
/// The gated SiLU of a row on the CPU, in fp32.
#pragma once

#include <cmath>
#include <cstdint>

namespace mk::kernels {

/// target[i] = silu(gate[i * step]) * up[i * step], silu(x) = x / (1 + exp(-x)). `target` may be
/// `gate`.
inline void gated_silu(const float* gate, const float* up, std::uint32_t step, float* target,
                       std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    const float x = gate[i * step];
    target[i] = x / (1.0f + std::exp(-x)) * up[i * step];
  }
}

}  // namespace mk::kernels
