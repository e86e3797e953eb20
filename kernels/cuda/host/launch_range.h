/// \file
/// A launch as profilers see it on the host (Nsight Systems): an NVTX range. Costs a few
/// nanoseconds while none is attached.
#pragma once

#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdint>
#include <string>

#include "kernels/cuda/skeleton/launch_state.h"
#include "shm/host/progress_sizes.h"

namespace mk::kernels::cuda {

/// "gemm_ar m=4096 n=14336 k=8192", made when a launch's shape differs from the last one's.
class LaunchName {
 public:
  const char* of(const LaunchTold& told) {
    const auto sizes = std::to_array(told.sizes);
    if (!text_.empty() && m_ == told.m && sizes_ == sizes) return text_.c_str();
    m_ = told.m;
    sizes_ = sizes;
    const std::string_view op = shm::kProgressOperators[told.op];
    text_ = fmt::format("{} m={}", op, m_);
    shm::for_each_size(op, sizes_, [this](std::string_view name, std::uint32_t size) {
      text_ += fmt::format(" {}={}", name, size);
    });
    return text_.c_str();
  }

 private:
  std::string text_;
  std::uint32_t m_ = 0;
  shm::ProgressSizes sizes_{};
};

/// While it lives, this thread puts a launch on a stream. The range is in domain "mkernel" and has
/// the launch's name, its rows as its category, and as its payload the caller's tag
/// (LaunchOptions::tag).
class LaunchRange {
 public:
  LaunchRange(const char* name, std::uint32_t rows, std::uint64_t tag) {
    nvtxEventAttributes_t launch{};
    launch.version = NVTX_VERSION;
    launch.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    launch.category = rows;
    launch.messageType = NVTX_MESSAGE_TYPE_ASCII;
    launch.message.ascii = name;
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
