#include <cstring>

#include "client/src/cuda/cuda_operator.h"

namespace mk {
namespace {

/// What each rank says of itself.
struct Placement {
  gpu::DeviceUuid device;
  gpu::ProcessId process;
  std::uint32_t multiprocessors = 0;
  std::uint32_t reserved = 0;
};

Result<std::uint32_t> multiprocessors_of(int device) {
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) {
    return fail(ErrorCode::kUnavailable, "GPU {}: {}", device, cudaGetErrorString(error));
  }
  return static_cast<std::uint32_t>(count);
}

}  // namespace

Result<DeviceShare> share_device(Session::Impl& session) {
  MK_ASSIGN_OR_RETURN(GpuSession* const gpu, session.gpu());
  Placement own;
  own.process = gpu::this_process();
  MK_ASSIGN_OR_RETURN(own.device, gpu->driver()->uuid_of(gpu->device()));
  MK_ASSIGN_OR_RETURN(own.multiprocessors, multiprocessors_of(gpu->device()));
  MK_ASSIGN_OR_RETURN(const auto blobs, session.exchange(session.next_operator_tag("gpu"),
                                                         std::as_bytes(std::span(&own, 1)),
                                                         session.options().timeout));
  std::vector<Placement> all(blobs.size());
  for (std::size_t rank = 0; rank < blobs.size(); ++rank) {
    if (blobs[rank].size() != sizeof(Placement))
      return fail(ErrorCode::kProtocol, "rank {} described its GPU in {} bytes", rank,
                  blobs[rank].size());
    std::memcpy(&all[rank], blobs[rank].data(), sizeof(Placement));
  }
  const auto sharing = [&](const Placement& one) {
    return static_cast<std::uint32_t>(std::ranges::count_if(all, [&](const Placement& other) {
      return other.device == one.device && other.process == one.process;
    }));
  };
  DeviceShare share;
  share.launches = gpu->launches();
  share.progress = gpu->progress();
  share.lanes = session.options().lanes;
  share.ranks_per_device = sharing(own);
  share.blocks = ~0u;
  for (const Placement& one : all) {
    share.blocks = std::min(share.blocks, one.multiprocessors / sharing(one));
    share.most_ranks = std::max(share.most_ranks, sharing(one));
  }
  gpu->agreed_blocks = share.blocks;
  gpu->agreed_most_ranks = share.most_ranks;
  return share;
}

Result<DeviceShare> expected_share(Session::Impl& session) {
  MK_ASSIGN_OR_RETURN(GpuSession* const gpu, session.gpu());
  DeviceShare share;
  share.blocks = gpu->agreed_blocks;
  share.most_ranks = gpu->agreed_most_ranks;
  if (share.blocks == 0) {
    MK_ASSIGN_OR_RETURN(share.blocks, multiprocessors_of(gpu->device()));
  }
  return share;
}

}  // namespace mk
