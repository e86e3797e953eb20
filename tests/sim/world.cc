#include "tests/sim/world.h"

#include <fmt/format.h>

#include <algorithm>

namespace mk::sim {

namespace {

constexpr std::size_t kTraceLinesMax = 4000;

}  // namespace

void World::at(std::uint64_t time_ns, std::function<void()> event) {
  heap_.push_back({std::max(time_ns, now_), next_number_++, std::move(event)});
  std::push_heap(heap_.begin(), heap_.end(), later);
}

bool World::step() {
  if (heap_.empty()) return false;
  std::pop_heap(heap_.begin(), heap_.end(), later);
  const Event event = std::move(heap_.back());
  heap_.pop_back();
  now_ = event.time_ns;
  ++steps_;
  event.run();
  return true;
}

void World::violate(std::string what) {
  record("VIOLATION " + what);
  if (!violation_) violation_ = std::move(what);
}

void World::record(std::string line) {
  if (events_.size() == kTraceLinesMax) events_.pop_front();
  events_.push_back(
      fmt::format("{:14.6f} ms  {}", static_cast<double>(now_ - 1'000 * kSecond) * 1e-6, line));
}

}  // namespace mk::sim
