/// \file
/// What the blocks of a Ring Attention on a GPU note of a launch, and how the host reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "kernels/comm/trace_event.h"
#include "kernels/ops/ring/sm90_arguments.h"

namespace mk::kernels::cuda {

/// Owns the memory. All calls are made with the operator's device current.
class RingTrace {
 public:
  RingTrace() = default;
  ~RingTrace();
  RingTrace(const RingTrace&) = delete;
  RingTrace& operator=(const RingTrace&) = delete;

  /// On: room for the spans of up to so many blocks, and of the groups, the same in each call. It
  /// stays while this lives, as a graph may write there. Where there is no memory for that,
  /// launches stay untraced.
  void set(bool on, std::uint32_t blocks_max, std::uint32_t watchers);
  /// Before a launch of so many blocks, on its stream: nothing is noted yet.
  cudaError_t begin_launch(cudaStream_t stream, std::uint32_t blocks);
  /// For the kernel.
  RingTraceBuffer buffer() const { return on_ ? buffer_ : RingTraceBuffer{}; }
  /// Of the last launch, which has ended. What did not fit is left out.
  std::vector<TraceEvent> read() const;

 private:
  std::uint32_t places() const { return blocks_max_ + watchers_; }

  RingTraceBuffer buffer_;
  bool on_ = false;
  std::uint32_t blocks_max_ = 0;
  std::uint32_t blocks_ = 0;  ///< of the last grid: all may compute; the watchers come behind
  std::uint32_t watchers_ = 0;
};

}  // namespace mk::kernels::cuda
