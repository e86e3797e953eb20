/// \file
/// `Operator<Kind>` is every operator class behind its public face: checked arguments, the agreed
/// plan, and a core on one of two executors, with its memory, that equal operators share. A Kind is
/// an operator's own part:
///
///     static constexpr std::string_view kName;       // in messages: "gemm-rs"
///     static constexpr bool kAdapts;                 // whether Partition::kAdaptive is possible
///     static constexpr bool kAlone;                  // equal operators have cores of their own
///     using Shape, Tuning;                           // of the public class
///     using Checked;                                 // the shape when it has passed
///     using Plan, Cpu;                               // of kernels/
///     using Device;                                  // of device_operator.h
///     static Result<Checked> checked(const Shape&);
///     static Status check_tuning(const Tuning&, bool on_device);
///     static Result<Plan> cpu_plan(const AttachOptions&, const Checked&, const Tuning&);
///     static Result<std::unique_ptr<Cpu>> make_cpu(const Plan&, const Checked&,
///                                                  const kernels::RankContext&,
///                                                  const kernels::CpuOptions&, const Tuning&);
///     static Result<std::unique_ptr<Device>> make_device(Session::Impl&, const Checked&,
///                                                        const Tuning&);
///     static Result<std::uint64_t> device_bytes(Session::Impl&, const Checked&, const Tuning&);
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/src/device_operator.h"
#include "client/src/operator_support.h"
#include "client/src/process_mark.h"
#include "client/src/shared_core.h"
#include "client/src/shared_workspace.h"

namespace mk {

/// The core of an operator on one of two executors. `Device`: of device_operator.h.
template <class Cpu, class Device>
struct ExecutorCore final : OperatorCore {
  std::optional<OperatorWorkspace> memory;  ///< of the CPU executor
  client::AtHome<Cpu> cpu;                  ///< goes first: its blocks use the memory above
  client::AtHome<Device> device;            ///< one of the two

  bool usable() const override {
    return device != nullptr ? device->usable()
                             : !broken_.load(std::memory_order_relaxed) && memory->usable();
  }
  /// No other operator has it from then on, neither the core nor its part of a workspace.
  bool claim_all() {
    return claim() && (device != nullptr ? device->claim_workspace() : memory->claim());
  }
  /// Passes on what a launch on the CPU answered.
  Result<LaunchStats> note(Result<LaunchStats> launched) {
    if (!launched && launched.error().code != ErrorCode::kInvalidArgument)
      broken_.store(true, std::memory_order_relaxed);
    return launched;
  }
  void set_trace(bool on) {
    if (cpu != nullptr) return mk::set_trace(cpu->runner(), on);
    device->set_trace(on);
  }
  std::vector<TraceSpan> trace() const {
    if (cpu != nullptr) return trace_of(cpu->runner());
    std::vector<TraceSpan> spans = spans_of(device->trace());
    add_partition(spans, device->partition_steps());
    return spans;
  }

 private:
  std::atomic<bool> broken_{false};
};

template <class Kind>
class __attribute__((visibility("hidden"))) Operator {
 public:
  using Cpu = typename Kind::Cpu;
  using Device = typename Kind::Device;
  using Tuning = typename Kind::Tuning;
  using Checked = typename Kind::Checked;

  Operator(std::shared_ptr<Session::Impl> session, const Checked& checked)
      : session_(std::move(session)), checked_(checked) {}

  /// Not collective.
  static Result<std::uint64_t> workspace_bytes(const Session& session,
                                               const typename Kind::Shape& shape,
                                               const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const Checked checked, Kind::checked(shape));
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(Kind::kName, tuning.executor));
    MK_RETURN_IF_ERROR(Kind::check_tuning(tuning, on_device));
    if (on_device) return Kind::device_bytes(*session.impl(), checked, tuning);
    MK_ASSIGN_OR_RETURN(const auto plan, Kind::cpu_plan(session.options(), checked, tuning));
    return workspace_bytes_of(plan);
  }

  Status status() const { return device_status(*session_, device()); }
  Result<LaunchStats> finish(CudaStream stream) {
    return finish_on_device(Kind::kName, *session_, device(), stream);
  }
  void set_trace(bool on) { core_->set_trace(on); }
  std::vector<TraceSpan> trace() const { return core_->trace(); }

 protected:
  using Core = ExecutorCore<Cpu, Device>;

  /// Collective: an operator, with the core of an equal one, or a new one. `Made`: derived from
  /// this.
  template <class Made>
  static Result<std::unique_ptr<Made>> make(Session& session, const typename Kind::Shape& shape,
                                            const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const Checked checked, Kind::checked(shape));
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(Kind::kName, tuning.executor));
    MK_RETURN_IF_ERROR(check_partition(Kind::kName, tuning, Kind::kAdapts));
    MK_RETURN_IF_ERROR(Kind::check_tuning(tuning, on_device));
    std::optional<typename Kind::Plan> plan;
    kernels::CpuOptions own;
    if (!on_device) {
      MK_ASSIGN_OR_RETURN(plan, Kind::cpu_plan(session.options(), checked, tuning));
      MK_ASSIGN_OR_RETURN(own, kernel_options(tuning, *session.impl()));
    }
    std::unique_ptr<Made> made(new Made(session.impl(), checked));
    MK_RETURN_IF_ERROR(made->find_or_make_core(plan, own, tuning, shape));
    return made;
  }

  /// A launch to its end: `on_device(stream)` or `on_cpu()`.
  template <class OnDevice, class OnCpu>
  Result<LaunchStats> run(LaunchOptions options, OnDevice&& on_device, OnCpu&& on_cpu) {
    if (device() != nullptr) {
      return run_on_device(Kind::kName, *session_, *device(), [&](CudaStream stream) {
        device()->set_tag(options.tag);
        return on_device(stream);
      });
    }
    return core().note(run_launch(*session_, [&] {
      cpu().runner().set_tag(options.tag);
      return on_cpu();
    }));
  }
  /// A launch put on a stream by `on_device()`.
  template <class OnDevice>
  Status put(LaunchOptions options, OnDevice&& on_device) {
    return launch_on_device(Kind::kName, *session_, device(), [&]() -> Status {
      device()->set_tag(options.tag);
      return on_device();
    });
  }

  Device* device() const { return core_->device.get(); }
  Cpu& cpu() const { return *core_->cpu; }
  Core& core() const { return *core_; }
  const Checked& checked() const { return checked_; }

  std::shared_ptr<Session::Impl>
      session_;  ///< keeps the segment mapped while blocks may look at it

 private:
  Status find_or_make_core(std::optional<typename Kind::Plan>& plan, const kernels::CpuOptions& own,
                           const Tuning& tuning, const typename Kind::Shape& shape) {
    const auto make = [&]() -> Result<std::shared_ptr<Core>> {
      auto core = std::make_shared<Core>();
      if (!plan) {
        MK_ASSIGN_OR_RETURN(core->device, Kind::make_device(*session_, checked_, tuning));
        return core;
      }
      const std::string tag = session_->next_operator_tag("ready");
      MK_RETURN_IF_ERROR(
          session_->agree(tag, Kind::kName, make_cpu_core(*core, *plan, own, tuning)));
      return core;
    };
    const bool alone = Kind::kAlone || tuning.own_workspace;
    MK_ASSIGN_OR_RETURN(
        core_, SharedCores::find_or_make<Core>(*session_, Kind::kName, alone, make, tuning, shape));
    return {};
  }

  Status make_cpu_core(Core& core, typename Kind::Plan& plan, const kernels::CpuOptions& own,
                       const Tuning& tuning) const {
    MK_ASSIGN_OR_RETURN(
        auto memory, OperatorWorkspace::create(
                         *session_, Kind::kName,
                         describe_plan(plan) + (tuning.batch_invariant ? " batch_invariant" : ""),
                         plan.workspace, plan.flag_count(), tuning.own_workspace));
    plan.move_data(memory.data_moved());
    core.memory.emplace(std::move(memory));
    MK_ASSIGN_OR_RETURN(core.cpu,
                        Kind::make_cpu(plan, checked_, core.memory->context(), own, tuning));
    return {};
  }

  const Checked checked_;
  CoreShare<Core> core_;
};

}  // namespace mk
