/// \file
/// The rows of a mirrored rank's neighbours, as their DMA engines would bring them. The engines of
/// the mirror's GPU bring one neighbour's after the other's, from the launch's beginning on. Then
/// they bring what these pass on of another node's, each piece when the rank's own rail has brought
/// as much.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/cuda/transport/dma_queue.h"
#include "kernels/gather/schedule.h"
#include "kernels/gather/sharing.h"
#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/reflections.h"

namespace mk::test {

class MirroredDma {
 public:
  /// Rank 0 has device `here`, its neighbours have `there`, in a gather `schedule` of `rows` rows
  /// each. They bring `bytes` at a time, and pass on by `onward`.
  MirroredDma(int here, int there, const kernels::GatherSchedule& schedule, std::uint32_t rows,
              std::uint32_t bytes, const kernels::gather::PassingOn& onward);
  ~MirroredDma();
  MirroredDma(const MirroredDma&) = delete;
  MirroredDma& operator=(const MirroredDma&) = delete;

  /// Before the rank's launch on `stream`.
  void mark(cudaStream_t stream);
  /// After it: queues what the neighbours bring in launch `epoch`.
  void launch(const MirroredPlaces& places, std::uint32_t epoch);

 private:
  void end_of_waits();
  void show_from_now_on(std::uint32_t epoch);
  void bring(const MirroredPlaces& places, std::uint32_t origin, std::uint32_t chunk,
             std::uint32_t count);

  int here_, there_;
  kernels::GatherSchedule schedule_;
  std::uint32_t rows_, bytes_;
  kernels::gather::PassingOn onward_;
  std::uint32_t* told_ = nullptr;  ///< of the last launch, where engines pass on
  cudaEvent_t begins_ = nullptr;
  kernels::cuda::DmaQueue queue_{"the mirror"};
  std::unique_ptr<DeviceMemory> flags_;  ///< what is shown, of each chunk
};

}  // namespace mk::test
