#include "client/src/gpu_session.h"

#include <unistd.h>

#include <type_traits>
#include <utility>

namespace mk {

Result<std::unique_ptr<GpuSession>> GpuSession::create(std::shared_ptr<gpu::Driver> driver,
                                                       const shm::Segment& segment,
                                                       const std::uint32_t* abort_page,
                                                       std::span<const shm::RingProducer> lanes) {
  MK_ASSIGN_OR_RETURN(const int device, driver->current_device());
  MK_ASSIGN_OR_RETURN(auto lane_memory,
                      gpu::Allocation::create(driver, device, lanes.size_bytes()));
  std::unique_ptr<GpuSession> made(new GpuSession(driver, device, std::move(lane_memory)));
  shm::SegmentHeader& header = segment.header();
  MK_ASSIGN_OR_RETURN(made->segment_,
                      gpu::PinnedPages::pin(driver, device, &header, segment.bytes()));
  // Pinning writes nothing; the page is ours.
  auto* const words = const_cast<std::uint32_t*>(abort_page);
  MK_ASSIGN_OR_RETURN(made->abort_page_,
                      gpu::PinnedPages::pin(driver, device, words,
                                            static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))));
  made->flags_ = made->segment_.on_device(segment.flags());
  made->session_abort_ = made->segment_.on_device(&header.abort_flag);
  made->launches_ = made->segment_.on_device(&header.launches);
  if ((header.features & shm::kFeatureProgress) != 0)
    made->progress_ = made->segment_.on_device(&header.progress);
  made->process_abort_ = made->abort_page_.on_device(words);

  static_assert(std::is_trivially_copyable_v<shm::RingProducer>);
  std::vector<shm::RingProducer> producers(lanes.begin(), lanes.end());
  for (shm::RingProducer& producer : producers) {
    producer.ring.slots = made->segment_.on_device(producer.ring.slots);
    producer.ring.control = made->segment_.on_device(producer.ring.control);
  }
  MK_RETURN_IF_ERROR(
      driver->store(device, made->lanes_.data(), producers.data(), lanes.size_bytes()));
  return made;
}

shm::RingProducer* GpuSession::lanes() const {
  return reinterpret_cast<shm::RingProducer*>(lanes_.data());
}

}  // namespace mk
