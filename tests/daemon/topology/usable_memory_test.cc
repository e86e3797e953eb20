// How much memory a process may take, by its control groups as the kernel's documentation has them
// (Documentation/admin-guide/cgroup-v2.rst: memory.max).
#include "daemon/topology/usable_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <string>

#include "tests/daemon/service/temp_folder.h"

namespace mk::topology {
namespace {

class GroupMemory : public testing::Test {
 protected:
  void limit(const std::string& group, const std::string& memory_max) {
    const std::filesystem::path folder = std::filesystem::path(mount_.path()) / group;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "memory.max") << memory_max << '\n';
  }
  std::optional<std::uint64_t> bytes(std::string_view group) const {
    return group_memory_bytes(mount_.path(), group);
  }

  daemon::TempFolder mount_;
};

TEST_F(GroupMemory, IsTheLeastOnTheWayUp) {
  limit("pods", "8589934592");
  limit("pods/mkerneld", "max");
  limit("pods/mkerneld/small", "1073741824");
  EXPECT_EQ(bytes("/pods"), 8589934592u);
  EXPECT_EQ(bytes("/pods/mkerneld"), 8589934592u);
  EXPECT_EQ(bytes("/pods/mkerneld/small"), 1073741824u);
}

TEST_F(GroupMemory, ContainersSeeTheirOwnLimitAtTheMount) {
  limit(".", "2147483648");
  EXPECT_EQ(bytes("/"), 2147483648u);
}

TEST_F(GroupMemory, WithoutALimitOrSenseThereIsNone) {
  EXPECT_EQ(bytes("/nowhere"), std::nullopt);
  for (const char* text : {"max", "", "-1", "12x", "99999999999999999999999"}) {
    limit("odd", text);
    EXPECT_EQ(bytes("/odd"), std::nullopt) << '"' << text << '"';
  }
}

TEST(UsableMemory, IsNoMoreThanTheMachineHas) {
  const auto pages = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES));
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  EXPECT_GT(usable_memory_bytes(), page);
  EXPECT_LE(usable_memory_bytes(), pages * page);
}

}  // namespace
}  // namespace mk::topology
