// How long rails' threads stay awake: what the configuration says, else by the CPUs there are.
#include "daemon/topology/spin.h"

#include <gtest/gtest.h>

namespace mk::topology {
namespace {

daemon::Config config_of(const std::string& toml) {
  const auto config = daemon::parse_config(toml, "mk.toml", {});
  EXPECT_TRUE(config) << config.error().message;
  return config.value_or(daemon::Config{});
}

TEST(Spin, IsWhatTheConfigurationSays) {
  for (const std::uint32_t cpus : {1u, 1000u}) {
    const Spin spin = choose_spin(config_of("[proxy]\nspin = '3ms'\ncpus = [1]"), 1, cpus);
    EXPECT_EQ(spin.ns, 3'000'000u);
    EXPECT_TRUE(spin.why.empty());
  }
  EXPECT_EQ(choose_spin(config_of("[proxy]\nspin = '0'"), 1, 1000).ns, 0u);
}

TEST(Spin, ByItselfIsLongWithFourCpusARail) {
  for (std::size_t rails = 1; rails <= 16; ++rails) {
    const auto enough = static_cast<std::uint32_t>(4 * rails);
    EXPECT_EQ(choose_spin({}, rails, enough).ns, kSpinOverPausesNs) << rails;
    EXPECT_EQ(choose_spin({}, rails, enough - 1).ns, kSpinAmongOthersNs) << rails;
  }
  EXPECT_EQ(choose_spin({}, 1, 3).why, "3 CPUs for 1 rail");
  EXPECT_EQ(choose_spin({}, 2, 64).why, "64 CPUs for 2 rails");
}

TEST(Spin, ByItselfIsLongWhereEachRailHasACpu) {
  EXPECT_EQ(choose_spin(config_of("[proxy]\ncpus = [0, 1]"), 2, 2).ns, kSpinOverPausesNs);
  EXPECT_EQ(choose_spin(config_of("[proxy]\nspin = 'auto'\ncpus = [0]"), 1, 1).ns,
            kSpinOverPausesNs);
  EXPECT_EQ(choose_spin(config_of("[proxy]\ncpus = [0, -1]"), 2, 2).ns, kSpinAmongOthersNs);
  EXPECT_EQ(choose_spin(config_of("[proxy]\ncpus = [2, 2]"), 2, 2).ns, kSpinAmongOthersNs);
  EXPECT_EQ(choose_spin(config_of("[proxy]\ncpus = [0, 1]"), 2, 1).ns, kSpinAmongOthersNs)
      << "a quota of one CPU";
}

// Daemons of one machine each see all of its CPUs.
TEST(Spin, ByItselfCountsTheOtherDaemonsOfThisMachine) {
  const std::string local = "[[peer]]\nid = 1\naddress = 'unix:/run/other'\n";
  const std::string remote = "[[peer]]\nid = 2\naddress = '10.0.0.2:7171'\n";
  EXPECT_EQ(choose_spin(config_of(local), 2, 16).ns, kSpinOverPausesNs);
  const Spin few = choose_spin(config_of(local), 2, 15);
  EXPECT_EQ(few.ns, kSpinAmongOthersNs);
  EXPECT_EQ(few.why, "15 CPUs for 2 rails here and the rails of 1 other daemon on this machine");
  EXPECT_EQ(choose_spin(config_of("insecure = true\n" + remote), 2, 8).ns, kSpinOverPausesNs);
}

TEST(Spin, ByItselfIsShortWhereCpusAreNotKnown) {
  EXPECT_EQ(choose_spin({}, 1, std::nullopt).ns, kSpinAmongOthersNs);
}

}  // namespace
}  // namespace mk::topology
