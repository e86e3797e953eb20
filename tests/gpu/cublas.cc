#include "tests/gpu/cublas.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

namespace mk::test {
namespace {

constexpr std::size_t kWorkspaceBytes = 64u << 20;

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fmt::print(stderr, "{}: {}\n", what, cublasGetStatusString(status));
  std::exit(1);
}

}  // namespace

Cublas::Cublas(cudaStream_t stream) : workspace_(kWorkspaceBytes) {
  check(cublasCreate(&handle_), "cublasCreate");
  check(cublasSetStream(handle_, stream), "cublasSetStream");
  check(cublasSetWorkspace(handle_, workspace_.data(), kWorkspaceBytes), "cublasSetWorkspace");
}

Cublas::~Cublas() { cublasDestroy(handle_); }

void Cublas::multiply(Shape shape, const void* a, const void* b, void* c) {
  const float one = 1, zero = 0;
  check(cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, shape.n, shape.m, shape.k, &one, b,
                     CUDA_R_16BF, shape.k, a, CUDA_R_16BF, shape.k, &zero, c, CUDA_R_16BF, shape.n,
                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
}

}  // namespace mk::test
