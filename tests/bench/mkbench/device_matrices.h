/// \file
/// A rank's matrices on its GPU, copied there before a launch and back after it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "shm/gpu/memory.h"

namespace mk::bench {

class DeviceMatrices {
 public:
  /// On the calling thread's GPU.
  static Result<DeviceMatrices> create() {
    MK_ASSIGN_OR_RETURN(auto driver, gpu::load_driver());
    MK_ASSIGN_OR_RETURN(const int device, driver->current_device());
    return DeviceMatrices(std::move(driver), device);
  }
  /// Copies a matrix there; `place` numbers the matrices. Returns when it is there.
  Status put(std::size_t place, std::span<const std::byte> host) {
    if (place >= memory_.size()) memory_.resize(place + 1);
    auto& memory = memory_[place];
    if (host.empty()) return {};
    if (!memory || memory->key().bytes < host.size()) {
      memory.reset();
      MK_ASSIGN_OR_RETURN(memory, gpu::Allocation::create(driver_, device_, host.size()));
    }
    return driver_->store(device_, memory->data(), host.data(), host.size());
  }
  /// Null for a matrix that was never put, or was empty.
  std::byte* at(std::size_t place) const {
    return place < memory_.size() && memory_[place] ? memory_[place]->data() : nullptr;
  }
  Status get(std::size_t place, std::span<std::byte> host) const {
    if (host.empty() || at(place) == nullptr) return {};
    return driver_->fetch(device_, host.data(), at(place), host.size());
  }

 private:
  DeviceMatrices(std::shared_ptr<gpu::Driver> driver, int device)
      : driver_(std::move(driver)), device_(device) {}

  std::shared_ptr<gpu::Driver> driver_;
  int device_ = 0;
  std::vector<std::optional<gpu::Allocation>> memory_;
};

}  // namespace mk::bench
