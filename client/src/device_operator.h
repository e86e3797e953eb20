/// \file
/// An operator on a GPU, as the operator classes use it. In builds without CUDA each
/// `make_device_...` answers kUnsupported.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client/src/session_impl.h"
#include "kernels/comm/launch_stats.h"
#include "kernels/comm/partition_step.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/trace_event.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/host/collective.h"
#include "kernels/cuda/host/gemm_matrices.h"
#include "kernels/ops/combine/device_input.h"
#include "kernels/ops/combine/geometry.h"
#include "kernels/ops/moe/launch.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/ops/ring/tensors.h"
#include "mkernel/types.h"

namespace mk {

/// What every operator on a GPU has, whatever it computes. Every call is for the thread's current
/// GPU, the one of the creation.
class DeviceOperator {
 public:
  virtual ~DeviceOperator() = default;
  /// Of the launches that have ended.
  virtual Status status() const = 0;
  /// As of OperatorCore: its own part, and its workspace.
  virtual bool usable() const = 0;
  virtual bool claim_workspace() = 0;
  virtual Result<kernels::LaunchStats> finish(CudaStream stream) = 0;
  /// Of this operator alone, for launches without a stream: ranks that share a GPU must not share
  /// one.
  virtual CudaStream own_stream() = 0;
  /// LaunchOptions::tag of the next launches.
  virtual void set_tag(std::uint64_t tag) = 0;
  /// Whether the launches that follow note what their blocks do when; not every operator does.
  virtual void set_trace(bool /*on*/) {}
  /// Of the last launch, which has ended.
  virtual std::vector<kernels::TraceEvent> trace() const { return {}; }
  /// Likewise, of an adaptive partition that is traced.
  virtual std::vector<kernels::PartitionStep> partition_steps() const { return {}; }
};

// --- The products over all ranks ---

struct DeviceShape {
  kernels::Shape shape;
  kernels::DType dtype;
  kernels::BLayout b_layout;
  kernels::GemmResult result;
};

/// Its launches get what checked_matrices() has passed.
class DeviceGemm : public DeviceOperator {
 public:
  /// On the stream, without waiting.
  virtual Status launch(CudaStream stream, const kernels::GemmMatrices& of, std::uint32_t m,
                        kernels::Mode mode) = 0;
  virtual const void* output() const { return nullptr; }
  virtual void* input() const { return nullptr; }
};

/// The workspace that the operator takes; not collective.
Result<std::uint64_t> device_workspace_ag_gemm(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning);
Result<std::uint64_t> device_workspace_gemm_rs(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning);
Result<std::uint64_t> device_workspace_gemm_ar(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning);

/// Collective, with a barrier at the end: nobody launches before all have loaded their kernels.
Result<std::unique_ptr<DeviceGemm>> make_device_ag_gemm(Session::Impl& session,
                                                        const DeviceShape& shape,
                                                        const Tuning& tuning);
Result<std::unique_ptr<DeviceGemm>> make_device_gemm_rs(Session::Impl& session,
                                                        const DeviceShape& shape,
                                                        const Tuning& tuning);
Result<std::unique_ptr<DeviceGemm>> make_device_gemm_ar(Session::Impl& session,
                                                        const DeviceShape& shape,
                                                        const Tuning& tuning);

// --- Ring Attention ---

class DeviceRing : public DeviceOperator {
 public:
  /// On the stream, without waiting.
  virtual Status launch(CudaStream stream, const kernels::RingAttentionTensors& tensors,
                        std::uint64_t seq, kernels::Mode mode) = 0;
};

/// As of the products.
Result<std::uint64_t> device_workspace_ring(Session::Impl& session,
                                            const kernels::RingAttentionShape& shape,
                                            const Tuning& tuning);
Result<std::unique_ptr<DeviceRing>> make_device_ring(Session::Impl& session,
                                                     const kernels::RingAttentionShape& shape,
                                                     const Tuning& tuning);

// --- MoE Dispatch+GEMM ---

class DeviceMoe : public DeviceOperator {
 public:
  /// On the stream, without waiting.
  virtual Status launch(CudaStream stream, const kernels::MoeDispatchInput& input, void* y,
                        std::uint64_t capacity, kernels::Mode mode) = 0;
  virtual kernels::ShardRange experts() const = 0;
  /// In the GPU's memory; see MoeDispatchGemm.
  virtual std::span<const std::uint32_t> expert_offsets() const = 0;
  virtual std::span<const kernels::MoeRow> rows() const = 0;
};

/// As of the products. What is not an expert's layout is in the shape.
struct DeviceMoeShape {
  kernels::MoeDispatchShape shape;
  kernels::DType dtype;
  kernels::BLayout b_layout;
};
Result<std::uint64_t> device_workspace_moe(Session::Impl& session, const DeviceMoeShape& shape,
                                           const Tuning& tuning);
Result<std::unique_ptr<DeviceMoe>> make_device_moe(Session::Impl& session,
                                                   const DeviceMoeShape& shape,
                                                   const Tuning& tuning);

// --- GEMM+Combine ---

class DeviceCombine : public DeviceOperator {
 public:
  /// On the stream, without waiting.
  virtual Status launch(CudaStream stream, const kernels::CombineDeviceInput& input, void* out,
                        kernels::Mode mode) = 0;
  virtual kernels::ShardRange experts() const = 0;
};

/// As of the products.
struct DeviceCombineShape {
  kernels::CombineShape shape;
  kernels::DType dtype;
  kernels::BLayout b_layout;
};
Result<std::uint64_t> device_workspace_combine(Session::Impl& session,
                                               const DeviceCombineShape& shape,
                                               const Tuning& tuning);
Result<std::unique_ptr<DeviceCombine>> make_device_combine(Session::Impl& session,
                                                           const DeviceCombineShape& shape,
                                                           const Tuning& tuning);

// --- The collectives ---

class DeviceCollective : public DeviceOperator {
 public:
  /// On the stream, without waiting.
  virtual Status launch(CudaStream stream, const void* input, void* output, std::uint32_t m,
                        kernels::Mode mode) = 0;
  virtual void* input() const = 0;
};

/// An operator's plan, by what making it on a GPU takes.
struct DeviceCollectivePlan {
  std::string_view op;
  std::string parameters;  ///< describe_plan()
  kernels::WorkspaceParts workspace;
  std::uint32_t flag_count = 0;
  /// With its data moved so far.
  std::function<Result<std::unique_ptr<kernels::CollectiveCuda>>(
      const kernels::RankContext&, const kernels::CudaOptions&, std::uint64_t data_moved)>
      make;
};
/// Whether there is a GPU for it; not collective.
Status expect_device(Session::Impl& session);
/// As of the products.
Result<std::unique_ptr<DeviceCollective>> make_device_collective(Session::Impl& session,
                                                                 const DeviceCollectivePlan& plan,
                                                                 const Tuning& tuning);

}  // namespace mk
