// [[gpu]]: rails of GPUs by configuration.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "daemon/config/config.h"

namespace mk::daemon {
namespace {

std::string gpu(const std::string& address, const std::string& rail) {
  return "[[gpu]]\naddress = '" + address + "'\nrail = " + rail + "\n";
}

TEST(GpuSection, GivesGpusTheirRails) {
  const auto config =
      parse_config(gpu("0000:1b:00.0", "2") + gpu("00000000:9A:00.0", "0"), "mk.toml", {});
  ASSERT_TRUE(config) << config.error().message;
  const std::map<std::string, std::uint32_t> rails{{"0000:1b:00.0", 2}, {"0000:9a:00.0", 0}};
  EXPECT_EQ(config->gpu_rails, rails) << "also as nvidia-smi writes them";
  EXPECT_THAT(print_config(*config),
              testing::HasSubstr("[[gpu]]\naddress = \"0000:1b:00.0\"\nrail = 2\n"));
}

TEST(GpuSection, IsRefusedWithItsPlace) {
  const std::pair<std::string, const char*> all[] = {
      {"[[gpu]]\naddress = '0000:1b:00.0'", "mk.toml:1:1: gpu.rail is missing"},
      {gpu("gpu 3", "0"),
       "mk.toml:2:11: gpu.address: a PCI address is expected, such as 0000:1b:00.0 (mkctl topology "
       "shows them)"},
      {gpu("0000:1b:00.0", "16"), "mk.toml:3:8: gpu.rail: a whole number from 0 to 15 is expected"},
      {gpu("0000:1b:00.0", "0") + gpu("0000:1B:00.0", "1"),
       "mk.toml:4:1: gpu: GPU 0000:1b:00.0 is given two rails"},
      {"[fabric]\nrails = 2\n" + gpu("0000:1b:00.0", "2"),
       "gpu 0000:1b:00.0: rail 2, but fabric.rails is 2: 0 to 1 are possible"}};
  for (const auto& [toml, message] : all) {
    const auto config = parse_config(toml, "mk.toml", {});
    ASSERT_FALSE(config) << toml;
    EXPECT_EQ(config.error().message, message);
  }
}

}  // namespace
}  // namespace mk::daemon
