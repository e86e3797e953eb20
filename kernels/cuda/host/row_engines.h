/// \file
/// Copy engines that bring a rank's rows to the node's others beside an operator's launches. Host
/// only.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/cuda/transport/dma_queue.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// Made without: groups bring the rows.
class RowEngines {
 public:
  explicit RowEngines(const char* op) : op_(op) {}

  /// Takes those of the device that is current. `wanted` (CudaOptions::dma): true: kUnsupported
  /// where this driver's cannot be told to wait for a kernel; not set: groups bring the rows then.
  Status create(std::optional<bool> wanted) {
    queue_ = std::make_unique<DmaQueue>(op_);
    const Status created = queue_->create();
    if (created) return {};
    queue_.reset();
    if (wanted != true && created.error().code == ErrorCode::kUnsupported) return {};
    return propagate(created);
  }
  bool used() const { return queue_ != nullptr; }

  /// A launch on the stream by `put_on()`, and beside it what `bring(queue)` queues.
  template <class PutOn, class Bring>
  Status launch(cudaStream_t stream, DeviceState& state, PutOn&& put_on, Bring&& bring) {
    if (!used()) return put_on();
    if (!status_) return status_;
    MK_RETURN_IF_ERROR(queue_->mark(stream));
    MK_RETURN_IF_ERROR(put_on());
    status_ = queue_->begin(&state.dma_go);
    if (status_) status_ = bring(*queue_);
    if (const Status joined = queue_->join(stream); status_) status_ = joined;
    return status_;
  }

 private:
  const char* const op_;
  std::unique_ptr<DmaQueue> queue_;
  Status status_;  ///< an error: copies are missing, and no later launch is any better
};

}  // namespace mk::kernels::cuda
