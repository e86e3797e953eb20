/// \file
/// What the three products over all ranks (AllGather+GEMM, GEMM+ReduceScatter, GEMM+AllReduce) are
/// behind their public classes: checked arguments, the agreed plan, one of two executors with its
/// memory. `Kind` says what is an operator's own:
///
///     static constexpr std::string_view kName;      // in messages: "gemm-rs"
///     static constexpr bool kAddsPartials;           // of several ranks
///     static constexpr bool kKeepsOutput;            // in its workspace, where C is null
///     using Plan, Cpu;                               // of kernels/
///     static Result<Plan> make_plan(const AttachOptions&, const DeviceShape&,
///                                   const kernels::Tiling&);
///     static std::uint64_t workspace_bytes(const Plan&);
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

template <class Kind>
class __attribute__((visibility("hidden"))) GemmOperator
    : public ExecutorOperator<Kind, typename Kind::Cpu, DeviceGemm> {
  using Base = ExecutorOperator<Kind, typename Kind::Cpu, DeviceGemm>;
  using Base::core;
  using Base::cpu;
  using Base::device;
  using Base::session_;

 public:
  /// Collective. `Shape`: the operator's public one.
  template <class Shape>
  static Result<GemmOperator> create(Session& session, const Shape& shape, const Tuning& tuning) {
    const auto name = Kind::kName;
    MK_ASSIGN_OR_RETURN(const DeviceShape checked, checked_of(shape));
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(name, tuning.executor));
    MK_RETURN_IF_ERROR(check_partition(name, tuning, true));
    if (on_device && tuning.count_nonfinite && Kind::kAddsPartials) {
      return fail(ErrorCode::kUnsupported,
                  "{} counts partial sums that are not finite (Tuning::count_nonfinite) on CPUs "
                  "only; leave that out, or choose Executor::kCpu",
                  name);
    }
    std::optional<typename Kind::Plan> plan;
    kernels::CpuOptions own;
    if (!on_device) {
      MK_ASSIGN_OR_RETURN(plan, cpu_plan(session.options(), checked, tuning));
      MK_ASSIGN_OR_RETURN(own, kernel_options(tuning, *session.impl()));
    }
    GemmOperator made(session.impl(), checked);
    MK_RETURN_IF_ERROR(made.find_or_make_core(
        plan, false,
        [&](const kernels::RankContext& context) {
          kernels::GemmCpuOptions options{own};
          options.count_nonfinite = tuning.count_nonfinite;
          options.b_layout = checked.b_layout;
          return Kind::make_cpu(*plan, checked.shape.k, context, options);
        },
        [&] { return Kind::make_device(*session.impl(), checked, tuning); }, tuning, shape));
    return made;
  }

  /// Not collective.
  template <class Shape>
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const DeviceShape checked, checked_of(shape));
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(Kind::kName, tuning.executor));
    if (on_device) return Kind::device_bytes(*session.impl(), checked, tuning);
    MK_ASSIGN_OR_RETURN(const auto plan, cpu_plan(session.options(), checked, tuning));
    return Kind::workspace_bytes(plan);
  }

  Result<LaunchStats> launch(const kernels::GemmMatrices& given, std::uint64_t m,
                             LaunchOptions options) {
    MK_ASSIGN_OR_RETURN(const kernels::GemmMatrices arguments, checked(given, m));
    if (device() != nullptr) {
      return run_on_device(Kind::kName, *session_, *device(), [&](CudaStream stream) {
        return put_on(stream, arguments, m, options);
      });
    }
    return core().note(run_launch(*session_, [&] {
      cpu().runner().set_tag(options.tag);
      return Kind::launch(cpu(), arguments, static_cast<std::uint32_t>(m),
                          kernel_mode(options.mode));
    }));
  }

  Status launch_on(CudaStream stream, const kernels::GemmMatrices& given, std::uint64_t m,
                   LaunchOptions options) {
    return launch_on_device(Kind::kName, *session_, device(), [&]() -> Status {
      MK_ASSIGN_OR_RETURN(const kernels::GemmMatrices arguments, checked(given, m));
      return put_on(stream, arguments, m, options);
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
  template <class Shape>
  static Result<DeviceShape> checked_of(const Shape& shape) {
    DeviceShape checked;
    MK_ASSIGN_OR_RETURN(checked.shape, checked_shape(Kind::kName, shape.m_max, shape.n, shape.k));
    MK_ASSIGN_OR_RETURN(checked.dtype, checked_dtype(Kind::kName, shape.dtype));
    MK_ASSIGN_OR_RETURN(checked.b_layout, checked_layout(Kind::kName, shape.b_layout));
    MK_ASSIGN_OR_RETURN(checked.result.epilogue, checked_epilogue(Kind::kName, shape.epilogue));
    if constexpr (requires { shape.partials; }) {
      MK_ASSIGN_OR_RETURN(checked.result.partials, checked_partials(Kind::kName, shape.partials));
    }
    return checked;
  }
  static auto cpu_plan(const AttachOptions& options, const DeviceShape& of, const Tuning& tuning) {
    return Kind::make_plan(options, of, kernel_tiling(tuning));
  }

  /// A launch's arguments with their pitches.
  Result<kernels::GemmMatrices> checked(const kernels::GemmMatrices& given, std::uint64_t m) const {
    MK_RETURN_IF_ERROR(Kind::check(given));
    MK_RETURN_IF_ERROR(check_m(m));
    if (given.c == nullptr && Kind::kKeepsOutput && !core().claim_all()) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} was launched without C, to keep it in its workspace, which other operators "
                  "share; bring C, or create the operator with Tuning::own_workspace",
                  Kind::kName);
    }
    return checked_matrices(Kind::kName, shape_, Kind::rows(session_->options(), m), given,
                            device() != nullptr);
  }

  Status check_m(std::uint64_t m) const {
    if (m != 0 && m <= shape_.shape.m) return {};
    return fail(ErrorCode::kInvalidArgument, "{} was created for m from 1 to {}; launched with {}",
                Kind::kName, shape_.shape.m, m);
  }
  Status put_on(CudaStream stream, const kernels::GemmMatrices& arguments, std::uint64_t m,
                LaunchOptions options) {
    device()->set_tag(options.tag);
    return device()->launch(stream, arguments, static_cast<std::uint32_t>(m),
                            kernel_mode(options.mode));
  }

  GemmOperator(std::shared_ptr<Session::Impl> session, const DeviceShape& shape)
      : Base(std::move(session)), shape_(shape) {}

  DeviceShape shape_;
};

}  // namespace mk
