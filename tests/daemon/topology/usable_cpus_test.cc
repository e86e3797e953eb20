// How many CPUs a process may keep busy, by its control groups as the kernel's documentation has
// them (Documentation/admin-guide/cgroup-v2.rst: cpu.max).
#include "daemon/topology/usable_cpus.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <string>

#include "tests/daemon/service/temp_folder.h"

namespace mk::topology {
namespace {

constexpr std::nullopt_t kNoLimit = std::nullopt;

TEST(QuotaCpus, AreTheQuotaInWholePeriods) {
  EXPECT_EQ(quota_cpus("100000 100000"), 1u);
  EXPECT_EQ(quota_cpus("400000 100000"), 4u);
  EXPECT_EQ(quota_cpus("399999 100000"), 3u) << "the fourth would be stopped in each period";
  EXPECT_EQ(quota_cpus("50000 100000"), 1u) << "less than one CPU is still one thread's";
  EXPECT_EQ(quota_cpus("80000 10000"), 8u);
}

TEST(QuotaCpus, WithoutALimitOrSenseThereIsNone) {
  for (const char* text : {"max 100000", "max", "", "4", "4 ", "4 0", "4 x", "x 4", "-4 1", "4 1 ",
                           "4 1x", "99999999999999999999 1"})
    EXPECT_EQ(quota_cpus(text), kNoLimit) << '"' << text << '"';
}

class GroupCpus : public testing::Test {
 protected:
  void limit(const std::string& group, const std::string& cpu_max) {
    const std::filesystem::path folder = std::filesystem::path(mount_.path()) / group;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "cpu.max") << cpu_max << '\n';
  }
  std::optional<std::uint32_t> cpus(std::string_view group) const {
    return group_cpus(mount_.path(), group);
  }

  daemon::TempFolder mount_;
};

TEST_F(GroupCpus, AreTheLeastOnTheWayUp) {
  limit("system.slice", "800000 100000");
  limit("system.slice/mkerneld.service", "max 100000");
  limit("system.slice/mkerneld.service/small", "300000 100000");
  limit("other", "100000 100000");
  EXPECT_EQ(cpus("/system.slice/mkerneld.service"), 8u);
  EXPECT_EQ(cpus("/system.slice/mkerneld.service/small"), 3u);
  EXPECT_EQ(cpus("/system.slice"), 8u);
}

TEST_F(GroupCpus, ContainersSeeTheirOwnLimitAtTheMount) {
  limit(".", "600000 100000");
  EXPECT_EQ(cpus("/"), 6u);
  EXPECT_EQ(cpus(""), 6u);
  EXPECT_EQ(cpus("/a/group/that/is/not/there"), 6u);
}

TEST_F(GroupCpus, WithoutGroupsThereIsNoLimit) {
  EXPECT_EQ(cpus("/"), kNoLimit);
  EXPECT_EQ(cpus("/user.slice/session.scope"), kNoLimit);
}

TEST(UsableCpus, AreThoseOfTheAffinityAtMostAndOneAtLeast) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  const std::uint32_t now = usable_cpus().value_or(0);
  EXPECT_GE(now, 1u);
  EXPECT_LE(now, static_cast<std::uint32_t>(CPU_COUNT(&before)));
  std::size_t cpu = 0;
  while (!CPU_ISSET(cpu, &before)) ++cpu;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(usable_cpus(), 1u);
  EXPECT_EQ(usable_cpus(::getpid()), 1u);
  ASSERT_EQ(::sched_setaffinity(0, sizeof before, &before), 0);
}

TEST(UsableCpus, OfNoProcessAreUnknown) { EXPECT_EQ(usable_cpus(1 << 30), kNoLimit); }

TEST(CpuList, IsAsLinuxWritesIt) {
  EXPECT_EQ(cpu_list({}), "");
  EXPECT_EQ(cpu_list({3}), "3");
  EXPECT_EQ(cpu_list({0, 1, 2, 5, 7, 8}), "0-2,5,7-8");
  std::vector<std::uint32_t> even;
  for (std::uint32_t cpu = 0; cpu < 512; cpu += 2) even.push_back(cpu);
  EXPECT_TRUE(cpu_list(even).ends_with(",..."));
  EXPECT_LT(cpu_list(even).size(), 80u);
  EXPECT_FALSE(affinity_of(0).empty());
}

}  // namespace
}  // namespace mk::topology
