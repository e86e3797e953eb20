/// \file
/// What the three products over all ranks (AllGather+GEMM, GEMM+ReduceScatter, GEMM+AllReduce) are
/// behind their public classes: checked arguments, the agreed plan, one of two executors with its
/// memory. `Kind` says what is an operator's own:
///
///     static constexpr std::string_view kName;      // in messages: "gemm-rs"
///     using Shape;                                  // of the public class
///     static constexpr bool kAddsPartials;           // of several ranks
///     static constexpr bool kKeepsOutput;            // in its workspace, where C is null
///     using Plan, Cpu;                               // of kernels/
///     static Result<Plan> make_plan(const AttachOptions&, const DeviceShape&,
///                                   const kernels::Tiling&);
///     static Result<std::unique_ptr<Cpu>> make_cpu(const Plan&, std::uint32_t k,
///                                                  const kernels::RankContext&,
///                                                  const kernels::GemmCpuOptions&);
///     static constexpr auto make_device;             // make_device_gemm_rs
///     static constexpr auto device_bytes;            // device_workspace_gemm_rs
///     static Status check(const kernels::GemmMatrices&);   // before either executor
///     static GemmRows rows(const AttachOptions&, std::uint64_t m);
///     static Result<kernels::LaunchStats> launch(Cpu&, const kernels::GemmMatrices&, std::uint32_t
///     m,
///                                                kernels::Mode);
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/src/executor_operator.h"
#include "client/src/gemm_matrices.h"
#include "client/src/operator_memory.h"
#include "client/src/operator_support.h"
#include "kernels/cpu/launch_runner.h"
#include "mkernel/session.h"

namespace mk {

/// Their part of an operator (executor_operator.h).
template <class Product>
struct GemmKind {
  static constexpr std::string_view kName = Product::kName;
  static constexpr bool kAdapts = true;
  static constexpr bool kAlone = false;
  using Shape = typename Product::Shape;
  using Tuning = mk::Tuning;
  using Checked = DeviceShape;
  using Plan = typename Product::Plan;
  using Cpu = typename Product::Cpu;
  using Device = DeviceGemm;
  static constexpr auto make_device = Product::make_device;
  static constexpr auto device_bytes = Product::device_bytes;

  static Result<Checked> checked(const Shape& shape) {
    Checked checked;
    MK_ASSIGN_OR_RETURN(checked.shape, checked_shape(kName, shape.m_max, shape.n, shape.k));
    MK_ASSIGN_OR_RETURN(checked.dtype, checked_dtype(kName, shape.dtype));
    MK_ASSIGN_OR_RETURN(checked.b_layout, checked_layout(kName, shape.b_layout));
    MK_ASSIGN_OR_RETURN(checked.result.epilogue, checked_epilogue(kName, shape.epilogue));
    if constexpr (requires { shape.partials; }) {
      MK_ASSIGN_OR_RETURN(checked.result.partials, checked_partials(kName, shape.partials));
    }
    return checked;
  }
  static Status check_tuning(const Tuning& tuning, bool on_device) {
    if (!on_device || !tuning.count_nonfinite || !Product::kAddsPartials) return {};
    return fail(ErrorCode::kUnsupported,
                "{} counts partial sums that are not finite (Tuning::count_nonfinite) on CPUs "
                "only; leave that out, or choose Executor::kCpu",
                kName);
  }
  static Result<Plan> cpu_plan(const AttachOptions& options, const Checked& checked,
                               const Tuning& tuning) {
    return Product::make_plan(options, checked, kernel_tiling(tuning));
  }
  static Result<std::unique_ptr<Cpu>> make_cpu(const Plan& plan, const Checked& checked,
                                               const kernels::RankContext& context,
                                               const kernels::CpuOptions& own,
                                               const Tuning& tuning) {
    kernels::GemmCpuOptions options{own};
    options.count_nonfinite = tuning.count_nonfinite;
    options.b_layout = checked.b_layout;
    return Product::make_cpu(plan, checked.shape.k, context, options);
  }
};

template <class Kind>
class __attribute__((visibility("hidden"))) GemmOperator : public Operator<GemmKind<Kind>> {
  using Base = Operator<GemmKind<Kind>>;
  using Base::core;
  using Base::cpu;
  using Base::device;
  using Base::session_;

 public:
  using Base::Base;
  using Base::make;

  Result<LaunchStats> launch(const kernels::GemmMatrices& given, std::uint64_t m,
                             LaunchOptions options) {
    MK_ASSIGN_OR_RETURN(const kernels::GemmMatrices matrices, checked_launch(given, m));
    const auto rows = static_cast<std::uint32_t>(m);
    const kernels::Mode mode = kernel_mode(options.mode);
    return Base::run(
        options, [&](CudaStream stream) { return device()->launch(stream, matrices, rows, mode); },
        [&] { return Kind::launch(cpu(), matrices, rows, mode); });
  }

  Status launch_on(CudaStream stream, const kernels::GemmMatrices& given, std::uint64_t m,
                   LaunchOptions options) {
    return Base::put(options, [&]() -> Status {
      MK_ASSIGN_OR_RETURN(const kernels::GemmMatrices matrices, checked_launch(given, m));
      return device()->launch(stream, matrices, static_cast<std::uint32_t>(m),
                              kernel_mode(options.mode));
    });
  }
  /// Where A may lie that the operator then need not copy, if there is such a place and no other
  /// operator has it, too.
  void* input() const {
    if (!core().claim_all()) return nullptr;
    return device() != nullptr ? device()->input() : cpu().input();
  }
  /// Where the operator itself keeps C, if it does and no other operator does so there.
  const void* output() const {
    if (!core().claim_all()) return nullptr;
    return device() != nullptr ? device()->output() : cpu().output();
  }

 private:
  /// A launch's arguments with their pitches.
  Result<kernels::GemmMatrices> checked_launch(const kernels::GemmMatrices& given,
                                               std::uint64_t m) const {
    MK_RETURN_IF_ERROR(Kind::check(given));
    MK_RETURN_IF_ERROR(check_m(m));
    if (given.c == nullptr && Kind::kKeepsOutput && !core().claim_all()) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} was launched without C, to keep it in its workspace, which other operators "
                  "share; bring C, or create the operator with Tuning::own_workspace",
                  Kind::kName);
    }
    return checked_matrices(Kind::kName, Base::checked(), Kind::rows(session_->options(), m), given,
                            device() != nullptr);
  }

  Status check_m(std::uint64_t m) const {
    const std::uint64_t most = Base::checked().shape.m;
    if (m != 0 && m <= most) return {};
    return fail(ErrorCode::kInvalidArgument, "{} was created for m from 1 to {}; launched with {}",
                Kind::kName, most, m);
  }
};

}  // namespace mk
