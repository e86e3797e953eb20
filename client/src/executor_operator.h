/// \file
/// What every operator class is behind its public face: a session, and a core on one of two
/// executors that equal operators share.
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

/// `Kind::kName` is the operator's name in messages.
template <class Kind, class Cpu, class Device>
class __attribute__((visibility("hidden"))) ExecutorOperator {
 public:
  Status status() const { return device_status(*session_, device()); }
  Result<LaunchStats> finish(CudaStream stream) {
    return finish_on_device(Kind::kName, *session_, device(), stream);
  }
  void set_trace(bool on) { core_->set_trace(on); }
  std::vector<TraceSpan> trace() const { return core_->trace(); }

 protected:
  using Core = ExecutorCore<Cpu, Device>;

  explicit ExecutorOperator(std::shared_ptr<Session::Impl> session)
      : session_(std::move(session)) {}

  /// Collective: the core of an equal operator, or a new one. On the CPU `plan` says what memory it
  /// takes, and hears where that is; then `make_cpu(context)` makes it. Without a plan
  /// `make_device()` does. `alone`: equal operators have cores of their own. `parts`: what equal
  /// operators have in common, besides the tuning.
  template <class Plan, class MakeCpu, class MakeDevice, class Tuning, class... Parts>
  Status find_or_make_core(std::optional<Plan>& plan, bool alone, MakeCpu&& make_cpu,
                           MakeDevice&& make_device, const Tuning& tuning, const Parts&... parts) {
    const auto make = [&]() -> Result<std::shared_ptr<Core>> {
      auto core = std::make_shared<Core>();
      if (!plan) {
        MK_ASSIGN_OR_RETURN(core->device, make_device());
        return core;
      }
      MK_ASSIGN_OR_RETURN(
          auto memory,
          OperatorWorkspace::create(
              *session_, Kind::kName,
              describe_plan(*plan) + (tuning.batch_invariant ? " batch_invariant" : ""),
              plan->workspace, plan->flag_count(), tuning.own_workspace));
      plan->move_data(memory.data_moved());
      core->memory.emplace(std::move(memory));
      MK_ASSIGN_OR_RETURN(core->cpu, make_cpu(core->memory->context()));
      return core;
    };
    MK_ASSIGN_OR_RETURN(
        core_, SharedCores::find_or_make<Core>(
                   *session_, Kind::kName, alone || tuning.own_workspace, make, tuning, parts...));
    return {};
  }

  Device* device() const { return core_->device.get(); }
  Cpu& cpu() const { return *core_->cpu; }
  Core& core() const { return *core_; }

  std::shared_ptr<Session::Impl>
      session_;  ///< keeps the segment mapped while blocks may look at it

 private:
  CoreShare<Core> core_;
};

}  // namespace mk
