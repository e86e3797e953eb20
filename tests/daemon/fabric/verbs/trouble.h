/// \file
/// What tests of troubled RDMA ports share: nodes on software NICs, and links with work on them.
#pragma once

#include <algorithm>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/verbs/soft_nic/soft_nic.h"

namespace mk::fabric {

inline FabricSetup on(const std::string& device) {
  FabricSetup setup;
  setup.name = device;
  setup.config.fabric = "verbs";
  setup.config.verbs.devices = {device};
  setup.config.verbs.timeout = 12;
  return setup;
}

/// What an endpoint has told people. Any thread tells; to be read when its endpoint is gone.
class Notices {
 public:
  /// For EndpointConfig::notice; this outlives the endpoint.
  std::function<void(const std::string&)> sink() {
    return [this](const std::string& text) {
      const std::lock_guard lock(mutex_);
      all_.push_back(text);
    };
  }
  const std::vector<std::string>& all() const { return all_; }
  /// How many hold `part`.
  long count(std::string_view part) const {
    return std::count_if(all_.begin(), all_.end(),
                         [&](const std::string& text) { return text.find(part) != text.npos; });
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> all_;
};

/// Each test begins with fresh NICs, and leaves nothing of theirs behind.
class VerbsTrouble : public testing::Test {
 protected:
  void SetUp() override { soft_nic::reset(); }
  void TearDown() override {
    EXPECT_EQ(soft_nic::live_objects(), 0u);
    soft_nic::reset();
  }
};

/// A link of `a` to `b` with a write of `bytes` under way or done. It has a flag and a cookie that
/// are no other write's.
struct Busy {
  static constexpr std::uint32_t kFlag = kTestFlags - 1;
  Busy(Node& a, Node& b, std::uint32_t bytes = 100'000) : Busy(a, b, join(a, b), bytes) {}
  Busy(Node& a, Node& b, TestLink joined, std::uint32_t bytes = 100'000)
      : link(std::move(joined)),
        source(a.memory(bytes)),
        target(b.memory(bytes)),
        remote(import(a, link, target)) {
    fill_random({source.data(), bytes}, bytes);
    static std::uint32_t made = 0;
    number = made % 100 + 1;  // an immediate has but a few bits of an epoch
    cookie = 1'000'000 + made++;
    const Write write = make_write(link, kFlag, number, cookie, source, 0, *remote, 0, bytes);
    posted = post_all(a, link.id, {&write, 1}, {&a, &b});
  }
  bool arrives(Node& a, Node& b) const {
    const auto there = [&] { return b.flag(kFlag) == number && a.completed.contains(cookie); };
    return posted && pump({&a, &b}, [&] { return there() || a.failed.contains(cookie); }) &&
           there() && std::memcmp(source.data(), target.data(), target.bytes()) == 0;
  }

  TestLink link;
  Memory source;
  Memory target;
  std::unique_ptr<RemoteRegion> remote;
  std::uint32_t number = 0;  ///< its epoch
  std::uint64_t cookie = 0;
  bool posted = false;
};

/// The reason with which the link went down.
inline std::string reason_of(Node& a, Node& b, LinkId link) {
  if (!pump({&a, &b}, [&] { return a.links_down.contains(link); })) return "the link is well";
  EXPECT_EQ(a.links_down[link], 1);
  return a.endpoint->link_reason(link);
}

inline bool holds(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

/// Whether a link can be made within a time that is long for all that connects by itself.
inline bool reconnects(Node& a, Node& b) {
  return pump({&a, &b}, [&] {
    const auto link = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
    if (link) a.endpoint->disconnect(*link);
    return link.has_value();
  });
}

}  // namespace mk::fabric
