/// \file
/// cuBLAS as the operators are compared with it.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/products.h"

namespace mk::test {

/// A handle with a workspace of its own, for a stream of the device that is current at creation.
class Cublas {
 public:
  explicit Cublas(cudaStream_t stream);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  /// Queues C = A B, bf16: `a` [m, k], `b` [n, k], `c` [m, n], without gaps. Its device is current.
  void multiply(Shape shape, const void* a, const void* b, void* c);

 private:
  DeviceMemory workspace_;
  cublasHandle_t handle_ = nullptr;
};

}  // namespace mk::test
