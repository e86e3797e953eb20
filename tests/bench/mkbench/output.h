/// \file
/// Memory an operator writes results to: poisoned before a launch, with guards that show writes
/// beyond its ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace mk::bench {

class Output {
 public:
  void resize(std::uint64_t bytes) { memory_.resize(bytes + 2 * kGuardBytes); }
  std::uint64_t bytes() const { return memory_.size() - 2 * kGuardBytes; }

  /// All bytes 0xff: a NaN in every floating point type, -1 in every integer.
  void poison() { std::fill(memory_.begin(), memory_.end(), kPoison); }
  /// Whether the guards are still poison.
  bool guards_intact() const {
    const auto poisoned = [](std::byte value) { return value == kPoison; };
    return std::all_of(memory_.begin(), memory_.begin() + kGuardBytes, poisoned) &&
           std::all_of(memory_.end() - kGuardBytes, memory_.end(), poisoned);
  }

  /// With the guards; `guard_bytes` lie before the contents.
  std::span<std::byte> whole() { return memory_; }
  static constexpr std::size_t guard_bytes() { return kGuardBytes; }
  std::span<std::byte> contents() { return {memory_.data() + kGuardBytes, bytes()}; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(memory_.data() + kGuardBytes);
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(memory_.data() + kGuardBytes);
  }

 private:
  static constexpr std::byte kPoison{0xff};
  static constexpr std::ptrdiff_t kGuardBytes = 64;
  std::vector<std::byte> memory_ = std::vector<std::byte>(2 * kGuardBytes);
};

}  // namespace mk::bench
