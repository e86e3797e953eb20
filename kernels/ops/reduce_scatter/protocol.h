/// \file
/// ReduceScatter's launch and its roles: those of GEMM+ReduceScatter (ops/gemm_rs/roles.h says what
/// reduce, send and receive do, and what waits for what) whose partials are the caller's rows
/// instead of a product. So an executor's `multiply` copies a tile of them. Compiles for host and
/// device.
///
///     role     does                                   waits for
///     compute  this rank's rows -> slots of owners    their owner's last launch
///     reduce   a node's rows of a tile -> their sum   the tile
///     send     sums -> the rank they are for          the sums
///     receive  all nodes' sums -> the output          arrivals
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/sum_job.h"
#include "kernels/ops/gemm_rs/roles.h"

namespace mk::kernels {

struct ReduceScatterLaunch : GemmRsLaunch {
  DType dtype = DType::kBf16;        ///< of input and output; the partials' may be fp32
  const std::byte* input = nullptr;  ///< the caller's: m rows without gaps
  std::byte* output = nullptr;       ///< the caller's: this rank's rows without gaps
  // Into how many parts an executor cuts each chunk that it sums, so that all its workers have
  // some.
  std::uint32_t reduce_parts = 1;
  std::uint32_t receive_parts = 1;
};

namespace reduce_scatter {

/// The roles count a result's places and strides in elements of two bytes, of which a number in
/// fp32 has two.
MK_HOST_DEVICE inline std::uint64_t result_stride(const ReduceScatterLaunch& launch) {
  return std::uint64_t{launch.plan.max.n} * (bytes_of(launch.dtype) / kElementBytes);
}
MK_HOST_DEVICE inline std::byte* result_at(const ReduceScatterLaunch& launch,
                                           const TileRect& rect) {
  return launch.output +
         (std::uint64_t{rect.row} * launch.plan.max.n + rect.column) * bytes_of(launch.dtype);
}
/// The sum that a role asks for, of the types that it really has.
MK_HOST_DEVICE inline void settle_types(const ReduceScatterLaunch& launch, SumJob& job) {
  if (launch.dtype != DType::kF32 || job.target_type == Partials::kF32) return;
  job.target_type = Partials::kF32;
  job.target_stride /= 2;
}

/// Block `index` of the role; whether it ran to its end. If not, the launch has failed; its first
/// cause is in LocalWords::failure.
template <class Executor>
MK_HOST_DEVICE inline bool run_role(GemmRsBlock<Executor>& block,
                                    const ReduceScatterLaunch& launch) {
  switch (block.role) {
    case Role::kCompute:
      return gemm_rs::compute(block);
    case Role::kReduce:
      return gemm_rs::reduce(block, launch.reduce_parts);
    case Role::kSend:
      return gemm_rs::send(block);
    default:
      return gemm_rs::receive(block, launch.receive_parts);
  }
}

}  // namespace reduce_scatter
}  // namespace mk::kernels
