/// \file
/// An operator on a GPU, as the operator classes use it: the same for the three that have a CUDA
/// form. In builds without CUDA each `make_device_...` answers kUnsupported.
#pragma once

#include <cstdint>
#include <memory>

#include "client/src/session_impl.h"
#include "kernels/comm/launch_stats.h"
#include "kernels/comm/types.h"
#include "mkernel/types.h"

namespace mk {

/// What a launch is given; on a GPU, in its memory.
struct DeviceArguments {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  void* gathered = nullptr;  ///< AllGather + GEMM
};

struct DeviceShape {
  kernels::Shape shape;
  kernels::DType dtype;
  kernels::BLayout b_layout;

  // Leading dimensions of dense matrices.
  std::uint64_t lda() const { return shape.k; }
  std::uint64_t ldb() const { return b_layout == kernels::BLayout::kKN ? shape.n : shape.k; }
  std::uint64_t ldc() const { return shape.n; }
};

/// Matrices are dense. Every call is for the thread's current GPU, the one of the creation.
class DeviceOperator {
 public:
  virtual ~DeviceOperator() = default;
  /// On the stream, without waiting.
  virtual Status launch(CudaStream stream, const DeviceArguments& arguments, std::uint32_t m,
                        kernels::Mode mode) = 0;
  /// Of the launches that have ended.
  virtual Status status() const = 0;
  virtual Result<kernels::LaunchStats> finish(CudaStream stream) = 0;
  virtual const void* output() const { return nullptr; }
  virtual void* input() const { return nullptr; }
  /// Of this operator alone, for launches without a stream: ranks that share a GPU must not share
  /// one.
  virtual CudaStream own_stream() = 0;
};

/// The workspace that the operator takes; not collective.
Result<std::uint64_t> device_workspace_ag_gemm(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning);
Result<std::uint64_t> device_workspace_gemm_rs(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning);
Result<std::uint64_t> device_workspace_gemm_ar(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning);

/// Collective, with a barrier at the end: nobody launches before all have loaded their kernels.
Result<std::unique_ptr<DeviceOperator>> make_device_ag_gemm(Session::Impl& session,
                                                            const DeviceShape& shape,
                                                            const Tuning& tuning);
Result<std::unique_ptr<DeviceOperator>> make_device_gemm_rs(Session::Impl& session,
                                                            const DeviceShape& shape,
                                                            const Tuning& tuning);
Result<std::unique_ptr<DeviceOperator>> make_device_gemm_ar(Session::Impl& session,
                                                            const DeviceShape& shape,
                                                            const Tuning& tuning);

}  // namespace mk
