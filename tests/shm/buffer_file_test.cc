// Payload memory: sealed, checked before it is mapped.
#include "shm/host/buffer_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

#include "shm/limits.h"
#include "support.h"

namespace mk::shm {
namespace {

UniqueFd memory(std::uint64_t bytes, int seals) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

void expect_refused(UniqueFd fd, std::uint64_t bytes, ErrorCode code, const std::string& says) {
  const auto result = BufferFile::map(std::move(fd), bytes);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, code);
  EXPECT_NE(result.error().message.find(says), std::string::npos) << result.error().message;
}

TEST(BufferFile, IsRoundedToPagesZeroedAndShared) {
  const test::NoFdLeak no_leak;
  auto made = BufferFile::create("payload", 5000);
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->bytes(), 8192u);
  for (std::size_t i = 0; i < made->bytes(); ++i) ASSERT_EQ(made->data()[i], std::byte{0});
  auto mapped = BufferFile::map(UniqueFd(::dup(made->fd())), 8192);
  ASSERT_TRUE(mapped) << mapped.error().message;
  EXPECT_NE(mapped->data(), made->data());
  mapped->data()[8191] = std::byte{7};
  EXPECT_EQ(made->data()[8191], std::byte{7});
}

TEST(BufferFile, SurvivesAMove) {
  auto made = BufferFile::create("payload", 4096);
  ASSERT_TRUE(made);
  std::byte* data = made->data();
  BufferFile moved = std::move(*made);
  EXPECT_EQ(moved.data(), data);
  EXPECT_GE(moved.fd(), 0);
  moved.data()[0] = std::byte{1};
}

TEST(BufferFile, CannotShrinkOrGrow) {
  auto made = BufferFile::create("payload", 8192);
  ASSERT_TRUE(made);
  EXPECT_EQ(::ftruncate(made->fd(), 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(made->fd(), 16384), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(::fcntl(made->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(BufferFile, SizesOutOfRangeAreRefused) {
  const test::NoFdLeak no_leak;
  for (const std::uint64_t bytes : {std::uint64_t{0}, kBufferBytesMax + 1, ~std::uint64_t{0}}) {
    const auto made = BufferFile::create("payload", bytes);
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, ErrorCode::kInvalidArgument);
    expect_refused(memory(4096, F_SEAL_SHRINK), bytes, ErrorCode::kInvalidArgument,
                   "buffer has 1 to");
  }
  // In range, but more than an address space holds: an error, not an exception.
  const auto huge = BufferFile::create("payload", kBufferBytesMax);
  ASSERT_FALSE(huge);
  EXPECT_EQ(huge.error().code, ErrorCode::kSystem);
}

TEST(BufferFile, ALongNameIsCut) { EXPECT_TRUE(BufferFile::create(std::string(5000, 'n'), 1)); }

TEST(BufferFile, MapRefusesWhatCouldShrink) {
  const test::NoFdLeak no_leak;
  expect_refused(memory(8192, 0), 8192, ErrorCode::kInvalidArgument, "F_SEAL_SHRINK missing");
  expect_refused(memory(8192, F_SEAL_GROW), 8192, ErrorCode::kInvalidArgument,
                 "F_SEAL_SHRINK missing");
  EXPECT_TRUE(BufferFile::map(memory(8192, F_SEAL_SHRINK), 8192));
}

TEST(BufferFile, MapRefusesWhatIsSmaller) {
  const test::NoFdLeak no_leak;
  expect_refused(memory(8191, F_SEAL_SHRINK), 8192, ErrorCode::kInvalidArgument,
                 "8191 bytes where 8192");
  expect_refused(memory(0, F_SEAL_SHRINK), 1, ErrorCode::kInvalidArgument, "0 bytes where 1");
  auto part = BufferFile::map(memory(8192, F_SEAL_SHRINK), 5000);
  ASSERT_TRUE(part);
  EXPECT_EQ(part->bytes(), 5000u);
}

TEST(BufferFile, MapRefusesWhatIsNoMemory) {
  const test::NoFdLeak no_leak;
  expect_refused(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)), 4096,
                 ErrorCode::kInvalidArgument, "memfd");
  expect_refused(UniqueFd(), 4096, ErrorCode::kInvalidArgument, "memfd");
  int pipe_fds[2];
  ASSERT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
  const UniqueFd other(pipe_fds[1]);
  expect_refused(UniqueFd(pipe_fds[0]), 4096, ErrorCode::kInvalidArgument, "memfd");
}

TEST(BufferFile, MapRefusesHugePages) {
  const test::NoFdLeak no_leak;
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB));
  if (!fd.valid()) GTEST_SKIP() << "this kernel makes no hugetlb memfd: " << errno_text(errno);
  ASSERT_EQ(::ftruncate(fd.get(), off_t{1} << 30), 0);  // whole pages, of whatever size; no memory
  ASSERT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  expect_refused(std::move(fd), 4096, ErrorCode::kUnsupported, "huge pages");
}

TEST(BufferFile, MapsWhatHasHolesPunchedIntoItLater) {
  UniqueFd fd = memory(8192, F_SEAL_SHRINK);
  const UniqueFd peer(::dup(fd.get()));
  const auto mapped = BufferFile::map(std::move(fd), 8192);
  ASSERT_TRUE(mapped) << mapped.error().message;
  mapped->data()[4096] = std::byte{1};
  ASSERT_EQ(::fallocate(peer.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096), 0);
  EXPECT_EQ(mapped->data()[4096], std::byte{0});
  mapped->data()[4096] = std::byte{2};
  EXPECT_EQ(mapped->data()[4096], std::byte{2});
}

TEST(BufferFile, MapRefusesWhatCannotBeWritten) {
  const test::NoFdLeak no_leak;
  expect_refused(memory(4096, F_SEAL_SHRINK | F_SEAL_WRITE), 4096, ErrorCode::kSystem,
                 "cannot map");
  const UniqueFd writable = memory(4096, F_SEAL_SHRINK);
  const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
  expect_refused(UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), 4096, ErrorCode::kSystem,
                 "cannot map");
}

/// The kernel's flags of the mapping at `address` (proc(5), smaps).
std::string flags_of_mapping(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const std::string begins = fmt::format("{:x}-", reinterpret_cast<std::uintptr_t>(address));
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    found = found || line.starts_with(begins);
    if (found && line.starts_with("VmFlags:")) return line + ' ';
  }
  return "(no such mapping)";
}

TEST(BufferFile, WhatOthersShareIsLeftOutOfCoreDumps) {
  const auto mapped = BufferFile::map(memory(8192, F_SEAL_SHRINK), 8192);
  ASSERT_TRUE(mapped) << mapped.error().message;
  EXPECT_NE(flags_of_mapping(mapped->data()).find(" dd "), std::string::npos)
      << flags_of_mapping(mapped->data());
}

}  // namespace
}  // namespace mk::shm
