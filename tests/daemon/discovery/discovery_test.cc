// The looking: what is handed on and when, and what a source that fails changes. The sources
// have tests of their own, and others against a DNS server and an etcd (check_dns.py,
// check_etcd.py).
#include "daemon/discovery/discovery.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <mutex>

#include "tests/daemon/service/temp_folder.h"

namespace mk::daemon {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Nodes = std::vector<PeerConfig>;

PeerConfig node(std::uint32_t id, std::uint16_t port) {
  return {.id = id, .address = {.host = "127.0.0.1", .port = port}};
}

/// What the test says, look by look; then the last again.
struct Script {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Result<Nodes>> answers;
  std::size_t looks = 0;
  bool left = false, cancelled = false;
  std::string remark;
  std::vector<std::vector<std::string>> handed;  ///< "id@address" of each list
  std::vector<std::string> said;                 ///< in the log

  void then(Result<Nodes> answer) {
    std::lock_guard lock(mutex);
    answers.push_back(std::move(answer));
  }
  /// Until everything said has been looked at, and once more.
  void play() {
    std::unique_lock lock(mutex);
    const std::size_t until = looks + answers.size() + 1;
    EXPECT_TRUE(changed.wait_for(lock, kPatience, [&] { return looks > until; }));
  }
};

class ScriptedSource final : public DiscoverySource {
 public:
  explicit ScriptedSource(Script& script) : script_(script) {}
  Result<Nodes> look() override {
    std::lock_guard lock(script_.mutex);
    ++script_.looks;
    script_.changed.notify_all();
    if (script_.answers.size() > 0) {
      last_ = std::move(script_.answers.front());
      script_.answers.pop_front();
    }
    return last_;
  }
  std::string remark() const override {
    std::lock_guard lock(script_.mutex);
    return script_.remark;
  }
  void cancel() override {
    std::lock_guard lock(script_.mutex);
    script_.cancelled = true;
  }
  void leave() override {
    std::lock_guard lock(script_.mutex);
    script_.left = true;
  }

 private:
  Script& script_;
  Result<Nodes> last_ = Nodes{};
};

class DiscoveryTest : public testing::Test {
 protected:
  Discovery start() {
    return Discovery(
        std::make_unique<ScriptedSource>(script_), std::chrono::milliseconds(1),
        [this](Nodes nodes) {
          std::vector<std::string> texts;
          for (const PeerConfig& one : nodes) {
            texts.push_back(fmt::format("{}@{}", one.id, one.address.text()));
          }
          std::lock_guard lock(script_.mutex);
          script_.handed.push_back(std::move(texts));
        },
        [this](const LogRecord& record) {
          std::lock_guard lock(script_.mutex);
          script_.said.push_back(record.message);
        });
  }

  Script script_;
};

TEST_F(DiscoveryTest, HandsAListOnWhenItDiffers) {
  script_.then(Nodes{node(1, 1)});
  script_.then(Nodes{node(1, 1)});
  script_.then(Nodes{node(1, 1), node(2, 2)});
  script_.then(Nodes{node(1, 9), node(2, 2)});
  script_.then(Nodes{});
  Discovery discovery = start();
  script_.play();
  discovery.stop();
  EXPECT_THAT(
      script_.handed,
      ElementsAre(ElementsAre("1@127.0.0.1:1"), ElementsAre("1@127.0.0.1:1", "2@127.0.0.1:2"),
                  ElementsAre("1@127.0.0.1:9", "2@127.0.0.1:2"), IsEmpty()));
}

TEST_F(DiscoveryTest, KeepsTheNodesWhenTheSourceFails) {
  script_.then(Nodes{node(1, 1)});
  script_.then(fail(ErrorCode::kUnavailable, "the name server sleeps"));
  Discovery discovery = start();
  script_.play();
  EXPECT_THAT(discovery.trouble(), HasSubstr("the name server sleeps"));
  script_.then(Nodes{node(1, 1)});
  script_.play();
  EXPECT_EQ(discovery.trouble(), "");
  EXPECT_THAT(script_.handed, ElementsAre(ElementsAre("1@127.0.0.1:1")));
}

// A source that stays down for a night is one line, not thousands.
TEST_F(DiscoveryTest, SaysOnceThatTheSourceFailsAndOnceThatItWorksAgain) {
  for (int look = 0; look < 3; ++look) {
    script_.then(fail(ErrorCode::kUnavailable, "the name server sleeps"));
  }
  Discovery discovery = start();
  script_.play();
  for (int look = 0; look < 3; ++look) script_.then(Nodes{node(1, 1)});
  script_.play();
  discovery.stop();
  EXPECT_THAT(script_.said,
              ElementsAre(HasSubstr("the name server sleeps"), HasSubstr("discovery works again")));
}

TEST_F(DiscoveryTest, TellsWhatIsOddAboutAListThatCounts) {
  {
    std::lock_guard lock(script_.mutex);
    script_.remark = "the certificate of node 2 is node 3's";
  }
  script_.then(Nodes{node(1, 1)});
  Discovery discovery = start();
  script_.play();
  EXPECT_THAT(discovery.trouble(), HasSubstr("node 3's"));
  EXPECT_THAT(script_.handed, ElementsAre(ElementsAre("1@127.0.0.1:1")));
  {
    std::lock_guard lock(script_.mutex);
    script_.remark.clear();
  }
  script_.then(Nodes{node(1, 1)});
  script_.play();
  EXPECT_EQ(discovery.trouble(), "");
}

TEST_F(DiscoveryTest, LeavesOnceWhenItStops) {
  Discovery discovery = start();
  script_.play();
  EXPECT_FALSE(script_.left);
  discovery.stop();
  EXPECT_TRUE(script_.cancelled);
  EXPECT_TRUE(script_.left);
  const std::size_t looks = script_.looks;
  discovery.stop();
  EXPECT_EQ(script_.looks, looks);
}

}  // namespace
}  // namespace mk::daemon
