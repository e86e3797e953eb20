#include "client/src/cuda/own_plan.h"

#include <chrono>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "kernels/cuda/host/planned.h"

namespace mk {

Result<kernels::plan::JobPlan> plan_of_device(Session::Impl& session, const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(GpuSession* const gpu, session.gpu());
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, gpu->device());
      error != cudaSuccess) {
    return fail(ErrorCode::kUnavailable, "GPU {}: {}", gpu->device(), cudaGetErrorString(error));
  }
  const AttachOptions& options = session.options();
  return own_plan(options.nodes, options.local_size,
                  {session.fabric(), session.network_bytes_per_s()}, tuning,
                  kernel_rates(tuning.rates),
                  kernels::cuda::machine_of(
                      properties.name, static_cast<std::uint32_t>(properties.multiProcessorCount)));
}

Result<kernels::CudaOptions> own_options(Session::Impl& session, const DeviceShare& share,
                                         const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(kernels::plan::JobPlan own, plan_of_device(session, tuning));
  kernels::CudaOptions options = cuda_options(share, tuning);
  options.job_plan = std::make_shared<const kernels::plan::JobPlan>(std::move(own));
  return options;
}

Result<AgreedPlan> agree_device_plan(Session::Impl& session, const kernels::Shape& shape,
                                     const Tuning& tuning) {
  // How long a rank without files waits for the others to hear of it.
  constexpr std::chrono::milliseconds kRefusalTimeout{1};
  const AttachOptions& options = session.options();
  PlanExchange ranks;
  ranks.world = options.world;
  ranks.is_first = options.node_rank == 0 && options.local_rank == 0;
  ranks.exchange = [&](std::string_view kind, std::span<const std::byte> blob, bool refuses) {
    return session.exchange(session.next_operator_tag(kind), blob,
                            refuses ? kRefusalTimeout : options.timeout);
  };
  return agree_plan(ranks, session.job_plan_seen(), shape, plan_of_device(session, tuning));
}

Result<AgreedPlan> expected_device_plan(Session::Impl& session, const kernels::Shape& shape,
                                        const Tuning& tuning) {
  return expected_plan(session.job_plan_seen(), shape, plan_of_device(session, tuning));
}

}  // namespace mk
