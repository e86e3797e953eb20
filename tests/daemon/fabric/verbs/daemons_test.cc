// Whole daemons over RDMA ports that fail: their jobs, and the next ones; on software NICs.
#include <gmock/gmock.h>

#include "tests/daemon/control/nodes.h"
#include "tests/daemon/fabric/verbs/trouble.h"

namespace mk::fabric {
namespace {

using daemon::test::eventually;
using daemon::test::Nodes;
using daemon::test::PairedRank;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

/// Two daemons of two rails, and what they say. A job's first ranks use the first rail.
class VerbsDaemons : public VerbsTrouble {
 protected:
  static constexpr std::uint32_t kRanks = 4;
  static constexpr std::uint16_t kPartition = 0x8007;

  void SetUp() override {
    VerbsTrouble::SetUp();
    nodes_ = std::make_unique<Nodes>(2, "verbs", [this](daemon::NodeOptions& options) {
      const bool first = options.control.node == 0;
      options.rails.resize(2);
      for (auto& rail : options.rails) {
        rail.endpoint.fabric = "verbs";
        // A port that moves says so before its peers give up waiting for acknowledgements.
        rail.endpoint.verbs.timeout = 17;
        rail.endpoint.verbs.pkey = kPartition;
        rail.endpoint.verbs.devices = {first ? "soft0" : "soft1", first ? "softib0" : "softib1"};
      }
      options.control.log = [this](const daemon::LogRecord& record) {
        const std::lock_guard lock(mutex_);
        log_ += record.message + "\n";
        if (record.level == daemon::LogLevel::kWarning) warnings_.push_back(record.message);
      };
    });
  }
  void TearDown() override {
    nodes_.reset();
    VerbsTrouble::TearDown();
  }
  std::string log() {
    const std::lock_guard lock(mutex_);
    return log_;
  }
  std::vector<std::string> warnings() {
    const std::lock_guard lock(mutex_);
    return warnings_;
  }
  bool said(const std::string& text) { return holds(log(), text); }
  std::size_t times_said(const std::string& text) {
    const std::string all = log();
    std::size_t times = 0;
    for (std::size_t at = all.find(text); at != std::string::npos; at = all.find(text, at + 1))
      ++times;
    return times;
  }
  /// What is said when the port has moved, once its links have failed.
  static std::string moving(const std::string& device) {
    return "peers cannot be reached by RDMA port " + device + ":1 as before";
  }
  /// The ranks' job, attached; or why one of them could not be.
  Result<std::vector<std::unique_ptr<PairedRank>>> attach() {
    std::vector<std::unique_ptr<PairedRank>> ranks;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(std::make_unique<PairedRank>(*nodes_, "job", rank));
      MK_RETURN_IF_ERROR(ranks.back()->attach());
    }
    return ranks;
  }
  /// A job that moves data to its end.
  void run_job() {
    Result<std::vector<std::unique_ptr<PairedRank>>> ranks = attach();
    ASSERT_TRUE(ranks) << ranks.error().message;
    std::vector<std::thread> threads;
    for (auto& rank : *ranks) {
      threads.emplace_back([&rank] {
        ASSERT_NO_FATAL_FAILURE(rank->meet());
        for (std::uint32_t epoch = 1; epoch <= 5; ++epoch) {
          const Status moved = rank->move(epoch);
          ASSERT_TRUE(moved) << moved.error().message;
        }
        EXPECT_TRUE(rank->client.call<shm::Done>(shm::Detach{}));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  /// A job in whose traffic `strike` comes; its ranks' errors.
  std::vector<std::string> strike_job(const std::function<void()>& strike) {
    std::vector<std::string> errors(kRanks);
    auto ranks = attach();
    EXPECT_TRUE(ranks);
    if (!ranks) return errors;
    std::atomic<std::uint32_t> moving{0};
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        PairedRank& own = *(*ranks)[rank];
        ASSERT_NO_FATAL_FAILURE(own.meet());
        Status moved;
        for (std::uint32_t epoch = 1; moved; ++epoch) {
          moved = own.move(epoch);
          if (epoch == 2) ++moving;
        }
        // What the exchange says may be of the moment; the session's error stays.
        EXPECT_TRUE(eventually([&] { return !own.client.segment->failure(); }));
        errors[rank] = own.client.segment->failure().error().message;
      });
    }
    EXPECT_TRUE(eventually([&] { return moving == kRanks; }));
    strike();
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
  daemon::LinkInfo link(std::uint32_t node, std::uint32_t rail) {
    const auto snapshot = (*nodes_)[node].snapshot();
    for (const daemon::LinkInfo& info : snapshot->links) {
      if (info.rail == rail) return info;
    }
    ADD_FAILURE() << "no link of rail " << rail;
    return {};
  }

  std::unique_ptr<Nodes> nodes_;

 private:
  std::mutex mutex_;
  std::string log_;
  std::vector<std::string> warnings_;
};

TEST_F(VerbsDaemons, RailsOnOtherNicsThanThePeersAreWarnedOfAtBothEnds) {
  const auto warned = [this](const std::string& peer, const std::string& what) {
    return std::ranges::any_of(warnings(), [&](const std::string& text) {
      return holds(text, "the rails of " + peer) && holds(text, "(" + what + ")") &&
             holds(text, "name the NICs in the configuration");
    });
  };
  EXPECT_TRUE(eventually([&] {
    return warned("node 1",
                  "rail 0 is soft0:1 here and soft1:1 there, rail 1 is softib0:1 here and "
                  "softib1:1 there") &&
           warned("node 0",
                  "rail 0 is soft1:1 here and soft0:1 there, rail 1 is softib1:1 here and "
                  "softib0:1 there");
  })) << log();

  std::mutex mutex;
  std::string said_alike;
  const Nodes alike(2, "verbs", [&](daemon::NodeOptions& options) {
    options.rails[0].endpoint.verbs.pkey = kPartition;
    options.rails[0].endpoint.verbs.devices = {"soft0"};
    options.control.log = [&](const daemon::LogRecord& record) {
      const std::lock_guard lock(mutex);
      said_alike += record.message + "\n";
    };
  });
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return holds(said_alike, "connected to node 0 (in this process)") &&
           holds(said_alike, "connected to node 1 (in this process)");
  })) << said_alike;
  const std::lock_guard lock(mutex);
  EXPECT_FALSE(holds(said_alike, "on other NICs")) << said_alike;
}

TEST_F(VerbsDaemons, ADeviceThatFailsEndsItsJobsWithItsNameAndTheNextJobRuns) {
  ASSERT_NO_FATAL_FAILURE(run_job());
  const LinkId other_rail = link(0, 1).id;
  // Its memory is registered there as well, but nothing of it goes over the network.
  daemon::test::SocketClient alone((*nodes_)[0].socket_path());
  ASSERT_TRUE(alone.attach(daemon::test::rank_of("alone", 1, 1, 0)));
  ASSERT_TRUE(alone.await<shm::JobUp>());
  const auto errors = strike_job([] { soft_nic::fail_device("soft0", soft_nic::Failure::kGone); });
  for (const std::string& error : errors) {
    // The device's event, or the first write that it does not take: whichever is seen first.
    EXPECT_THAT(error,
                AllOf(HasSubstr("RDMA port soft0:1"),
                      AnyOf(HasSubstr("the device failed"), HasSubstr("does not take a write"))));
  }
  // The device's event may come after the write that it did not take.
  EXPECT_TRUE(eventually([&] { return link(0, 0).state == "error"; }));
  EXPECT_THAT(link(0, 0).reason, HasSubstr("soft0:1"));
  EXPECT_EQ(link(0, 1).state, "up");
  EXPECT_EQ(link(0, 1).id, other_rail);
  const auto refused = attach();
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, AllOf(HasSubstr("arrival flags"), HasSubstr("soft0:1")));
  EXPECT_TRUE(eventually([] { return soft_nic::open_contexts("soft0") == 0; }))
      << "closed, not kept";
  EXPECT_TRUE(alone.segment->failure());
  EXPECT_TRUE(alone.call<shm::Done>(shm::Detach{}));
  EXPECT_TRUE(eventually([&] { return nodes_->idle(); }));

  soft_nic::repair_device("soft0");
  EXPECT_TRUE(eventually([&] {
    return log().find("is back: RDMA port soft0:1") != std::string::npos;
  })) << log();
  ASSERT_NO_FATAL_FAILURE(run_job());
  EXPECT_EQ(link(0, 0).state, "up");
  EXPECT_EQ(link(0, 1).id, other_rail);
}

// Queue pairs name their partition by its place in the table, so those of the old place are of no
// use any more.
TEST_F(VerbsDaemons, APartitionThatMovesInTheTableEndsItsJobsAndTheNextJobRuns) {
  ASSERT_NO_FATAL_FAILURE(run_job());
  const LinkId other_rail = link(0, 1).id;
  const std::vector<std::uint16_t> tables[] = {{0xffff, kPartition}, {0xffff, 0x8009, kPartition}};
  std::map<std::string, std::size_t> moves;
  const std::vector<std::vector<std::string>> rounds = {{"soft0", "soft1"}, {"soft0"}, {"soft1"}};
  for (const auto& moved : rounds) {
    SCOPED_TRACE(testing::PrintToString(moved));
    const auto errors = strike_job([&] {
      for (const std::string& device : moved)
        soft_nic::set_pkeys(device, tables[++moves[device] % 2]);
    });
    for (const std::string& device : moved) {
      // The job may have ended by the first one's; the next one begins after all.
      EXPECT_TRUE(eventually([&] { return times_said(moving(device)) == moves[device]; })) << log();
    }
    for (const std::string& error : errors) {
      // Its own port's event, or what the other end has said.
      EXPECT_THAT(error, AnyOf(HasSubstr("the port's partitions changed"),
                               HasSubstr("got another address")));
    }
    ASSERT_NO_FATAL_FAILURE(run_job()) << log();
    EXPECT_EQ(link(0, 1).id, other_rail);
  }
}

TEST_F(VerbsDaemons, DevicesThatFailAtBothEndsAtOnceAreFoundWhereTheyAreOpenedAgain) {
  ASSERT_NO_FATAL_FAILURE(run_job());
  const auto errors = strike_job([] {
    for (const char* const device : {"soft0", "soft1"})
      soft_nic::fail_device(device, soft_nic::Failure::kGone);
  });
  for (const std::string& error : errors)
    EXPECT_THAT(error, AnyOf(HasSubstr("RDMA port soft0:1"), HasSubstr("RDMA port soft1:1")));
  for (const std::string device : {"soft0", "soft1"}) {
    soft_nic::repair_device(device);
    EXPECT_TRUE(eventually([&] { return said("is back: RDMA port " + device + ":1"); })) << log();
  }
  // Also when no job asks for them.
  EXPECT_TRUE(eventually([&] { return link(0, 0).state == "up" && link(1, 0).state == "up"; }))
      << link(0, 0).reason;
  ASSERT_NO_FATAL_FAILURE(run_job()) << log();
}

TEST_F(VerbsDaemons, AddressesThatChangeAtBothEndsAtOnceAreFollowed) {
  ASSERT_NO_FATAL_FAILURE(run_job());
  const auto errors = strike_job([] {
    soft_nic::set_ip("soft0", 0, 0x0a4d0065);
    soft_nic::set_ip("soft1", 0, 0x0a4d0066);
    soft_nic::set_lid("softib0", 13);
    soft_nic::set_lid("softib1", 14);
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, AnyOf(HasSubstr("the port's GID changed"), HasSubstr("LID changed"),
                             HasSubstr("got another address")));
  }
  for (const std::string device : {"soft0", "soft1", "softib0", "softib1"})
    EXPECT_TRUE(eventually([&] { return times_said(moving(device)) == 1; })) << log();
  ASSERT_NO_FATAL_FAILURE(run_job()) << log();
}

}  // namespace
}  // namespace mk::fabric
