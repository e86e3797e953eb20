#include "kernels/ops/ring/sm90_trace.h"

#include <algorithm>

namespace mk::kernels::cuda {
namespace {

constexpr std::uint32_t kSpansOfPlace = 4096;  ///< 16 MB in all

}  // namespace

RingTrace::~RingTrace() {
  cudaFree(buffer_.spans);
  cudaFree(buffer_.counts);
}

void RingTrace::set(bool on, std::uint32_t blocks_max, std::uint32_t watchers) {
  on_ = on;
  if (!on || buffer_.spans != nullptr) return;
  blocks_max_ = blocks_ = blocks_max;
  watchers_ = watchers;
  const std::size_t spans = std::size_t{places()} * kSpansOfPlace;
  void* memory = nullptr;
  void* counts = nullptr;
  if (cudaMalloc(&memory, spans * sizeof(TraceSpan)) != cudaSuccess ||
      cudaMalloc(&counts, places() * sizeof(std::uint32_t)) != cudaSuccess) {
    cudaGetLastError();  // clears it
    cudaFree(memory);
    return;
  }
  buffer_ = {static_cast<TraceSpan*>(memory), static_cast<std::uint32_t*>(counts), kSpansOfPlace};
}

cudaError_t RingTrace::begin_launch(cudaStream_t stream, std::uint32_t blocks) {
  blocks_ = blocks;
  if (buffer().spans == nullptr) return cudaSuccess;
  return cudaMemsetAsync(buffer_.counts, 0, places() * sizeof(std::uint32_t), stream);
}

std::vector<TraceEvent> RingTrace::read() const {
  std::vector<TraceEvent> events;
  if (buffer().spans == nullptr) return events;
  std::vector<std::uint32_t> counts(places());
  if (cudaMemcpy(counts.data(), buffer_.counts, counts.size() * sizeof counts[0],
                 cudaMemcpyDeviceToHost) != cudaSuccess)
    return events;
  for (std::uint32_t place = 0; place < places(); ++place) {
    std::vector<TraceSpan> spans(std::min(counts[place], buffer_.capacity));
    const TraceSpan* const from = buffer_.spans + std::size_t{place} * buffer_.capacity;
    if (cudaMemcpy(spans.data(), from, spans.size() * sizeof spans[0], cudaMemcpyDeviceToHost) !=
        cudaSuccess)
      return {};
    const bool computes = place < blocks_;
    for (const TraceSpan& span : spans) {
      events.push_back(
          {computes ? Role::kCompute : Role::kCollect, computes ? place : place - blocks_, span});
    }
  }
  return events;
}

}  // namespace mk::kernels::cuda
