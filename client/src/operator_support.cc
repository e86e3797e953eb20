#include "client/src/operator_support.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "client/src/job_plan.h"
#include "client/src/portable/one_dnn.h"
#include "kernels/plan/account.h"

namespace mk {
namespace {

/// Spans of one thread and launch that a trace keeps: 3 MB.
constexpr std::uint32_t kTraceSpans = 1u << 16;

/// A wait of a year counts as endless; with more, sums of nanoseconds would overflow.
constexpr std::chrono::milliseconds kWaitTimeoutMax = std::chrono::hours{24 * 365};

}  // namespace

const char* name_of(DataType type) {
  return type == DataType::kBf16 ? "bf16" : type == DataType::kF16 ? "f16" : "f32";
}

Status check_dimension(std::string_view op, std::string_view name, std::uint64_t value) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (value >= 1 && value <= kMax) return {};
  return fail(ErrorCode::kInvalidArgument, "{} takes {} from 1 to {}; got {}", op, name, kMax,
              value);
}

Result<kernels::Shape> checked_shape(std::string_view op, std::uint64_t m_max, std::uint64_t n,
                                     std::uint64_t k) {
  MK_RETURN_IF_ERROR(check_dimension(op, "m_max", m_max));
  MK_RETURN_IF_ERROR(check_dimension(op, "n", n));
  MK_RETURN_IF_ERROR(check_dimension(op, "k", k));
  return kernels::Shape{static_cast<std::uint32_t>(m_max), static_cast<std::uint32_t>(n),
                        static_cast<std::uint32_t>(k)};
}

Result<kernels::DType> checked_dtype(std::string_view op, DataType type) {
  switch (type) {
    case DataType::kBf16:
      return kernels::DType::kBf16;
    case DataType::kF16:
      return kernels::DType::kF16;
    case DataType::kF32:
      break;
  }
  return fail(ErrorCode::kInvalidArgument, "{} computes in bf16 or f16, not in data type {}", op,
              static_cast<std::uint32_t>(type));
}

Result<kernels::DType> checked_any_dtype(std::string_view op, DataType type) {
  if (type == DataType::kF32) return kernels::DType::kF32;
  if (type == DataType::kBf16 || type == DataType::kF16) return checked_dtype(op, type);
  return fail(ErrorCode::kInvalidArgument,
              "{} takes bf16 (1), f16 (2) or f32 (3), not data type {}", op,
              static_cast<std::uint32_t>(type));
}

Result<kernels::BLayout> checked_layout(std::string_view op, BLayout layout) {
  switch (layout) {
    case BLayout::kKN:
      return kernels::BLayout::kKN;
    case BLayout::kNK:
      return kernels::BLayout::kNK;
  }
  return fail(ErrorCode::kInvalidArgument, "{}: B's layout {} is neither KN nor NK", op,
              static_cast<std::uint32_t>(layout));
}

Result<kernels::Epilogue> checked_epilogue(std::string_view op, const Epilogue& epilogue) {
  if (epilogue.activation <= Activation::kGatedSilu)
    return kernels::Epilogue{static_cast<kernels::Activation>(epilogue.activation), epilogue.bias};
  return fail(
      ErrorCode::kInvalidArgument,
      "{}: activation {} is none; there are none (0), ReLU (1), GELU (2), SiLU (3) and gated "
      "SiLU (4)",
      op, static_cast<std::uint32_t>(epilogue.activation));
}

Result<kernels::Partials> checked_partials(std::string_view op, Partials partials) {
  if (partials <= Partials::kF32) return static_cast<kernels::Partials>(partials);
  return fail(ErrorCode::kInvalidArgument,
              "{}: partial sums travel as elements (0) or in fp32 (1), not as {}", op,
              static_cast<std::uint32_t>(partials));
}

kernels::Mode kernel_mode(LaunchMode mode) {
  switch (mode) {
    case LaunchMode::kFused:
      return kernels::Mode::kFused;
    case LaunchMode::kUnfused:
      return kernels::Mode::kUnfused;
    case LaunchMode::kAuto:
      break;
  }
  return kernels::Mode::kAuto;
}

kernels::Tiling kernel_tiling(const Tuning& tuning) {
  kernels::Tiling tiling;
  tiling.tile_m = tuning.tile_m;
  tiling.tile_n = tuning.tile_n;
  tiling.chunk_bytes = tuning.chunk_bytes;
  tiling.exchange = static_cast<kernels::Exchange>(tuning.exchange);
  return tiling;
}

kernels::MachineRates kernel_rates(const MachineRates& rates) {
  return {rates.flops_per_s, rates.local_bytes_per_s, rates.network_bytes_per_s, rates.command_ns,
          rates.step_ns};
}

Result<kernels::CpuOptions> kernel_options(const Tuning& tuning, const Session::Impl& session) {
  kernels::CpuOptions options;
  const auto take = [](std::uint32_t wanted, auto& value) {
    if (wanted != 0) value = wanted;
  };
  options.blocks.send = std::min(options.blocks.send.count(), session.options().lanes);
  take(tuning.compute_sms, options.blocks.compute);
  take(tuning.reduce_sms, options.blocks.reduce);
  take(tuning.send_sms, options.blocks.send);
  take(tuning.receive_sms, options.blocks.receive);
  take(tuning.share_sms, options.blocks.share);
  take(tuning.pull_sms, options.blocks.pull);
  options.wait_timeout = std::min(tuning.wait_timeout, kWaitTimeoutMax);
  options.rates = kernel_rates(tuning.rates);
  options.progress = session.progress();
  options.batch_invariant = tuning.batch_invariant;
  options.adaptive = tuning.partition == Partition::kAdaptive;
  MK_ASSIGN_OR_RETURN(kernels::plan::Machine machine,
                      own_machine({session.fabric(), session.network_bytes_per_s()}, tuning,
                                  kernels::plan::cpu_here()));
  options.machine = std::make_shared<const kernels::plan::Machine>(std::move(machine));
  return options;
}

std::string describe_plan(const kernels::AgGemmPlan& plan) {
  return fmt::format("m_max={} k={} dtype={} chunk_bytes={} banks={} plan={:016x}", plan.max.m,
                     plan.max.k, kernels::name_of(plan.dtype), plan.gather.chunk_bytes,
                     plan.gather.banks, plan.fingerprint());
}

std::string describe_plan(const kernels::MoeDispatchPlan& plan) {
  const kernels::MoeDispatchShape& shape = plan.shape;
  return fmt::format(
      "tokens_max={} hidden={} features={} experts={} top_k={} rows_max={} epilogue={} bias={} "
      "dtype={} tiles={}x{} chunk_bytes={} banks={} plan={:016x}",
      shape.tokens_max, shape.hidden, shape.features, shape.experts, shape.top_k, shape.rows_max,
      kernels::name_of(shape.epilogue), shape.bias, kernels::name_of(plan.dtype), plan.tile_m,
      plan.tile_n, plan.tokens.chunk_bytes, plan.banks, plan.fingerprint());
}

std::string describe_plan(const kernels::CombinePlan& plan) {
  const kernels::CombineShape& shape = plan.shape;
  return fmt::format(
      "tokens_max={} hidden={} features={} experts={} top_k={} partials={} dtype={} tiles={}x{} "
      "chunk_tokens={} banks={} plan={:016x}",
      shape.tokens_max, shape.hidden, shape.features, shape.experts, shape.top_k,
      kernels::name_of(shape.partials), kernels::name_of(plan.dtype), plan.tile_m, plan.tile_n,
      plan.chunk_tokens, plan.banks, plan.fingerprint());
}

std::string describe_plan(const kernels::RingAttentionPlan& plan) {
  return fmt::format(
      "seq_max={} batch={} sequences_max={} query_heads={} key_heads={} head_dim={} causal={} "
      "dtype={} tiles={}x{} "
      "chunk_bytes={} remote_passes={} banks={} plan={:016x}",
      plan.seq_max, plan.batch, plan.sequences_max, plan.query_heads, plan.key_heads, plan.head_dim,
      plan.causal, kernels::name_of(plan.dtype), plan.tile_q, plan.tile_k, plan.gather.chunk_bytes,
      plan.remote_passes, plan.banks, plan.fingerprint());
}

Result<LaunchStats> finish_launch(const Session::Impl& session,
                                  const Result<kernels::LaunchStats>& stats) {
  if (stats) {
    const bool fused = stats->mode == kernels::Mode::kFused;
    const kernels::RoleStats& compute = stats->role(kernels::Role::kCompute);
    return LaunchStats{stats->epoch,
                       fused ? LaunchMode::kFused : LaunchMode::kUnfused,
                       stats->total_ns,
                       stats->gemm_ns,
                       stats->network_bytes,
                       stats->commands,
                       compute.wait_ns / std::max(1u, compute.blocks),
                       stats->estimate.fused_ns,
                       stats->estimate.unfused_ns,
                       stats->nonfinite_partials,
                       stats->partition.first,
                       stats->partition.last,
                       stats->partition.moves,
                       stats->partition.turns};
  }
  const Status failure = session.failure_behind(stats.error());
  if (failure) return tl::unexpected<Error>(stats.error());
  return fail(failure.error().code, "{} ({})", failure.error().message, stats.error().message);
}

Result<bool> wants_device(std::string_view op, Executor executor) {
  switch (executor) {
    case Executor::kCpu:
      MK_RETURN_IF_ERROR(one_dnn_available());
      return false;
    case Executor::kCuda:
      return true;
  }
  return fail(ErrorCode::kInvalidArgument, "{}: executor {} is neither the CPU nor CUDA", op,
              static_cast<std::uint32_t>(executor));
}

Status check_own_tiles(std::string_view op, const Tuning& tuning) {
  if (tuning.tile_m == 0 && tuning.tile_n == 0) return {};
  return fail(
      ErrorCode::kUnsupported,
      "{}: tiles of {} rows and {} columns were asked for; on a GPU the kernel has its own: "
      "leave tile_m and tile_n 0",
      op, tuning.tile_m, tuning.tile_n);
}

Status check_partition(std::string_view op, const Tuning& tuning, bool moves) {
  if (tuning.partition == Partition::kPlanned) return {};
  if (tuning.partition != Partition::kAdaptive) {
    return fail(ErrorCode::kInvalidArgument, "{}: partition {} is neither planned nor adaptive", op,
                static_cast<unsigned>(tuning.partition));
  }
  if (moves) return {};
  return fail(ErrorCode::kUnsupported,
              "{}: an adaptive partition is for operators that multiply or attend; leave "
              "Tuning::partition planned",
              op);
}

Status check_device(std::string_view op, const DeviceOperator* device) {
  if (device != nullptr) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{} was created for the CPU, which has no streams: launch it without one", op);
}

Status device_status(const Session::Impl& session, const DeviceOperator* device) {
  if (!session.is_here()) return session.status();
  const Status status = device != nullptr ? device->status() : Status{};
  if (status) return session.status();
  const Status failure = session.failure_behind(status.error());
  if (failure) return status;
  return fail(failure.error().code, "{} ({})", failure.error().message, status.error().message);
}

Result<LaunchStats> finish_on_device(std::string_view op, const Session::Impl& session,
                                     DeviceOperator* device, CudaStream stream) {
  MK_RETURN_IF_ERROR(check_device(op, device));
  if (!session.is_here()) return propagate(session.status());
  return finish_launch(session, device->finish(stream));
}

void set_trace(kernels::LaunchRunner& runner, bool on) { runner.set_trace(on ? kTraceSpans : 0); }

std::vector<TraceSpan> trace_of(const kernels::LaunchRunner& runner) {
  std::vector<TraceSpan> spans = spans_of(runner.trace());
  if (spans.empty()) return spans;
  add_partition(spans, runner.partition_steps());
  return spans;
}

void add_partition(std::vector<TraceSpan>& spans,
                   const std::vector<kernels::PartitionStep>& steps) {
  std::uint64_t end_ns = 0;
  for (const TraceSpan& span : spans) end_ns = std::max(end_ns, span.end_ns);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::uint64_t next_ns = i + 1 < steps.size() ? steps[i + 1].at_ns : end_ns;
    spans.push_back({"partition",
                     0,
                     "target",
                     {steps[i].target, steps[i].communicating},
                     0,
                     steps[i].at_ns,
                     std::max(steps[i].at_ns, next_ns)});
  }
}

std::vector<TraceSpan> spans_of(const std::vector<kernels::TraceEvent>& events) {
  std::vector<TraceSpan> spans;
  for (const kernels::TraceEvent& event : events) {
    const kernels::TraceSpan& span = event.span;
    spans.push_back({kernels::name_of(event.role),
                     event.block,
                     kernels::name_of(span.kind),
                     {span.index[0], span.index[1]},
                     span.rank,
                     span.begin_ns,
                     span.end_ns});
  }
  return spans;
}

}  // namespace mk
