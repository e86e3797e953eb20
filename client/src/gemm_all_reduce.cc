/// \file
/// GEMM+AllReduce for people: agrees with the other ranks on the plan, gives the executor its
/// memory, translates arguments.

#include <limits>
#include <utility>

#include "client/src/operator_memory.h"
#include "kernels/cpu/gemm_ar_cpu.h"
#include "kernels/gemm_ar/plan.h"
#include "mkernel/mkernel.h"

namespace mk {
namespace {

constexpr std::uint64_t kDimensionMax = std::numeric_limits<std::int32_t>::max();

Result<kernels::Shape> checked(const GemmAllReduce::Shape& shape) {
  if (shape.m_max == 0 || shape.n == 0 || shape.k == 0 || shape.m_max > kDimensionMax ||
      shape.n > kDimensionMax || shape.k > kDimensionMax) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm-ar takes m_max, n and k from 1 to {}; got {}, {}, {}", kDimensionMax,
                shape.m_max, shape.n, shape.k);
  }
  if (shape.dtype != DataType::kBf16 && shape.dtype != DataType::kF16) {
    return fail(ErrorCode::kInvalidArgument, "gemm-ar computes in bf16 or f16, not in data type {}",
                static_cast<std::uint32_t>(shape.dtype));
  }
  if (shape.b_layout != BLayout::kKN && shape.b_layout != BLayout::kNK) {
    return fail(ErrorCode::kInvalidArgument, "B's layout {} is neither KN nor NK",
                static_cast<std::uint32_t>(shape.b_layout));
  }
  return kernels::Shape{static_cast<std::uint32_t>(shape.m_max),
                        static_cast<std::uint32_t>(shape.n), static_cast<std::uint32_t>(shape.k)};
}

kernels::GemmArCpuOptions cpu_options(const GemmAllReduce::Tuning& tuning, BLayout layout,
                                      std::uint32_t lanes) {
  kernels::GemmArCpuOptions options;
  const auto take = [](std::uint32_t wanted, std::uint32_t& value) {
    if (wanted != 0) value = wanted;
  };
  options.send_blocks = std::min(options.send_blocks, lanes);
  take(tuning.compute_blocks, options.compute_blocks);
  take(tuning.reduce_blocks, options.reduce_blocks);
  take(tuning.send_blocks, options.send_blocks);
  take(tuning.receive_blocks, options.receive_blocks);
  options.wait_timeout = tuning.wait_timeout;
  options.b_layout = layout == BLayout::kKN ? kernels::BLayout::kKN : kernels::BLayout::kNK;
  return options;
}

/// What must be equal on all ranks, for people to compare. Each rank's own k is not among it.
std::string describe(const kernels::GemmArPlan& plan) {
  return fmt::format("m_max={} n={} dtype={} tiles={}x{} chunk_bytes={} banks={} plan={:016x}",
                     plan.max.m, plan.max.n, kernels::name_of(plan.dtype), plan.tile_m, plan.tile_n,
                     plan.chunk_bytes, plan.banks, plan.fingerprint());
}

}  // namespace

const char* name_of(DataType type) { return type == DataType::kBf16 ? "bf16" : "f16"; }

class __attribute__((visibility("hidden"))) GemmAllReduce::Impl {
 public:
  Impl(std::shared_ptr<Session::Impl> session, OperatorMemory memory,
       std::unique_ptr<kernels::GemmArCpu> cpu, const Shape& shape)
      : session_(std::move(session)),
        memory_(std::move(memory)),
        cpu_(std::move(cpu)),
        shape_(shape) {}

  Result<LaunchStats> launch(const void* a, const void* b, void* c, std::uint64_t m,
                             LaunchMode mode) {
    if (a == nullptr || b == nullptr)
      return fail(ErrorCode::kInvalidArgument, "gemm-ar was launched without A or B");
    if (m == 0 || m > shape_.m_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm-ar was created for m from 1 to {}; launched with {}", shape_.m_max, m);
    }
    MK_RETURN_IF_ERROR(session_->status());
    const std::uint64_t ldb = shape_.b_layout == BLayout::kKN ? shape_.n : shape_.k;
    auto stats =
        cpu_->launch(a, shape_.k, b, ldb, c, shape_.n, static_cast<std::uint32_t>(m),
                     mode == LaunchMode::kFused ? kernels::Mode::kFused : kernels::Mode::kUnfused);
    if (!stats) {
      // The wait that was cut short says less than what the daemon knows: a rank died, a link
      // broke.
      const Status session = session_->failure_behind(stats.error());
      if (!session) {
        return fail(session.error().code, "{} ({})", session.error().message,
                    stats.error().message);
      }
      return propagate(stats);
    }
    return LaunchStats{
        stats->epoch,
        stats->mode == kernels::Mode::kFused ? LaunchMode::kFused : LaunchMode::kUnfused,
        stats->total_ns,
        stats->gemm_ns,
        stats->network_bytes,
        stats->commands};
  }

  const void* output() const { return cpu_->output(); }

 private:
  std::shared_ptr<Session::Impl>
      session_;  ///< keeps the segment mapped while blocks may look at it
  OperatorMemory memory_;
  std::unique_ptr<kernels::GemmArCpu> cpu_;  ///< goes first: its blocks use the memory above
  Shape shape_;
};

Result<GemmAllReduce> GemmAllReduce::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<GemmAllReduce> GemmAllReduce::create(Session& session, const Shape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const kernels::Shape kernel_shape, checked(shape));
  const AttachOptions& options = session.options();
  const auto dtype = shape.dtype == DataType::kBf16 ? kernels::DType::kBf16 : kernels::DType::kF16;
  kernels::GemmArTiling tiling;
  if (tuning.tile_m != 0) tiling.tile_m = tuning.tile_m;
  if (tuning.tile_n != 0) tiling.tile_n = tuning.tile_n;
  if (tuning.chunk_bytes != 0) tiling.chunk_bytes = tuning.chunk_bytes;
  MK_ASSIGN_OR_RETURN(const auto plan, kernels::GemmArPlan::make(options.nodes, options.local_size,
                                                                 kernel_shape, dtype, tiling));
  MK_ASSIGN_OR_RETURN(auto memory,
                      OperatorMemory::create(*session.impl_, "gemm-ar", describe(plan),
                                             plan.workspace_bytes(), plan.flag_count()));
  MK_ASSIGN_OR_RETURN(
      auto cpu, kernels::GemmArCpu::create(plan, kernel_shape.k, memory.context(),
                                           cpu_options(tuning, shape.b_layout, options.lanes)));
  return GemmAllReduce(
      std::make_unique<Impl>(session.impl_, std::move(memory), std::move(cpu), shape));
}

GemmAllReduce::GemmAllReduce(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmAllReduce::GemmAllReduce(GemmAllReduce&&) noexcept = default;
GemmAllReduce& GemmAllReduce::operator=(GemmAllReduce&&) noexcept = default;
GemmAllReduce::~GemmAllReduce() = default;

Result<LaunchStats> GemmAllReduce::launch(const void* a, const void* b, void* c, std::uint64_t m,
                                          LaunchMode mode) {
  return impl_->launch(a, b, c, m, mode);
}
const void* GemmAllReduce::output() const { return impl_->output(); }

}  // namespace mk
