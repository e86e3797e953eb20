// What a reload sees: which keys differ, and which of them a running daemon takes over.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/config/compare.h"

namespace mk::daemon {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

Config config_of(const std::string& toml) {
  const auto config = parse_config(toml, "test", {});
  EXPECT_TRUE(config) << config.error().message;
  return config.value_or(Config{});
}

std::vector<ConfigChange> changes(const std::string& before, const std::string& after) {
  return compare_configs(config_of(before), config_of(after));
}

TEST(CompareConfigs, SeesNoneWhenTheMeaningIsTheSame) {
  EXPECT_THAT(changes("", ""), IsEmpty());
  EXPECT_THAT(changes("limits.drain = '1s'", "[limits]\ndrain = '1000ms'"), IsEmpty());
  EXPECT_THAT(changes("", "log.level = 'info'"), IsEmpty());
}

TEST(CompareConfigs, NamesAKeyWithItsTable) {
  EXPECT_THAT(changes("node_id = 1", "node_id = 2"),
              ElementsAre(ConfigChange{"node_id", "1", "2", false}));
  EXPECT_THAT(changes("", "[fabric.ofi]\nprovider = 'efa'\n[log]\nlevel = 'debug'"),
              ElementsAre(ConfigChange{"fabric.ofi.provider", "\"tcp\"", "\"efa\"", false},
                          ConfigChange{"log.level", "\"info\"", "\"debug\"", true}));
}

TEST(CompareConfigs, NumbersTheTablesOfAList) {
  const std::string one = "[[peer]]\nid = 1\naddress = '127.0.0.1:1'\n";
  const std::string two = "[[peer]]\nid = 2\naddress = '127.0.0.1:2'\n";
  EXPECT_THAT(changes(one, one + two),
              ElementsAre(ConfigChange{"peer[1].address", "", "\"127.0.0.1:2\"", true},
                          ConfigChange{"peer[1].id", "", "2", true}));
  EXPECT_THAT(changes(one + two, one).size(), 2);
  EXPECT_THAT(changes("[[job]]\npattern = 'a'\nweight = 2\n", ""),
              ElementsAre(ConfigChange{"job[0].commands", "0", "", true},
                          ConfigChange{"job[0].pattern", "\"a\"", "", true},
                          ConfigChange{"job[0].rate", "\"unlimited\"", "", true},
                          ConfigChange{"job[0].weight", "2", "", true}));
}

}  // namespace
}  // namespace mk::daemon
