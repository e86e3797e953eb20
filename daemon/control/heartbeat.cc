#include "daemon/control/heartbeat.h"

#include <algorithm>
#include <utility>

#include "shm/atomic.h"

namespace mk::daemon::control {

HeartbeatTable::Entry::Entry(Entry&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)), word_(other.word_) {}

HeartbeatTable::Entry& HeartbeatTable::Entry::operator=(Entry&& other) noexcept {
  std::swap(table_, other.table_);
  std::swap(word_, other.word_);
  return *this;
}

HeartbeatTable::Entry::~Entry() {
  if (table_ == nullptr) return;
  std::lock_guard lock(table_->mutex_);
  table_->words_.erase(word_);
}

HeartbeatTable::Entry HeartbeatTable::add(std::uint64_t* word, std::uint64_t now_ns) {
  std::lock_guard lock(mutex_);
  words_.insert(word);
  shm::store_relaxed(word, now_ns);
  return {*this, word};
}

void HeartbeatTable::turn(std::uint64_t now_ns) {
  std::lock_guard lock(mutex_);
  last_turn_ns_ = std::max(last_turn_ns_, now_ns);
}

void HeartbeatTable::beat(std::uint64_t now_ns) {
  std::lock_guard lock(mutex_);
  if (now_ns > last_turn_ns_ + kHungAfterNs) return;
  for (std::uint64_t* word : words_) shm::store_relaxed(word, now_ns);
}

}  // namespace mk::daemon::control
