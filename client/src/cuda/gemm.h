/// \file
/// What the three products over all ranks have in common on a GPU: tiles, options, dense matrices.
#pragma once

#include <memory>
#include <utility>

#include "client/src/cuda/cuda_operator.h"

namespace mk {

/// The GPU's tiles, but for what the caller chose.
inline kernels::Tiling tiling_for(kernels::Tiling device, const Tuning& tuning) {
  if (tuning.tile_m != 0) device.tile_m = tuning.tile_m;
  if (tuning.tile_n != 0) device.tile_n = tuning.tile_n;
  if (tuning.chunk_bytes != 0) device.chunk_bytes = tuning.chunk_bytes;
  return device;
}

inline kernels::CudaOptions gemm_options(const DeviceShare& share, const DeviceShape& shape,
                                         const Tuning& tuning) {
  kernels::CudaOptions options = cuda_options(share, tuning);
  options.b_layout = shape.b_layout;
  return options;
}

/// `Cuda`: the operator in kernels/.
template <class Cuda>
class CudaGemm : public CudaOperator<DeviceGemm, Cuda> {
 public:
  CudaGemm(OperatorMemory memory, std::unique_ptr<Cuda> cuda, CudaStream stream, const char* op,
           const DeviceShape& shape)
      : CudaOperator<DeviceGemm, Cuda>(std::move(memory), std::move(cuda), stream),
        op_(op),
        shape_(shape) {}

  Status launch(CudaStream stream, const DeviceArguments& arguments, std::uint32_t m,
                kernels::Mode mode) final {
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "a", arguments.a));
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "b", arguments.b));
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "c", arguments.c));
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "gathered", arguments.gathered));
    return launch_checked(stream, arguments, m, mode);
  }

 protected:
  virtual Status launch_checked(CudaStream stream, const DeviceArguments& arguments,
                                std::uint32_t m, kernels::Mode mode) = 0;
  const DeviceShape& shape() const { return shape_; }

 private:
  const char* const op_;
  const DeviceShape shape_;
};

}  // namespace mk
