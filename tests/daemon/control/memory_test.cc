// A daemon that gets no memory in the middle of an attach: the client is refused, and nothing is
// left of it. This program replaces operator new.
#include <cstdint>
#include <cstdlib>
#include <new>

#include "tests/daemon/control/rig.h"

namespace {
thread_local std::uint64_t allocations_left = 0;  ///< 0: any number
}

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (allocations_left != 0 && --allocations_left == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace mk::daemon::test {
namespace {

TEST(Memory, AnAttachThatGetsNoneLeavesNothing) {
  TestNode node({.nodes = 1}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  const shm::Attach wanted = rank_of("job", 1, 2, 0);
  const auto whole = [&](const shm::Attach& attach) {
    const ClientId client = node.attach(attach);
    EXPECT_TRUE(node.take(client, shm::MessageType::kAttachReply));
    return client;
  };
  for (const bool joins : {false, true}) {
    std::uint64_t refused = 0;
    bool failed = true;
    for (std::uint64_t nth = 1; failed && !HasFailure(); ++nth) {
      std::optional<ClientId> other;
      if (joins) other = whole(rank_of("job", 1, 2, 1));
      const ControlCounts before = node.plane->counts();
      const ClientId client = node.connect();
      node.send(client, shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"});
      failed = false;
      try {
        allocations_left = nth;
        node.send(client, wanted);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      allocations_left = 0;
      const bool attached = node.plane->counts().slots_used != before.slots_used;
      node.hang_up(client);
      if (!attached) {
        ++refused;
        EXPECT_EQ(node.plane->counts(), before) << nth;
        node.hang_up(whole(wanted));  // its place is free
      }
      if (other) node.hang_up(*other);
      while (node.step()) {
      }
      node.expect_nothing_left();
    }
    EXPECT_GT(refused, 10u);
  }
}

}  // namespace
}  // namespace mk::daemon::test
