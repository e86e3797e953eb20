/// \file
/// Which writes of a link the peer has, where libfabric completes them before that
/// (Domain::completes_early): some writes ask the peer. Its answer stands for all that were sent
/// before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mk::fabric::ofi {

/// Of one link, on its thread. Writes are numbered in the order in which they are sent.
class Acknowledgements {
 public:
  /// An acknowledgement costs the peer a system call, so not each write asks for one.
  static constexpr std::uint32_t kAskEvery = 4;

  /// For `depth` writes at most that are sent and not taken.
  explicit Acknowledgements(std::uint32_t depth) : sent_(depth) {}

  /// Whether the next write is to ask: nobody does, or enough did not.
  bool due() const { return asks_ == 0 || since_ask_ + 1 >= kAskEvery; }
  /// A write has been sent, which the link calls `write`. Its number.
  std::uint64_t sent(std::uint32_t write, bool asks) {
    sent_[tail_ % sent_.size()] = write;
    asks_ += asks ? 1 : 0;
    since_ask_ = asks ? 0 : since_ask_ + 1;
    return tail_++;
  }
  /// Whether writes have been sent and not taken.
  bool outstanding() const { return head_ != tail_; }
  /// Whether some would never be known to have arrived: nobody asks any more.
  bool rest_waits() const { return acknowledged_ < tail_ && asks_ == 0; }
  /// Something that is no write asks for the rest. The first number that it does not stand for.
  std::uint64_t ask_for_rest() {
    ++asks_;
    since_ask_ = 0;
    return tail_;
  }
  /// An answer has come: the peer has all numbers below `end`.
  void acknowledge(std::uint64_t end) {
    --asks_;
    acknowledged_ = std::max(acknowledged_, end);
  }
  /// Calls `take(write)` for each that the peer has, in their order, until it answers false (that
  /// one comes again).
  template <class Take>
  void take_acknowledged(Take&& take) {
    for (; head_ < acknowledged_; ++head_) {
      if (!take(sent_[head_ % sent_.size()])) return;
    }
  }
  /// The link has ended.
  void forget() { head_ = acknowledged_ = tail_; }

 private:
  std::vector<std::uint32_t> sent_;  ///< a ring: numbers head_ .. tail_ - 1
  std::uint64_t head_ = 0;
  std::uint64_t tail_ = 0;
  std::uint64_t acknowledged_ = 0;  ///< numbers below it
  std::uint32_t asks_ = 0;          ///< without an answer
  std::uint32_t since_ask_ = 0;     ///< writes
};

}  // namespace mk::fabric::ofi
