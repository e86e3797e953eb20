/// \file
/// What a GPU's DMA engines do beside a kernel: copies on a stream of their own, which begin when
/// the kernel says so. They take none of its SMs, and hold up none of its loads.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/gather/copy_job.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// For each launch, in this order:
///
///     queue.mark(stream);             // behind what the caller has put there
///     ... the kernel, on `stream`, which at any rate sets *go to 1 ...
///     queue.begin(go);
///     queue.copy(...); ...            // one after the other, each when the one before is there
///     queue.join(stream);             // what the caller puts there next comes after them
///
/// All of it may be captured into a graph. Called on the device it was created on, by one thread at
/// a time.
class DmaQueue {
 public:
  explicit DmaQueue(const char* op) : op_(op) {}
  /// Waits for what is queued.
  ~DmaQueue();
  DmaQueue(const DmaQueue&) = delete;
  DmaQueue& operator=(const DmaQueue&) = delete;

  /// kUnsupported: this driver's streams do not wait for words in memory.
  Status create();
  Status mark(cudaStream_t stream);
  /// What follows waits until the word `go`, in the device's memory, is 1, and sets it to 0.
  Status begin(std::uint32_t* go);
  /// Rows to its one target.
  Status copy(const CopyJob& job);
  Status copy(void* to, const void* from, std::size_t bytes);
  Status join(cudaStream_t stream);

 private:
  Status check(cudaError_t error) const;

  const char* const op_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t marked_ = nullptr;
  cudaEvent_t done_ = nullptr;
  decltype(&cuStreamBatchMemOp) memory_operations_ = nullptr;
};

}  // namespace mk::kernels::cuda
