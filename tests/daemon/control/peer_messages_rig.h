/// \file
/// One control plane, and the test in the place of the daemon beside it.
#pragma once

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {

/// Node 0 of two; the test plays node 1.
class PeerMessages : public testing::Test {
 protected:
  PeerMessages() { node.reachable = {1}; }

  PeerHello hello() const {
    PeerHello hello = node.plane->hello();
    hello.node = 1;
    hello.generation = 99;
    return hello;
  }
  /// A part is said with all that comes before it.
  void say(const PeerMessage& message) {
    const auto* part = std::get_if<JobPart>(&message);
    const Status status =
        part != nullptr ? node.play(1, *part) : node.plane->on_peer_message(1, message);
    EXPECT_TRUE(status) << status.error().message;
    EXPECT_TRUE(node.answer());
  }
  void expect_refused(const PeerMessage& message, const std::string& says) {
    const Status status = node.plane->on_peer_message(1, message);
    ASSERT_FALSE(status) << says;
    EXPECT_THAT(status.error().message, testing::HasSubstr(says));
    EXPECT_THAT(status.error().message, testing::HasSubstr("node 1"));
  }
  template <class Message>
  std::vector<Message> sent() {
    std::vector<Message> found;
    for (const auto& [to, message] : node.sent) {
      if (const auto* content = std::get_if<Message>(&message)) found.push_back(*content);
    }
    return found;
  }
  /// Our own part, as last announced.
  std::uint64_t own_part() { return sent<JobOffer>().back().part_id; }
  /// A job of 2 x 1 whose remote part has `part_id`, up.
  ClientId job_up(std::uint64_t part_id) {
    const ClientId client = node.attach(rank_of("job", 2, 1, 0));
    say(part_of("job", part_id, 2, 1, 1));
    say(JobReady{"job", part_id, own_part()});
    EXPECT_TRUE(node.take<shm::JobUp>(client));
    return client;
  }

  TestNode node{{}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1)};
};

}  // namespace mk::daemon::test
