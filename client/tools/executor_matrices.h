/// \file
/// A rank's matrices where its executor wants them: those of the host themselves on CPUs, copies on
/// the rank's GPU else.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "shm/gpu/memory.h"

namespace mk::tools {

class ExecutorMatrices {
 public:
  /// `on_gpu`: on the calling thread's.
  static Result<ExecutorMatrices> create(bool on_gpu) {
    ExecutorMatrices made;
    if (!on_gpu) return made;
    MK_ASSIGN_OR_RETURN(made.driver_, gpu::load_driver());
    MK_ASSIGN_OR_RETURN(made.device_, made.driver_->current_device());
    return made;
  }
  /// Copies a matrix there; `place` numbers the matrices. Returns when it is there. On CPUs `host`
  /// stays where it is until the last use.
  Status put(std::size_t place, std::span<const std::byte> host) {
    if (place >= matrices_.size()) matrices_.resize(place + 1);
    Matrix& matrix = matrices_[place];
    if (driver_ == nullptr) {
      matrix.host = host.empty() ? nullptr : const_cast<std::byte*>(host.data());
      return {};
    }
    if (host.empty()) return {};
    if (!matrix.gpu || matrix.gpu->key().bytes < host.size()) {
      matrix.gpu.reset();
      MK_ASSIGN_OR_RETURN(matrix.gpu, gpu::Allocation::create(driver_, device_, host.size()));
    }
    return driver_->store(device_, matrix.gpu->data(), host.data(), host.size());
  }
  /// Null for a matrix that was never put, or was empty.
  std::byte* at(std::size_t place) const {
    if (place >= matrices_.size()) return nullptr;
    const Matrix& matrix = matrices_[place];
    return matrix.gpu ? matrix.gpu->data() : matrix.host;
  }
  /// What a launch has made of it.
  Status get(std::size_t place, std::span<std::byte> host) const {
    if (driver_ == nullptr || host.empty() || at(place) == nullptr) return {};
    return driver_->fetch(device_, host.data(), at(place), host.size());
  }
  /// What an operator keeps itself, where its executor has it.
  Status get_from(const void* there, std::span<std::byte> host) const {
    if (host.empty()) return {};
    if (driver_ != nullptr) {
      const auto* const from = static_cast<const std::byte*>(there);
      return driver_->fetch(device_, host.data(), from, host.size());
    }
    std::memcpy(host.data(), there, host.size());
    return {};
  }

 private:
  struct Matrix {
    std::byte* host = nullptr;
    std::optional<gpu::Allocation> gpu;
  };
  std::shared_ptr<gpu::Driver> driver_;  ///< null: on CPUs
  int device_ = 0;
  std::vector<Matrix> matrices_;
};

/// The calling thread's GPU becomes number `rank` modulo their number. Holds the driver as long as
/// that is to last.
inline Result<std::shared_ptr<gpu::Driver>> choose_gpu(std::uint32_t rank) {
  MK_ASSIGN_OR_RETURN(auto driver, gpu::load_driver());
  const int devices = driver->devices() > 0 ? driver->devices() : 1;
  MK_RETURN_IF_ERROR(driver->choose_device(static_cast<int>(rank) % devices));
  return driver;
}

}  // namespace mk::tools
