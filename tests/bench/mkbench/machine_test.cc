#include "tests/bench/mkbench/machine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace mk::bench {
namespace {

TEST(DescribeGpus, CountsTheModelsThatTheDriverLists) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("mkbench_gpus_" + std::to_string(::getpid()));
  EXPECT_EQ(describe_gpus(folder), "none");
  const auto add = [&](const std::string& address, const std::string& text) {
    std::filesystem::create_directories(folder / address);
    std::ofstream(folder / address / "information") << text;
  };
  add("0000:19:00.0", "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n");
  add("0000:3b:00.0", "Model: \t\t NVIDIA H200\nGPU UUID: \t ?\n");
  add("0000:4c:00.0", "Model: \t\t NVIDIA H100 80GB HBM3\n");
  add("0000:5d:00.0", "IRQ: 3\nModel:\n");
  EXPECT_EQ(describe_gpus(folder), "1 x NVIDIA H100 80GB HBM3, 2 x NVIDIA H200");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace mk::bench
