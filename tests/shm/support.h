/// \file
/// What the tests of shm/ share: seeded values, a private folder, a count of open descriptors.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>

#include "shm/command.h"

namespace mk::shm::test {

/// A command whose every field follows from `number`, so that a reader can tell what it should have
/// read.
inline Command command_of(std::uint64_t number) {
  std::uint64_t state = number;
  const auto next = [&] {  // splitmix64
    state += 0x9e3779b97f4a7c15ull;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  };
  const std::uint64_t a = next();
  const std::uint64_t b = next();
  Command command;
  command.opcode = static_cast<Opcode>(a & 0xff);
  command.peer = static_cast<std::uint16_t>(a >> 8);
  command.src_handle = static_cast<std::uint16_t>(a >> 24);
  command.dst_handle = static_cast<std::uint16_t>(a >> 40);
  command.src_offset = b & kOffsetMask;
  command.dst_offset = (b >> 7) & kOffsetMask;
  command.bytes = static_cast<std::uint32_t>(a >> 13);
  command.flag_index = static_cast<std::uint32_t>(b >> 3);
  command.epoch = static_cast<std::uint32_t>(number);
  command.commit_time_ns = static_cast<std::uint32_t>(a ^ b);
  return command;
}

inline std::chrono::steady_clock::time_point in_seconds(int seconds) {
  return std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
}

inline std::size_t open_fd_count() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

/// Expects that as many descriptors are open at the end of its life as at the beginning.
class NoFdLeak {
 public:
  NoFdLeak() : before_(open_fd_count()) {}
  NoFdLeak(const NoFdLeak&) = delete;
  NoFdLeak& operator=(const NoFdLeak&) = delete;
  ~NoFdLeak() { EXPECT_EQ(open_fd_count(), before_) << "descriptors leaked"; }

 private:
  std::size_t before_;
};

/// A folder of our own, removed with all that is in it.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "mk-shm-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "cannot make " << name;
    path_ = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

}  // namespace mk::shm::test
