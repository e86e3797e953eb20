#include "tests/gpu/mirrored_dma.h"

#include <algorithm>

#include "kernels/cuda/host/on_device.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/mirror.h"

namespace mk::test {

using kernels::ByteRange;
using kernels::cuda::OnDevice;

MirroredDma::MirroredDma(int here, int there, const kernels::GatherSchedule& schedule,
                         std::uint32_t rows, std::uint32_t bytes,
                         const kernels::gather::PassingOn& onward)
    : here_(here), there_(there), schedule_(schedule), rows_(rows), bytes_(bytes), onward_(onward) {
  {
    const OnDevice on_device(here_);
    require(cudaEventCreateWithFlags(&begins_, cudaEventDisableTiming), "event");
  }
  const OnDevice on_device(there_);
  demand(queue_.create().has_value(), "a driver whose streams wait for words");
  flags_ = std::make_unique<DeviceMemory>(schedule_.chunks(rows_) * sizeof(std::uint32_t), there_);
  // A kernel is loaded with its first launch, and that waits for all that run: the mirror's would
  // wait for the rank, and the rank for these rows.
  show_from_now_on(0);
  require(cudaStreamSynchronize(queue_.stream()), "words");
}

MirroredDma::~MirroredDma() {
  const OnDevice on_device(there_);
  end_of_waits();
  cudaStreamSynchronize(queue_.stream());
  cudaEventDestroy(begins_);
}

/// A rank whose launch failed has not sent what pieces wait for.
void MirroredDma::end_of_waits() {
  if (told_ == nullptr || cudaStreamQuery(queue_.stream()) == cudaSuccess) return;
  constexpr std::uint32_t kMany = 1 << 30;
  cudaStream_t beside = nullptr;
  require(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "stream");
  fill_words(told_, schedule_.chunks(rows_), kMany, beside);
  cudaStreamSynchronize(beside);
  cudaStreamDestroy(beside);
}

void MirroredDma::mark(cudaStream_t stream) {
  const OnDevice on_device(here_);
  require(cudaEventRecord(begins_, stream), "event");
}

void MirroredDma::launch(const MirroredPlaces& places, std::uint32_t epoch) {
  const OnDevice on_device(there_);
  require(cudaStreamWaitEvent(queue_.stream(), begins_, 0), "event");
  show_from_now_on(epoch);
  const std::uint32_t chunks = schedule_.chunks(rows_);
  const std::uint32_t at_once = std::max(1u, bytes_ / schedule_.geometry().chunk_bytes);
  const std::uint32_t locals = schedule_.world().locals;
  for (std::uint32_t origin = 1; origin < locals; ++origin) bring(places, origin, 0, 1);
  for (std::uint32_t origin = 1; origin < locals; ++origin) {
    for (std::uint32_t chunk = 1; chunk < chunks; chunk += at_once) {
      bring(places, origin, chunk, std::min(at_once, chunks - chunk));
      if (schedule_.world().nodes > 1) demand(queue_.yield().has_value(), "a turn for others");
    }
  }
  if (onward_.dma_chunks == 0) return;
  told_ = places.told;
  for (std::uint32_t chunk = 1; chunk < chunks; chunk += onward_.dma_chunks) {
    const std::uint32_t count = std::min(onward_.dma_chunks, chunks - chunk);
    demand(queue_.await(places.told + chunk + count - 1, epoch).has_value(), "words to wait for");
    for (std::uint32_t rail = 1; rail < locals; ++rail) bring(places, locals + rail, chunk, count);
  }
}

void MirroredDma::show_from_now_on(std::uint32_t epoch) {
  fill_words(static_cast<std::uint32_t*>(flags_->data()), schedule_.chunks(rows_), epoch,
             queue_.stream());
}

/// `count` chunks from `chunk` on, the header by itself.
void MirroredDma::bring(const MirroredPlaces& places, std::uint32_t origin, std::uint32_t chunk,
                        std::uint32_t count) {
  const ByteRange range = schedule_.chunks_range(rows_, chunk, count);
  const std::byte* const from =
      chunk == 0 ? places.header : places.rows[origin] + range.begin - kernels::kGatherHeaderBytes;
  std::byte* const to = places.workspaces[0];
  require(cudaMemcpyAsync(to + schedule_.slot(0, origin) + range.begin, from, range.bytes,
                          cudaMemcpyDeviceToDevice, queue_.stream()),
          "rows");
  require(cudaMemcpyAsync(to + schedule_.ready(origin, chunk),
                          static_cast<const std::uint32_t*>(flags_->data()) + chunk,
                          count * sizeof(std::uint32_t), cudaMemcpyDeviceToDevice, queue_.stream()),
          "flags");
}

}  // namespace mk::test
