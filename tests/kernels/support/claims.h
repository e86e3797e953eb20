/// \file
/// Byte ranges that must not overlap.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>

namespace mk::kernels::testing {

/// Claims byte ranges; the test fails on an overlap.
class Claims {
 public:
  void claim(std::uint64_t begin, std::uint64_t bytes, const std::string& what) {
    if (bytes == 0) return;
    const auto after = ranges_.lower_bound(begin);
    if (after != ranges_.end()) {
      EXPECT_LE(begin + bytes, after->first) << what << " runs into " << after->second.what;
    }
    if (after != ranges_.begin()) {
      const auto before = std::prev(after);
      EXPECT_LE(before->first + before->second.bytes, begin)
          << before->second.what << " runs into " << what;
    }
    ranges_[begin] = {bytes, what};
    end_ = std::max(end_, begin + bytes);
  }
  std::uint64_t end() const { return end_; }

 private:
  struct Range {
    std::uint64_t bytes = 0;
    std::string what;
  };
  std::map<std::uint64_t, Range> ranges_;
  std::uint64_t end_ = 0;
};

}  // namespace mk::kernels::testing
