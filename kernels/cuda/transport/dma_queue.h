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
///     ... the kernel, on `stream`, which at any rate sets *go to 1, and what else is awaited ...
///     queue.begin(go);
///     queue.copy(...); ...            // one after the other, each when the one before is there
///     queue.yield();                  // others have a turn
///     queue.await(pieces, 1);         // and when the kernel has set *pieces to 1, 2, ...
///     queue.copy(...); ...
///     queue.write(ended, 1);
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
  /// What follows waits until `word`, in the device's memory, is `least` at least (below 2^31).
  Status await(std::uint32_t* word, std::uint32_t least);
  /// Sets a word there, when what is queued before is there. (A copy of it within the device would
  /// do, too, but CUDA has not always queued the first of those while a kernel ran.)
  Status write(std::uint32_t* word, std::uint32_t value);
  /// Lets others have the engine that copies to peers, also of other processes: it serves a queue
  /// until that has nothing to do, or for a millisecond. Here this one waits for a word to go to
  /// the host, which another engine brings there, some 14 µs.
  Status yield();
  /// Rows to its one target.
  Status copy(const CopyJob& job);
  Status copy(void* to, const void* from, std::size_t bytes);
  Status join(cudaStream_t stream);
  /// On which all of it is queued.
  cudaStream_t stream() const { return stream_; }

 private:
  Status check(cudaError_t error) const;
  Status order(CUstreamBatchMemOpParams* operations, unsigned count);

  const char* const op_;
  cudaStream_t stream_ = nullptr;
  void* word_ = nullptr;       ///< in the device's memory
  void* host_word_ = nullptr;  ///< where it goes to
  cudaEvent_t marked_ = nullptr;
  cudaEvent_t done_ = nullptr;
  decltype(&cuStreamBatchMemOp) memory_operations_ = nullptr;
};

}  // namespace mk::kernels::cuda
