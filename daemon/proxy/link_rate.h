/// \file
/// What a link has been seen to carry. Bytes over time say little, since a launch computes between
/// its writes. So the best of the last busy periods counts, those with something in flight all the
/// time and long enough that the first write's way is a small part.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mk::daemon {

/// One thread's. Times are of one clock, in ns.
class LinkRate {
 public:
  static constexpr std::uint64_t kLeastBytes = 1 << 20;  ///< of a period that counts
  /// A rate that was not seen again for so many periods, twice that at most, is forgotten.
  static constexpr std::uint32_t kPeriods = 32;

  /// `idle`: nothing was in flight before.
  void posted(std::uint64_t now_ns, std::uint64_t bytes, bool idle) {
    if (idle) {
      begin_ns_ = now_ns;
      bytes_ = 0;
    }
    bytes_ += bytes;
  }
  /// Nothing is in flight any more. Whether the answer has changed.
  bool ended(std::uint64_t now_ns, bool failed) {
    const std::uint64_t bytes = bytes_;
    bytes_ = 0;
    if (failed || bytes < kLeastBytes || now_ns <= begin_ns_) return false;
    const double rate = static_cast<double>(bytes) * 1e9 / static_cast<double>(now_ns - begin_ns_);
    const std::uint64_t before = bytes_per_s();
    newer_ = std::max(newer_, static_cast<std::uint64_t>(rate));
    if (++periods_ == kPeriods) {
      older_ = newer_;
      newer_ = 0;
      periods_ = 0;
    }
    return bytes_per_s() != before;
  }
  /// 0: not seen yet.
  std::uint64_t bytes_per_s() const { return std::max(older_, newer_); }

 private:
  std::uint64_t begin_ns_ = 0;
  std::uint64_t bytes_ = 0;  ///< of this period
  std::uint64_t older_ = 0;  ///< the best of the last kPeriods that are whole
  std::uint64_t newer_ = 0;  ///< the best since
  std::uint32_t periods_ = 0;
};

}  // namespace mk::daemon
