/// \file
/// The few macros that let one header compile for the host (GCC, Clang) and for the device (nvcc).
#pragma once

#if defined(__CUDA_ARCH__)
/// Inlined at any size: a real call anywhere in a kernel makes ptxas ignore its register split.
#define MK_HOST_DEVICE __host__ __device__ __attribute__((always_inline))
/// Before a loop: turn by turn, which takes the fewest registers.
#define MK_NO_UNROLL _Pragma("unroll 1")
#elif defined(__CUDACC__)
#define MK_HOST_DEVICE __host__ __device__
#define MK_NO_UNROLL
#else
#define MK_HOST_DEVICE
#define MK_NO_UNROLL
#endif
