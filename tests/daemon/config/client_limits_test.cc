// What "auto" stands for among the limits, and that whatever is asked for wins.
#include "daemon/config/client_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mk::daemon {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kGiB = 1u << 30;

TEST(ClientLimits, SharesOfTheMachine) {
  const ClientLimits limits = client_limits(Config{}, {100 * kGiB, 65'536});
  EXPECT_EQ(limits.all.memory_bytes, 80 * kGiB);
  EXPECT_EQ(limits.user.memory_bytes, 60 * kGiB);
  EXPECT_EQ(limits.session_memory_bytes, 40 * kGiB);
  EXPECT_EQ(limits.all.descriptors, 65'536u - 2048);
  EXPECT_EQ(limits.user.descriptors, 47'616u);
  EXPECT_EQ(limits.user.sessions, 48u);
  EXPECT_EQ(limits.user.rings, 768u);
  EXPECT_EQ(limits.user.buffers, 49'152u);
}

TEST(ClientLimits, NobodyIsWithoutAnyOnASmallMachine) {
  Config config;
  config.limits.sessions = 1;
  const ClientLimits limits = client_limits(config, {1 * kGiB, 256});
  EXPECT_EQ(limits.user.sessions, 1u);
  EXPECT_EQ(limits.all.descriptors, 192u);
  EXPECT_EQ(limits.user.descriptors, 144u);
}

TEST(ClientLimits, NothingIsWithoutALimitByDefault) {
  for (const std::uint64_t memory : {1 * kGiB, 24 * kGiB, 2048 * kGiB}) {
    for (const std::uint64_t descriptors : {256u, 1024u, 1u << 20}) {
      const ClientLimits limits = client_limits(Config{}, {memory, descriptors});
      EXPECT_GT(limits.session_memory_bytes, 0u);
      EXPECT_GT(limits.user.memory_bytes, limits.session_memory_bytes);
      EXPECT_GT(limits.all.memory_bytes, limits.user.memory_bytes);
      EXPECT_LT(limits.all.memory_bytes, memory);
      EXPECT_GT(limits.user.descriptors, 0u);
      EXPECT_GT(limits.all.descriptors, limits.user.descriptors);
      EXPECT_LT(limits.all.descriptors, descriptors);
    }
  }
}

TEST(ClientLimits, WhatIsAskedForWins) {
  Config config;
  config.limits.all_registered_bytes = 8 * kGiB;
  config.limits.user_sessions = 0;
  config.limits.user_descriptors = 77;
  const ClientLimits limits = client_limits(config, {100 * kGiB, 65'536});
  EXPECT_EQ(limits.all.memory_bytes, 8 * kGiB);
  EXPECT_EQ(limits.user.memory_bytes, 6 * kGiB) << "parts of what was asked for";
  EXPECT_EQ(limits.session_memory_bytes, 4 * kGiB);
  EXPECT_EQ(limits.user.sessions, 0u) << "unlimited";
  EXPECT_EQ(limits.user.descriptors, 77u);
  EXPECT_THAT(describe(limits, {100 * kGiB, 65'536}),
              HasSubstr("8.0 GiB of host memory in all, one user 6.0 GiB, one session 4.0 GiB"));
}

}  // namespace
}  // namespace mk::daemon
