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

template <class Kind>
class __attribute__((visibility("hidden"))) CollectiveOperator final
    : public Collective::Impl,
      private ExecutorOperator<Kind, kernels::CollectiveCpu, DeviceCollective> {
  using Base = ExecutorOperator<Kind, kernels::CollectiveCpu, DeviceCollective>;
  using Base::core;
  using Base::cpu;
  using Base::device;
  using Base::session_;
  using Op = typename Kind::Op;
  using Shape = typename Op::Shape;

 public:
  /// Collective.
  static Result<std::unique_ptr<Collective::Impl>> create(Session& session, const Shape& shape,
                                                          const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(Kind::kName, tuning.executor));
    MK_RETURN_IF_ERROR(check_partition(Kind::kName, tuning, false));
    const AttachOptions& options = session.options();
    MK_ASSIGN_OR_RETURN(const auto plan, make_plan(options, shape, tuning));
    std::optional<typename Kind::Plan> cpu_plan;  // hears where its data is
    if (!on_device) cpu_plan = plan;
    MK_ASSIGN_OR_RETURN(const kernels::CpuOptions own, kernel_options(tuning, *session.impl()));
    std::unique_ptr<CollectiveOperator> made(new CollectiveOperator(session.impl(), shape));
    MK_RETURN_IF_ERROR(made->find_or_make_core(
        cpu_plan, false,
        [&](const kernels::RankContext& context) {
          return Kind::make_cpu(*cpu_plan, context, own);
        },
        [&] {
          return make_device_collective(
              *session.impl(),
              {Kind::kName, describe_plan(plan), plan.workspace, plan.flag_count(),
               [plan](const kernels::RankContext& context, const kernels::CudaOptions& cuda,
                      std::uint64_t data_moved) {
                 auto moved = plan;
                 moved.move_data(data_moved);
                 return Kind::make_cuda(moved, context, cuda);
               }},
              tuning);
        },
        tuning, shape));
    return std::unique_ptr<Collective::Impl>(std::move(made));
  }
  /// Not collective.
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(Kind::kName, tuning.executor));
    if (on_device) MK_RETURN_IF_ERROR(expect_device(*session.impl()));
    MK_ASSIGN_OR_RETURN(const auto plan, make_plan(session.options(), shape, tuning));
    return plan.workspace_bytes;
  }

  Result<LaunchStats> launch(const void* input, void* output, std::uint64_t m,
                             LaunchOptions options) override {
    MK_RETURN_IF_ERROR(check(input, output, m));
    if (device() != nullptr) {
      return run_on_device(Kind::kName, *session_, *device(), [&](CudaStream stream) {
        device()->set_tag(options.tag);
        return device()->launch(stream, input, output, static_cast<std::uint32_t>(m),
                                kernel_mode(options.mode));
      });
    }
    return core().note(run_launch(*session_, [&] {
      cpu().runner().set_tag(options.tag);
      return cpu().launch(input, output, static_cast<std::uint32_t>(m), kernel_mode(options.mode));
    }));
  }
  Status launch_on(CudaStream stream, const void* input, void* output, std::uint64_t m,
                   LaunchOptions options) override {
    return launch_on_device(Kind::kName, *session_, device(), [&]() -> Status {
      MK_RETURN_IF_ERROR(check(input, output, m));
      device()->set_tag(options.tag);
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
  CollectiveOperator(std::shared_ptr<Session::Impl> session, const Shape& shape)
      : Base(std::move(session)), shape_(shape) {}

  static Result<typename Kind::Plan> make_plan(const AttachOptions& options, const Shape& shape,
                                               const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const CollectiveShape checked,
                        checked_collective(Kind::kName, shape.m_max, shape.n, shape.dtype));
    return Kind::make_plan(options, shape, checked, kernel_tiling(tuning));
  }
  Status check(const void* input, const void* output, std::uint64_t m) const {
    if (m < 1 || m > shape_.m_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} was created for m from 1 to {}; launched with {}", Kind::kName, shape_.m_max,
                  m);
    }
    const AttachOptions& place = session_->options();
    return check_collective(Kind::kName, input, output,
                            {Op::input_rows(m, place.world, place.rank).count,
                             Op::output_rows(m, place.world, place.rank).count},
                            shape_.n * bytes_of(shape_.dtype));
  }

  Shape shape_;
};

}  // namespace mk
