// The control thread, a client and a peer may act between a pass's look at the mailbox and the rest
// of the pass.
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "shm/flag.h"
#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

/// Runs `in_mid_pass` once, when the pass has read its mail and now polls.
class LateMailEndpoint : public ScriptedEndpoint {
 public:
  std::function<void()> in_mid_pass;
  std::size_t poll(std::span<fabric::Event> out) override {
    if (in_mid_pass) std::exchange(in_mid_pass, nullptr)();
    return ScriptedEndpoint::poll(out);
  }
};

class LateMail : public testing::Test {
 protected:
  LateMail() {
    auto made = std::make_unique<LateMailEndpoint>();
    endpoint_ = made.get();
    endpoint_->complete_at_once = true;
    proxy_ = std::make_unique<Proxy>(std::move(made), ProxyOptions{}, [this](ProxyEvent event) {
      events_.push_back(std::move(event));
    });
  }
  void add() { proxy_->apply(AddSession{4, &session_.segment, &session_.stats}); }
  void bind() {
    proxy_->apply(BindBuffer{4, kHandle, &local_, kBufferBytes});
    proxy_->apply(BindPeer{4, 1, 0, &link_stats_, 0, &remote_, kFlags});
    proxy_->apply(BindPeerBuffer{4, 1, kHandle, &remote_, kBufferBytes});
  }

  TestSession session_{4, {}};
  FakeLocalRegion local_;
  FakeRemoteRegion remote_;
  LinkStats link_stats_;
  std::vector<ProxyEvent> events_;
  LateMailEndpoint* endpoint_ = nullptr;
  std::unique_ptr<Proxy> proxy_;
};

TEST_F(LateMail, AnArrivalThatOvertakesItsSessionIsNotLost) {
  endpoint_->in_mid_pass = [&] {
    add();
    endpoint_->arrive(shm::make_immediate(4, 9, 1));
  };
  proxy_->step();
  EXPECT_EQ(session_.segment.flags()[9], 1u);
  EXPECT_EQ(proxy_->stats().bad_arrivals.value(), 0u);
}

TEST_F(LateMail, ACommandThatOvertakesItsBindingsIsNoFault) {
  add();
  endpoint_->in_mid_pass = [&] {
    bind();
    session_.push(1, 3);
  };
  proxy_->step();
  proxy_->step();
  EXPECT_TRUE(events_.empty());
  EXPECT_EQ(session_.completed(), 3u);
}

TEST_F(LateMail, ABadCommandStaysBadAndAFenceBehindItIsKept) {
  add();
  bind();
  endpoint_->in_mid_pass = [&] {
    session_.push(2);
    proxy_->apply(FenceSession{4});
  };
  proxy_->step();
  ASSERT_EQ(events_.size(), 1u) << "fenced by then: nobody is told of the command";
  EXPECT_TRUE(std::holds_alternative<Drained>(events_[0]));
  EXPECT_EQ(session_.lane_stats().commands.value(), 0u);
}

}  // namespace
}  // namespace mk::daemon::test
