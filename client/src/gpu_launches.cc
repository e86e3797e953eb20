#include "client/src/gpu_launches.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "shm/atomic.h"

namespace mk::client {
namespace {

struct Told {
  std::mutex mutex;
  std::map<const std::uint64_t*, int> devices;  ///< by the session's word
};
Told& told() {
  static Told all;
  return all;
}

}  // namespace

GpuLaunches::GpuLaunches(int device, const std::uint64_t* launches) : launches_(launches) {
  const std::lock_guard lock(told().mutex);
  told().devices.emplace(launches_, device);
}

GpuLaunches::~GpuLaunches() {
  const std::lock_guard lock(told().mutex);
  told().devices.erase(launches_);
}

bool GpuLaunches::under_way(int device) {
  const std::lock_guard lock(told().mutex);
  return std::ranges::any_of(told().devices, [device](const auto& one) {
    return one.second == device && shm::load_relaxed(one.first) % 2 != 0;
  });
}

}  // namespace mk::client
