/// \file
/// A launch as profilers see it on the host (Nsight Systems): an NVTX range. Costs a few
/// nanoseconds while none is attached.
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <cstdint>

namespace mk::kernels::cuda {

/// While it lives, this thread puts a launch on a stream. The range is in domain "mkernel", has the
/// operator's name, the launch's rows as its category, and as its payload the caller's tag
/// (LaunchOptions::tag).
class LaunchRange {
 public:
  LaunchRange(const char* op, std::uint32_t rows, std::uint64_t tag) {
    nvtxEventAttributes_t launch{};
    launch.version = NVTX_VERSION;
    launch.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    launch.category = rows;
    launch.messageType = NVTX_MESSAGE_TYPE_ASCII;
    launch.message.ascii = op;
    launch.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    launch.payload.ullValue = tag;
    nvtxDomainRangePushEx(domain(), &launch);
  }
  ~LaunchRange() { nvtxDomainRangePop(domain()); }
  LaunchRange(const LaunchRange&) = delete;
  LaunchRange& operator=(const LaunchRange&) = delete;

 private:
  static nvtxDomainHandle_t domain() {
    static const nvtxDomainHandle_t kOnly = nvtxDomainCreateA("mkernel");
    return kOnly;
  }
};

}  // namespace mk::kernels::cuda
