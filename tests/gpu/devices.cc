#include "tests/gpu/devices.h"

#include <cuda_runtime_api.h>

#include "tests/gpu/gemm_reference.h"

namespace mk::test {

int device_count() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

void allow_access(int from, int to) {
  require(cudaSetDevice(from), "cudaSetDevice");
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // clears it
  } else {
    require(error, "cudaDeviceEnablePeerAccess");
  }
}

}  // namespace mk::test
