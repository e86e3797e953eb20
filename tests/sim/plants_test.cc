/// \file
/// The simulator finds bugs: every one that is planted (daemon/plant.h), within a minute of CPU
/// time (the machine may have others to serve), from fresh seeds; and the command that it prints
/// shows the same violation again.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <string_view>

#include "daemon/plant.h"

namespace mk::sim {
namespace {

struct Outcome {
  int status = -1;
  std::string output;
};

Outcome run(const std::string& command) {
  Outcome outcome;
  std::FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> chunk;
  for (std::size_t got; (got = std::fread(chunk.data(), 1, chunk.size(), pipe)) != 0;) {
    outcome.output.append(chunk.data(), got);
  }
  const int status = ::pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

/// What follows `lead` on its line; empty when there is no such line.
std::string line_after(const std::string& text, const std::string& lead) {
  const std::size_t at = text.rfind("\n" + lead);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + 1 + lead.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

class Plants : public testing::TestWithParam<plant::Plant> {};

TEST_P(Plants, IsFoundWithinAMinuteAndReplayed) {
  // What reaches a job on other nodes takes jobs that share some: most fresh clusters have two
  // nodes.
  const char* size = GetParam().name == std::string_view("any_link_fails_all") ? "--nodes 4 " : "";
  const Outcome found =
      run(fmt::format("{} --cpu-seconds 60 {}--plant {}", MK_SIM_PLANTED, size, GetParam().name));
  ASSERT_EQ(found.status, 1) << found.output.substr(
      found.output.size() - std::min<std::size_t>(found.output.size(), 2000));
  const std::string violation = line_after(found.output, "seed ");
  const std::string replay = line_after(found.output, "replay: ");
  ASSERT_FALSE(replay.empty());
  fmt::print("{} ({}): {}\n", GetParam().name, GetParam().invariant, violation);
  const Outcome again = run(replay);
  EXPECT_EQ(again.status, 1);
  EXPECT_EQ(line_after(again.output, "seed "), violation);
  // Without the bug, the same cluster holds.
  const std::string without = replay.substr(0, replay.find(" --plant"));
  EXPECT_EQ(run(without).status, 0) << without;
}

INSTANTIATE_TEST_SUITE_P(All, Plants, testing::ValuesIn(plant::kPlants),
                         [](const auto& one) { return std::string(one.param.name); });

TEST(PlantedBugs, BreakEveryInvariant) {
  for (const char* invariant :
       {"no arrival before its payload", "no byte outside a registered buffer",
        "no write into a bank that is not released", "every launch ends within its deadline",
        "every count returns to its start", "no job affects another's result"}) {
    const auto breaks = [&](const plant::Plant& one) { return one.invariant == invariant; };
    EXPECT_TRUE(std::any_of(std::begin(plant::kPlants), std::end(plant::kPlants), breaks))
        << invariant;
  }
}

}  // namespace
}  // namespace mk::sim
