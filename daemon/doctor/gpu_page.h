/// \file
/// Some memory of a GPU, to try what a NIC can do with it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "shm/gpu/driver.h"
#include "shm/host/unique_fd.h"

namespace mk::doctor {

/// Memory of the first GPU, and a dmabuf of it where the driver exports one.
class GpuPage {
 public:
  /// kUnavailable on a machine without a GPU.
  static Result<std::unique_ptr<GpuPage>> make();
  ~GpuPage();
  GpuPage(const GpuPage&) = delete;
  GpuPage& operator=(const GpuPage&) = delete;

  std::string gpu() const { return gpu_; }  ///< its UUID
  std::byte* address() const { return address_; }
  std::uint64_t bytes() const { return kBytes; }
  int dmabuf() const { return dmabuf_.get(); }  ///< -1: see `dmabuf_trouble`
  const std::string& dmabuf_trouble() const { return dmabuf_trouble_; }

 private:
  static constexpr std::uint64_t kBytes = 2
                                          << 20;  // what the driver exports is of whole such pages
  GpuPage() = default;
  void export_dmabuf();

  std::shared_ptr<gpu::Driver> driver_;
  gpu::Stream stream_ = nullptr;
  std::string gpu_;
  std::byte* address_ = nullptr;
  UniqueFd dmabuf_;
  std::string dmabuf_trouble_;
};

}  // namespace mk::doctor
