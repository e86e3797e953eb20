// What people change of a job's share at run time lies on top of the configuration.
#include "daemon/service/live_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shm/limits.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;

JobShare share(const LiveConfig& live, const std::string& job) { return live.share_of(job); }

Config with_job(const std::string& name, std::uint32_t weight) {
  Config config;
  config.jobs.push_back({});
  config.jobs.back().pattern = name;
  config.jobs.back().share.weight = weight;
  return config;
}

std::string refusal(LiveConfig& live, const JobChange& change) {
  const auto changed = live.change(change);
  return changed ? "" : changed.error().message;
}

TEST(LiveConfig, AChangeLiesOnTopOfTheConfigurationAndOutlivesAReload) {
  LiveConfig live(with_job("train", 5));
  EXPECT_EQ(share(live, "train").weight, 5u);
  const auto changed = live.change({.job = "train", .bytes_per_second = 1e9});
  ASSERT_TRUE(changed) << changed.error().message;
  EXPECT_EQ(changed->weight, 5u);
  EXPECT_EQ(changed->limit.bytes_per_second, 1e9);
  EXPECT_EQ(changed->limit.commands_per_second, 0);
  // Each of them by itself, and another job not at all.
  ASSERT_TRUE(live.change({.job = "train", .commands_per_second = 1e6}));
  live.set(with_job("train", 7));
  EXPECT_EQ(share(live, "train").weight, 7u);
  EXPECT_EQ(share(live, "train").limit.bytes_per_second, 1e9);
  EXPECT_EQ(share(live, "train").limit.commands_per_second, 1e6);
  EXPECT_EQ(share(live, "other").limit.bytes_per_second, 0);
  EXPECT_EQ(live.get().jobs.size(), 1u);
}

TEST(LiveConfig, ResetUndoesWhatCameBefore) {
  LiveConfig live(with_job("train", 5));
  ASSERT_TRUE(live.change({.job = "train", .weight = 9, .bytes_per_second = 1e9}));
  EXPECT_EQ(live.change({.job = "train", .weight = 2, .reset = true})->weight, 2u);
  EXPECT_EQ(share(live, "train").limit.bytes_per_second, 0);
  EXPECT_EQ(live.change({.job = "train", .reset = true})->weight, 5u);
}

TEST(LiveConfig, WhatCannotBeIsRefusedWithASentence) {
  LiveConfig live{Config{}};
  EXPECT_THAT(refusal(live, {.job = "", .weight = 1}), HasSubstr("1 to 128 bytes"));
  EXPECT_THAT(refusal(live, {.job = std::string(shm::kJobNameBytesMax + 1, 'x'), .weight = 1}),
              HasSubstr("1 to 128 bytes"));
  EXPECT_THAT(refusal(live, {.job = "a", .weight = 0}), HasSubstr("a weight of 0; 1 to"));
  EXPECT_THAT(refusal(live, {.job = "a", .weight = kJobWeightMax + 1}), HasSubstr("a weight of"));
  EXPECT_THAT(refusal(live, {.job = "a", .bytes_per_second = -1}), HasSubstr("a rate of -1"));
  EXPECT_THAT(refusal(live, {.job = "a", .commands_per_second = 2e15}), HasSubstr("a rate of"));
  EXPECT_EQ(share(live, "a").weight, share(live, "b").weight);
}

TEST(LiveConfig, AThousandJobsMayBeChanged) {
  LiveConfig live{Config{}};
  std::uint32_t taken = 0;
  while (live.change({.job = std::to_string(taken), .weight = 2})) ++taken;
  EXPECT_EQ(taken, 1024u);
  EXPECT_THAT(refusal(live, {.job = "more", .weight = 2}), HasSubstr("undo one of them first"));
  // Those that are there can be changed further, and undone.
  ASSERT_TRUE(live.change({.job = "7", .weight = 3}));
  ASSERT_TRUE(live.change({.job = "7", .reset = true}));
  EXPECT_TRUE(live.change({.job = "more", .weight = 2}));
}

}  // namespace
}  // namespace mk::daemon
