// A daemon that gets no memory in the middle of an attach or a registration: the client is told,
// and nothing is left of it. This program replaces operator new.
#include <fcntl.h>

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

TEST(Memory, ARegistrationThatGetsNoneLeavesNothing) {
  enum Stage { kAsks, kRegisters, kGivesBack, kDeregisters, kGoes, kEnd };
  for (int stage = kAsks; stage != kEnd; ++stage) {
    std::uint64_t nth = 0;
    for (bool reached = true; reached && !HasFailure();) {
      SCOPED_TRACE(std::to_string(stage) + ": " + std::to_string(++nth));
      TestNode node({.nodes = 1, .apart = true}, std::make_shared<FakeMemory>(),
                    std::make_shared<std::uint64_t>(1));
      const ClientId client = node.attach(rank_of("job", 1, 1, 0));
      const auto file = shm::BufferFile::create("test", 4096).value();
      /// Whether it came to its end.
      const auto scarce = [&](Stage now, const std::function<void()>& step) {
        bool ended = true;
        if (now == stage) allocations_left = nth;
        try {
          step();
        } catch (const std::bad_alloc&) {
          ended = false;
        }
        if (now == stage) reached = allocations_left == 0;
        allocations_left = 0;
        return ended;
      };
      const auto work = [&](Stage now) {
        if (node.apart.empty()) return;
        const TestNode::Apart one = std::move(node.apart.front());
        node.apart.pop_front();
        EXPECT_TRUE(scarce(now, [&] {
          one.work();
          one.done();
        }));
      };
      std::vector<UniqueFd> fds;
      fds.emplace_back(::fcntl(file.fd(), F_DUPFD_CLOEXEC, 0));
      // One whose request throws has its connection ended.
      bool there = scarce(kAsks, [&] {
        node.send(client, shm::RegisterBuffer{4096, "test"}, std::move(fds));
      });
      EXPECT_EQ(node.held.contains(client), !node.apart.empty());
      work(kRegisters);
      EXPECT_FALSE(node.held.contains(client));
      const auto reply = node.take<shm::RegisterBufferReply>(client);
      const auto failed = [&] {
        return node.take<shm::ErrorReply>(client) || node.take<shm::SessionFailed>(client);
      };
      EXPECT_EQ(there, reply || failed()) << "it is answered";
      if (reply) {
        there = scarce(kGivesBack, [&] {
          node.send(client, shm::DeregisterBuffer{reply->handle});
          node.step();
        });
        work(kDeregisters);
        if (there && stage == kDeregisters) {
          EXPECT_TRUE(node.take<shm::Done>(client) || failed()) << "it is answered";
        }
      }
      if (!scarce(kGoes, [&] { node.hang_up(client); }))
        node.plane->on_client_closed(client, "gone");
      do {
        node.wait(100);
      } while (node.step() || node.run_apart());
      node.expect_nothing_left();
    }
    EXPECT_GT(nth, 3u) << stage;
  }
}

}  // namespace
}  // namespace mk::daemon::test
