/// \file
/// The collectives (AllGather, ReduceScatter) behind their public classes: checked
/// arguments, the agreed plan, one of two executors with its memory. `Kind` says what is an
/// operator's own:
///
///     static constexpr std::string_view kName;       // in messages: "all-gather"
///     using Op, Plan;                                // the public class; of kernels/
///     static Result<Plan> make_plan(const AttachOptions&, const Op::Shape&,
///                                   const CollectiveShape&, const kernels::Tiling&);
///     static constexpr auto make_cpu, make_cuda;     // kernels::make_all_gather_cpu, ..._cuda
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "client/src/executor_operator.h"
#include "client/src/operator_support.h"
#include "kernels/cpu/collective.h"
#include "mkernel/collective.h"

namespace mk {

class __attribute__((visibility("hidden"))) Collective::Impl {
 public:
  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  virtual ~Impl() = default;

  virtual Result<LaunchStats> launch(const void* input, void* output, std::uint64_t m,
                                     LaunchOptions options) = 0;
  virtual Status launch_on(CudaStream stream, const void* input, void* output, std::uint64_t m,
                           LaunchOptions options) = 0;
  virtual Status status() const = 0;
  virtual Result<LaunchStats> finish(CudaStream stream) = 0;
  virtual void* input() const = 0;
  virtual void set_trace(bool on) = 0;
  virtual std::vector<TraceSpan> trace() const = 0;
};

/// The checked part that every collective's shape has.
struct CollectiveShape {
  std::uint32_t m_max = 0;
  std::uint32_t n = 0;
  kernels::DType dtype = kernels::DType::kBf16;
};
Result<CollectiveShape> checked_collective(std::string_view op, std::uint64_t m_max,
                                           std::uint64_t n, DataType dtype);

/// Rows of a rank's input and output.
struct CollectiveRows {
  std::uint64_t input = 0;
  std::uint64_t output = 0;
};

/// Checks a launch's matrices, `row_bytes` a row: kInvalidArgument, with the numbers, when a matrix
/// is missing or both share memory.
Status check_collective(std::string_view op, const void* input, const void* output,
                        const CollectiveRows& rows, std::uint64_t row_bytes);

/// Their part of an operator (executor_operator.h).
template <class Of>
struct CollectiveKind {
  static constexpr std::string_view kName = Of::kName;
  static constexpr bool kAdapts = false;
  static constexpr bool kAlone = false;
  using Shape = typename Of::Op::Shape;
  using Tuning = mk::Tuning;
  struct Checked {
    Shape given;
    CollectiveShape shape;
  };
  using Plan = typename Of::Plan;
  using Cpu = kernels::CollectiveCpu;
  using Device = DeviceCollective;

  static Result<Checked> checked(const Shape& shape) {
    Checked checked{shape, {}};
    MK_ASSIGN_OR_RETURN(checked.shape,
                        checked_collective(kName, shape.m_max, shape.n, shape.dtype));
    return checked;
  }
  static Status check_tuning(const Tuning&, bool /*on_device*/) { return {}; }
  static Result<Plan> cpu_plan(const AttachOptions& options, const Checked& checked,
                               const Tuning& tuning) {
    return Of::make_plan(options, checked.given, checked.shape, kernel_tiling(tuning));
  }
  static Result<std::unique_ptr<Cpu>> make_cpu(const Plan& plan, const Checked&,
                                               const kernels::RankContext& context,
                                               const kernels::CpuOptions& own, const Tuning&) {
    return Of::make_cpu(plan, context, own);
  }
  static Result<std::unique_ptr<Device>> make_device(Session::Impl& session, const Checked& checked,
                                                     const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const Plan plan, cpu_plan(session.options(), checked, tuning));
    return make_device_collective(
        session,
        {kName, describe_plan(plan), plan.workspace, plan.flag_count(),
         [plan](const kernels::RankContext& context, const kernels::CudaOptions& cuda,
                std::uint64_t data_moved) {
           Plan moved = plan;
           moved.move_data(data_moved);
           return Of::make_cuda(moved, context, cuda);
         }},
        tuning);
  }
  static Result<std::uint64_t> device_bytes(Session::Impl& session, const Checked& checked,
                                            const Tuning& tuning) {
    MK_RETURN_IF_ERROR(expect_device(session));
    MK_ASSIGN_OR_RETURN(const Plan plan, cpu_plan(session.options(), checked, tuning));
    return plan.workspace_bytes;
  }
};

template <class Kind>
class __attribute__((visibility("hidden"))) CollectiveOperator final
    : public Collective::Impl,
      public Operator<CollectiveKind<Kind>> {
  using Base = Operator<CollectiveKind<Kind>>;
  using Base::core;
  using Base::cpu;
  using Base::device;
  using Base::session_;
  using Op = typename Kind::Op;

 public:
  using Base::Base;

  /// Collective.
  static Result<std::unique_ptr<Collective::Impl>> create(Session& session,
                                                          const typename Op::Shape& shape,
                                                          const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(auto made, Base::template make<CollectiveOperator>(session, shape, tuning));
    return std::unique_ptr<Collective::Impl>(std::move(made));
  }

  Result<LaunchStats> launch(const void* input, void* output, std::uint64_t m,
                             LaunchOptions options) override {
    MK_RETURN_IF_ERROR(check(input, output, m));
    const auto rows = static_cast<std::uint32_t>(m);
    const kernels::Mode mode = kernel_mode(options.mode);
    return Base::run(
        options,
        [&](CudaStream stream) { return device()->launch(stream, input, output, rows, mode); },
        [&] { return cpu().launch(input, output, rows, mode); });
  }
  Status launch_on(CudaStream stream, const void* input, void* output, std::uint64_t m,
                   LaunchOptions options) override {
    return Base::put(options, [&]() -> Status {
      MK_RETURN_IF_ERROR(check(input, output, m));
      return device()->launch(stream, input, output, static_cast<std::uint32_t>(m),
                              kernel_mode(options.mode));
    });
  }
  Status status() const override { return Base::status(); }
  Result<LaunchStats> finish(CudaStream stream) override { return Base::finish(stream); }
  void* input() const override {
    if (!core().claim_all()) return nullptr;
    return device() != nullptr ? device()->input() : cpu().input();
  }
  void set_trace(bool on) override { Base::set_trace(on); }
  std::vector<TraceSpan> trace() const override { return Base::trace(); }

 private:
  Status check(const void* input, const void* output, std::uint64_t m) const {
    const typename Op::Shape& shape = Base::checked().given;
    if (m < 1 || m > shape.m_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} was created for m from 1 to {}; launched with {}", Kind::kName, shape.m_max,
                  m);
    }
    const AttachOptions& place = session_->options();
    return check_collective(Kind::kName, input, output,
                            {Op::input_rows(m, place.world, place.rank).count,
                             Op::output_rows(m, place.world, place.rank).count},
                            shape.n * bytes_of(shape.dtype));
  }
};

}  // namespace mk
