/// \file
/// What the three operators on a GPU have in common: the plan by the GPU's tiles, the memory, the
/// kernels, the barrier, the leading dimensions of dense matrices.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "client/src/device_operator.h"
#include "client/src/operator_memory.h"
#include "client/src/operator_support.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/launch_state.h"

namespace mk {

/// Multiprocessors that the rank with the fewest has: tiles, on which all ranks agree, go by it.
struct DeviceShare {
  std::uint32_t blocks = 0;
  std::uint32_t ranks_per_device = 1;  ///< of this rank's device
  std::uint64_t* launches = nullptr;   ///< GpuSession::launches
};
/// Collective.
Result<DeviceShare> share_device(Session::Impl& session);
/// What that would answer, by what is known here: not collective. Until the session's first
/// operator on a GPU, as if this rank had the GPU to itself.
Result<std::uint32_t> expected_blocks(Session::Impl& session);

/// The GPU's tiles, but for what the caller chose.
inline kernels::Tiling tiling_for(kernels::Tiling device, const Tuning& tuning) {
  if (tuning.tile_m != 0) device.tile_m = tuning.tile_m;
  if (tuning.tile_n != 0) device.tile_n = tuning.tile_n;
  if (tuning.chunk_bytes != 0) device.chunk_bytes = tuning.chunk_bytes;
  return device;
}

inline kernels::CudaOptions cuda_options(const DeviceShare& share, const DeviceShape& shape,
                                         const Tuning& tuning) {
  kernels::CudaOptions options;
  options.ranks_per_device = share.ranks_per_device;
  options.compute_blocks = tuning.compute_blocks;
  options.stream_groups = std::max(tuning.reduce_blocks, tuning.share_blocks);
  options.send_groups = tuning.send_blocks;
  options.receive_groups = tuning.receive_blocks;
  options.wait_timeout = std::min(
      tuning.wait_timeout,
      std::chrono::duration_cast<std::chrono::milliseconds>(kernels::cuda::kWaitTimeoutMax));
  options.b_layout = shape.b_layout;
  options.rates = kernel_rates(tuning.rates);
  options.launches = share.launches;
  return options;
}

/// `Cuda`: the operator in kernels/cuda.
template <class Cuda>
class CudaOperator : public DeviceOperator {
 public:
  CudaOperator(OperatorMemory memory, std::unique_ptr<Cuda> cuda, CudaStream stream,
               const DeviceShape& shape)
      : memory_(std::move(memory)), cuda_(std::move(cuda)), stream_(stream), shape_(shape) {
    cudaGetDevice(&device_);
  }
  ~CudaOperator() override {
    cudaStreamDestroy(stream_);
    // Its memory goes with the workspace, on a thread that has no device of its own yet.
    memory_.keep(std::shared_ptr<Cuda>(cuda_.release(), [device = device_](Cuda* cuda) {
      cudaSetDevice(device);
      delete cuda;
    }));
  }
  CudaOperator(const CudaOperator&) = delete;
  CudaOperator& operator=(const CudaOperator&) = delete;

  Status status() const override { return cuda_->status(); }
  Result<kernels::LaunchStats> finish(CudaStream stream) override { return cuda_->finish(stream); }
  CudaStream own_stream() override { return stream_; }

 protected:
  Cuda& cuda() const { return *cuda_; }
  std::uint64_t lda() const { return shape_.shape.k; }
  std::uint64_t ldb() const {
    return shape_.b_layout == kernels::BLayout::kKN ? shape_.shape.n : shape_.shape.k;
  }
  std::uint64_t ldc() const { return shape_.shape.n; }

 private:
  OperatorMemory memory_;
  std::unique_ptr<Cuda> cuda_;  ///< goes first: it uses the memory
  const CudaStream stream_;
  const DeviceShape shape_;
  int device_ = 0;
};

/// From the agreed plan to the operator. `create(memory)` makes the kernels' side of it.
template <class Operator, class Create>
Result<std::unique_ptr<DeviceOperator>> make_device_operator(
    Session::Impl& session, std::string_view op, const std::string& parameters,
    std::uint64_t workspace_bytes, std::uint32_t flag_count, const DeviceShape& shape,
    Create&& create) {
  MK_ASSIGN_OR_RETURN(auto memory, OperatorMemory::create(session, op, parameters, workspace_bytes,
                                                          flag_count, Executor::kCuda));
  MK_ASSIGN_OR_RETURN(auto cuda, create(memory));
  cudaStream_t stream = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess)
    return fail(ErrorCode::kSystem, "{}: cannot make a stream: {}", op, cudaGetErrorString(error));
  std::unique_ptr<DeviceOperator> made =
      std::make_unique<Operator>(std::move(memory), std::move(cuda), stream, shape);
  MK_RETURN_IF_ERROR(session.barrier(session.options().timeout));
  return made;
}

}  // namespace mk
