/// \file
/// How GPU matrix products are judged: fresh random inputs, poisoned outputs, and a float64
/// reference kernel that shares nothing with the kernels under test.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/core/gemm_types.h"

namespace mk::test {

/// Fills `count` two-byte elements with standard normal values drawn from `seed`.
void fill_normal(void* elements, kernels::cuda::DType dtype, std::int64_t count, std::uint64_t seed,
                 cudaStream_t stream);

/// Fills `count` two-byte elements with NaN.
void poison(void* elements, std::int64_t count, cudaStream_t stream);

struct Verdict {
  double worst = 0;      ///< largest |error| / bound; the product is right when it is at most 1
  double error_max = 0;  ///< largest |error|
  std::int64_t bad = 0;  ///< elements over their bound or not finite
  std::int64_t first_bad = -1;  ///< index (row * n + column) of one of them
  bool right() const { return bad == 0; }
  /// Of other elements, too.
  void include(const Verdict& other) {
    worst = std::max(worst, other.worst);
    error_max = std::max(error_max, other.error_max);
    bad += other.bad;
    if (first_bad < 0) first_bad = other.first_bad;
  }
};

/// Compares every element of problem.c, rows `row_begin` to `row_end`, with the float64 product of
/// problem.a and problem.b, as judge_sum (summed_reference.h) does with the product of one rank.
Verdict judge(const kernels::cuda::GemmProblem& problem, int row_begin, int row_end,
              cudaStream_t stream);

/// Ends the process with the call and CUDA's reason unless `error` is cudaSuccess.
void require(cudaError_t error, const char* what);

/// Device memory that frees itself, on the current device or on a given one (which then is current
/// only during the call).
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) { require(cudaMalloc(&data_, bytes), "cudaMalloc"); }
  DeviceMemory(std::size_t bytes, int device) {
    int current = 0;
    require(cudaGetDevice(&current), "cudaGetDevice");
    require(cudaSetDevice(device), "cudaSetDevice");
    require(cudaMalloc(&data_, bytes), "cudaMalloc");
    require(cudaSetDevice(current), "cudaSetDevice");
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(DeviceMemory&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace mk::test
