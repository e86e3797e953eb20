/// \file
/// The few macros that let one header compile for the host (GCC, Clang) and for the device (nvcc).
#pragma once

#if defined(__CUDACC__)
#define MK_HOST_DEVICE __host__ __device__
#else
#define MK_HOST_DEVICE
#endif
