#include "client/src/cuda/cuda_operator.h"

namespace mk {

Status check_on_gpu(std::string_view op, const char* name, const void* memory) {
  if (memory == nullptr) return {};
  int device = 0;
  cudaPointerAttributes found{};
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
    return fail(ErrorCode::kUnavailable, "{}: no CUDA device: {}", op, cudaGetErrorString(error));
  if (const cudaError_t error = cudaPointerGetAttributes(&found, memory); error != cudaSuccess) {
    cudaGetLastError();  // not the next call's
    return fail(ErrorCode::kInvalidArgument, "{}: {} at {}: {}", op, name, fmt::ptr(memory),
                cudaGetErrorString(error));
  }
  switch (found.type) {
    case cudaMemoryTypeManaged:
      return {};
    case cudaMemoryTypeDevice:
      if (found.device == device) return {};
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} at {} is memory of GPU {}, and the operator is on GPU {}; copy it there",
                  op, name, fmt::ptr(memory), found.device, device);
    default:
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} at {} is memory of the host, and the operator is on GPU {}; copy it "
                  "there, or create the operator with Executor::kCpu",
                  op, name, fmt::ptr(memory), device);
  }
}

}  // namespace mk
