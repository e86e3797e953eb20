/// \file
/// Operators on GPUs on whose plan all ranks agree by its shape alone: the planner has no say in
/// it. An operator is a type:
///
///     static constexpr const char* kOp;        in messages
///     using Device;                            of device_operator.h
///     using Operator;                          the CudaOperator
///     using Cuda;                              the operator in kernels/
///     static Result<Plan> plan(const AttachOptions&, const Shape&, std::uint32_t chunk_bytes);
#pragma once

#include <cstdint>
#include <memory>

#include "client/src/cuda/own_plan.h"

namespace mk {

/// Not collective.
template <class Kind, class Shape>
Result<std::uint64_t> device_workspace_by_shape(Session::Impl& session, const Shape& shape,
                                                const Tuning& tuning) {
  MK_RETURN_IF_ERROR(expected_share(session));  // a GPU is there
  MK_ASSIGN_OR_RETURN(const auto plan, Kind::plan(session.options(), shape, tuning.chunk_bytes));
  return workspace_bytes_of(plan);
}

/// Collective.
template <class Kind, class Shape>
Result<std::unique_ptr<typename Kind::Device>> make_device_by_shape(Session::Impl& session,
                                                                    const Shape& shape,
                                                                    const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(const auto plan, Kind::plan(session.options(), shape, tuning.chunk_bytes));
  MK_ASSIGN_OR_RETURN(const auto options, own_options(session, share, tuning));
  return make_planned<Kind>(session, shape, tuning, plan, options);
}

}  // namespace mk
