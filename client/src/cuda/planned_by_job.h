/// \file
/// Operators on GPUs whose plan goes by what all ranks agree on: the planner says whether copy
/// engines bring rows within a node (Tuning::transport). An operator is a type:
///
///     kOp, Device, Operator, Cuda              as in planned_by_shape.h
///     static kernels::Shape extents(const AttachOptions&, const Shape&);
///     static Result<Plan> plan(const AttachOptions&, const Shape&, std::uint32_t chunk_bytes,
///                              std::uint32_t blocks, const kernels::plan::JobPlan&,
///                              const kernels::CudaOptions&);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "client/src/cuda/own_plan.h"

namespace mk {

/// The rank's own, of CudaOptions::dma.
inline Result<std::optional<bool>> transport_of(std::string_view op, const Tuning& tuning) {
  switch (tuning.transport) {
    case Transport::kAuto:
      return std::nullopt;
    case Transport::kEngines:
      return true;
    case Transport::kWarpgroups:
      return false;
  }
  return fail(ErrorCode::kInvalidArgument,
              "{}: there is no transport {}; 0 is chosen, 1 copy engines, 2 warpgroups", op,
              static_cast<int>(tuning.transport));
}

/// As all ranks make it.
template <class Kind, class Shape>
auto plan_by_job(const Session::Impl& session, const Shape& shape, const Tuning& tuning,
                 const DeviceShare& share, const AgreedPlan& agreed)
    -> decltype(Kind::plan(session.options(), shape, 0, 0, *agreed.job, {})) {
  kernels::CudaOptions all;
  all.ranks_per_device = share.most_ranks;
  MK_ASSIGN_OR_RETURN(all.dma, transport_of(Kind::kOp, tuning));
  return Kind::plan(session.options(), shape, tuning.chunk_bytes, share.blocks, *agreed.job, all);
}

/// Not collective.
template <class Kind, class Shape>
Result<std::uint64_t> device_workspace_by_job(Session::Impl& session, const Shape& shape,
                                              const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, expected_share(session));
  MK_ASSIGN_OR_RETURN(
      const AgreedPlan agreed,
      expected_device_plan(session, Kind::extents(session.options(), shape), tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_by_job<Kind>(session, shape, tuning, share, agreed));
  return workspace_bytes_of(plan);
}

/// Collective.
template <class Kind, class Shape>
Result<std::unique_ptr<typename Kind::Device>> make_device_by_job(Session::Impl& session,
                                                                  const Shape& shape,
                                                                  const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed,
                      agree_device_plan(session, Kind::extents(session.options(), shape), tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_by_job<Kind>(session, shape, tuning, share, agreed));
  kernels::CudaOptions options = cuda_options(share, tuning);
  options.job_plan = agreed.job;
  MK_ASSIGN_OR_RETURN(options.dma, transport_of(Kind::kOp, tuning));
  // A caller that names SMs for it wants them to share, unless copy engines are named, too.
  if (tuning.share_sms != 0 && !options.dma) options.dma = false;
  // Ranks whose node has nobody else bring nothing.
  if (!plan.engines && options.dma == true) options.dma.reset();
  return make_planned<Kind>(session, shape, tuning, plan, options);
}

}  // namespace mk
