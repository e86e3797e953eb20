/// \file
/// What every operator class does between its caller and its executor: translates arguments, and
/// answers what a launch did or what really ended it. `op` names the operator in messages
/// ("gemm-ar").
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "client/src/device_operator.h"
#include "client/src/gpu_launches.h"
#include "client/src/session_impl.h"
#include "kernels/comm/launch_stats.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/combine/spec.h"
#include "kernels/ops/moe/spec.h"
#include "kernels/ops/ring/spec.h"
#include "mkernel/types.h"

namespace mk {

/// 1 to 2^31 - 1.
Status check_dimension(std::string_view op, std::string_view name, std::uint64_t value);
/// Of a product.
Result<kernels::Shape> checked_shape(std::string_view op, std::uint64_t m_max, std::uint64_t n,
                                     std::uint64_t k);
Result<kernels::DType> checked_dtype(std::string_view op, DataType type);
/// Of an operator that has f32, too.
Result<kernels::DType> checked_any_dtype(std::string_view op, DataType type);
Result<kernels::BLayout> checked_layout(std::string_view op, BLayout layout);
Result<kernels::Epilogue> checked_epilogue(std::string_view op, const Epilogue& epilogue);
Result<kernels::Partials> checked_partials(std::string_view op, Partials partials);

kernels::Mode kernel_mode(LaunchMode mode);
kernels::Tiling kernel_tiling(const Tuning& tuning);
/// With what the session knows of its network, and the machine file. kNotFound, kInvalidArgument.
Result<kernels::CpuOptions> kernel_options(const Tuning& tuning, const Session::Impl& session);
kernels::MachineRates kernel_rates(const MachineRates& rates);

/// What must be equal on all ranks of a product summed over them, for users to compare. Each
/// rank's own k is not among it.
template <class Plan>
std::string describe_plan(const Plan& plan) {
  return fmt::format(
      "m_max={} n={} dtype={} activation={} bias={} partials={} tiles={}x{} chunk_bytes={} "
      "banks={} "
      "plan={:016x}",
      plan.max.m, plan.max.n, kernels::name_of(plan.dtype),
      kernels::name_of(plan.epilogue.activation), plan.epilogue.bias ? 1 : 0,
      kernels::name_of(plan.partials), plan.tile_m, plan.tile_n, plan.chunk_bytes, plan.banks,
      plan.fingerprint());
}

/// Of a plan that says so itself.
template <class Plan>
requires requires(const Plan& plan) { plan.describe(); }
std::string describe_plan(const Plan& plan) { return plan.describe(); }
/// The same of AllGather+GEMM, where n and the tiles are each rank's own.
std::string describe_plan(const kernels::AgGemmPlan& plan);
std::string describe_plan(const kernels::RingAttentionPlan& plan);
std::string describe_plan(const kernels::MoeDispatchPlan& plan);
std::string describe_plan(const kernels::CombinePlan& plan);

/// A launch's answer for the caller. The wait that was cut short says less than what the daemon
/// knows (a rank died, a link broke): then the session's failure comes first.
Result<LaunchStats> finish_launch(const Session::Impl& session,
                                  const Result<kernels::LaunchStats>& stats);

/// Launches (`launch()` is the executor's), unless the session has failed, and answers the caller.
template <class Launch>
Result<LaunchStats> run_launch(const Session::Impl& session, Launch&& launch) {
  MK_RETURN_IF_ERROR(session.status());
  session.announce_launch();
  const Session::Impl::LaunchMark mark(session);
  return finish_launch(session, launch());
}

template <class Plan>
std::uint64_t workspace_bytes_of(const Plan& plan) {
  if constexpr (requires { plan.workspace_bytes(); }) {
    return plan.workspace_bytes();
  } else {
    return plan.workspace_bytes;
  }
}

/// kInvalidArgument for an operator of the CPU.
Status check_device(std::string_view op, const DeviceOperator* device);
/// Which of `cpu` and `device` an operator has; kInvalidArgument for no executor at all.
Result<bool> wants_device(std::string_view op, Executor executor);

/// Of an operator whose kernel on a GPU has its own tiles: kUnsupported if others are asked for.
Status check_own_tiles(std::string_view op, const Tuning& tuning);

/// Tuning::partition is one that the operator can have. `moves`: it can be adaptive.
Status check_partition(std::string_view op, const Tuning& tuning, bool moves);

// What the classes of operators on GPUs do with it. `device` null: the operator runs on the CPU.
/// Puts a launch on a stream (`launch()` does), unless the session has failed.
template <class Launch>
Status launch_on_device(std::string_view op, const Session::Impl& session,
                        const DeviceOperator* device, Launch&& launch) {
  MK_RETURN_IF_ERROR(check_device(op, device));
  MK_RETURN_IF_ERROR(session.status());
  session.announce_launch();
  const auto begins = client::GpuLaunches::begin();
  return launch();
}
Status device_status(const Session::Impl& session, const DeviceOperator* device);
Result<LaunchStats> finish_on_device(std::string_view op, const Session::Impl& session,
                                     DeviceOperator* device, CudaStream stream);
/// Blocks, on a stream of its own: `launch(stream)`.
template <class Launch>
Result<LaunchStats> run_on_device(std::string_view op, const Session::Impl& session,
                                  DeviceOperator& device, Launch&& launch) {
  const CudaStream stream = device.own_stream();
  MK_RETURN_IF_ERROR(launch_on_device(op, session, &device, [&] { return launch(stream); }));
  return finish_on_device(op, session, &device, stream);
}

void set_trace(kernels::LaunchRunner& runner, bool on);
std::vector<TraceSpan> trace_of(const kernels::LaunchRunner& runner);
/// As spans of role "partition", from each step to the next, the last one to the end of `spans`.
void add_partition(std::vector<TraceSpan>& spans, const std::vector<kernels::PartitionStep>& steps);
std::vector<TraceSpan> spans_of(const std::vector<kernels::TraceEvent>& events);

}  // namespace mk
