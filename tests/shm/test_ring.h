/// \file
/// A ring in ordinary memory that has already run for any number of commands.
#pragma once

#include <memory>
#include <vector>

#include "shm/ring.h"

namespace mk::shm::test {

class TestRing {
 public:
  /// As if `first` commands had gone through: the slots show the parity that their last command
  /// left.
  explicit TestRing(std::uint32_t slot_count_log2, std::uint64_t first = 0)
      : slots_(std::size_t{1} << slot_count_log2),
        view_{slots_.data(), &control_, slot_count_log2},
        producer{view_, first, first},
        consumer{view_, first, first} {
    const std::uint64_t slot_count = view_.slot_count();
    for (std::uint64_t s = first; s < first + slot_count; ++s) {
      if (s >= slot_count)
        view_.slot(s).words[kCommitWord] = commit_word(s - slot_count, slot_count_log2);
    }
    control_.consumed = control_.completed = control_.produced = first;
  }
  TestRing(const TestRing&) = delete;
  TestRing& operator=(const TestRing&) = delete;

  const RingView& view() const { return view_; }

 private:
  std::vector<CommandSlot> slots_;
  LaneControl control_{};
  RingView view_;

 public:
  RingProducer producer;
  RingConsumer consumer;
};

}  // namespace mk::shm::test
