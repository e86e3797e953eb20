// How much memory there is: by /proc and the control groups, in folders that the test makes.
#include "shm/host/memory_room.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace mk::shm {
namespace {

class MemoryRooms : public testing::Test {
 protected:
  MemoryRooms() {
    char pattern[] = "/tmp/mk-room-XXXXXX";
    folder = ::mkdtemp(pattern);
    write("proc/meminfo",
          "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n");
    write("proc/self/cgroup", "0::/jobs/mine\n");
  }
  ~MemoryRooms() override { std::filesystem::remove_all(folder); }

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = folder + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::optional<MemoryRoom> room() const {
    return memory_room(folder + "/proc", folder + "/groups");
  }

  std::string folder;
};

TEST_F(MemoryRooms, AreTheMachinesWithoutGroups) {
  ASSERT_TRUE(room());
  EXPECT_EQ(room()->total, 1000u * 1024);
  EXPECT_EQ(room()->available, 600u * 1024);
}

TEST_F(MemoryRooms, AreTheTightestGroups) {
  write("groups/jobs/mine/memory.max", "max\n");
  write("groups/jobs/mine/memory.current", "200000\n");
  write("groups/jobs/memory.max", "500000\n");
  write("groups/jobs/memory.current", "300000\n");
  write("groups/jobs/memory.stat", "anon 1\ninactive_file 100000\nactive_file 7\n");
  ASSERT_TRUE(room());
  EXPECT_EQ(room()->total, 500'000u);
  EXPECT_EQ(room()->available, 300'000u) << "pages of files can be given up";
  write("groups/jobs/memory.current", "700000\n");
  write("groups/jobs/memory.stat", "");
  EXPECT_EQ(room()->available, 0u);
}

TEST_F(MemoryRooms, OfAGroupLargerThanTheMachineAreTheMachines) {
  write("groups/jobs/mine/memory.max", "999999999999\n");
  write("groups/jobs/mine/memory.current", "5\n");
  EXPECT_EQ(room()->total, 1000u * 1024);
  EXPECT_EQ(room()->available, 600u * 1024);
}

TEST_F(MemoryRooms, AreUnknownWhereTheSystemDoesNotSay) {
  write("proc/meminfo", "MemTotal:       1000 kB\n");
  EXPECT_FALSE(room());
  write("proc/meminfo", "MemTotal: many kB\nMemAvailable: few kB\n");
  EXPECT_FALSE(room());
}

TEST(MemoryRoom, OfThisMachineIsMoreThanNothing) {
  const auto room = memory_room();
  ASSERT_TRUE(room);
  EXPECT_GT(room->available, 1u << 20);
  EXPECT_GE(room->total, room->available);
}

}  // namespace
}  // namespace mk::shm
