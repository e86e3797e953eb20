#include "client/src/gpu_launches.h"

#include <algorithm>
#include <set>

#include "shm/atomic.h"

namespace mk::client {
namespace {

struct Told {
  std::shared_mutex beginning;
  std::mutex mutex;
  std::set<const std::uint64_t*> sessions;
  bool (*others)() = nullptr;
};
Told& told() {
  static Told all;
  return all;
}

}  // namespace

GpuLaunches::GpuLaunches(const std::uint64_t* launches) : launches_(launches) {
  const std::lock_guard lock(told().mutex);
  told().sessions.insert(launches_);
}

GpuLaunches::~GpuLaunches() {
  const std::lock_guard lock(told().mutex);
  told().sessions.erase(launches_);
}

std::shared_lock<std::shared_mutex> GpuLaunches::begin() {
  return std::shared_lock(told().beginning);
}

std::unique_lock<std::shared_mutex> GpuLaunches::hold_back() {
  return std::unique_lock(told().beginning);
}

bool GpuLaunches::under_way() {
  const std::lock_guard lock(told().mutex);
  return std::ranges::any_of(told().sessions,
                             [](const auto* word) { return shm::load_relaxed(word) % 2 != 0; }) ||
         (told().others != nullptr && told().others());
}

void GpuLaunches::ask_also(bool (*any)()) {
  const std::lock_guard lock(told().mutex);
  told().others = any;
}

}  // namespace mk::client
