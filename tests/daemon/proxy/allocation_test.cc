// Nothing is allocated between the start and the end of a session, whatever its traffic: this
// program counts every operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "daemon/fabric/null_fabric.h"
#include "shm/flag.h"
#include "tests/daemon/proxy/proxy_rig.h"

namespace {
std::atomic<std::uint64_t> g_allocations{0};
}

// Not inlined: GCC would take the malloc behind one for a mismatch with the free behind the other.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  const auto align = static_cast<std::size_t>(alignment);
  if (void* memory = std::aligned_alloc(align, (bytes + align - 1) / align * align)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace mk::daemon::test {
namespace {

/// Takes everything, and every other write only half; completes in reverse; reports an arrival for
/// each.
class MeanEndpoint final : public ScriptedEndpoint {
 public:
  MeanEndpoint() { pending_.reserve(4096); }
  std::size_t post(fabric::LinkId, std::span<const fabric::Write> writes) override {
    const std::size_t taken = ++posts_ % 2 == 0 ? writes.size() : writes.size() / 2;
    for (std::size_t i = 0; i < taken; ++i) pending_.push_back(writes[i].cookie);
    return taken;
  }
  std::size_t poll(std::span<fabric::Event> out) override {
    std::size_t count = 0;
    while (!pending_.empty() && count + 2 <= out.size()) {
      out[count++] = {.kind = fabric::Event::Kind::kCompleted, .cookie = pending_.back()};
      out[count++] = {.kind = fabric::Event::Kind::kArrival,
                      .immediate = shm::make_immediate(0, 3, ++epoch_)};
      pending_.pop_back();
    }
    return count;
  }

 private:
  std::uint64_t posts_ = 0;
  std::uint32_t epoch_ = 0;
  std::vector<std::uint64_t> pending_;
};

void expect_no_allocation(std::unique_ptr<fabric::Endpoint> endpoint) {
  TestSession first(0, {.lanes = 4, .outstanding_max = 100});
  TestSession second(1, {.weight = 3});
  FakeLocalRegion local;
  FakeRemoteRegion remote;
  std::vector<LinkStats> link_stats(3);
  std::uint64_t events = 0;
  Proxy proxy(std::move(endpoint), {}, [&](const ProxyEvent&) { ++events; });
  for (TestSession* session : {&first, &second}) {
    proxy.apply(AddSession{session->slot, &session->segment, &session->stats,
                           session->shape.outstanding_max, session->shape.weight});
    proxy.apply(BindBuffer{session->slot, kHandle, &local, kBufferBytes});
    for (std::uint16_t rank = 0; rank < 3; ++rank) {
      proxy.apply(BindPeer{session->slot, rank, rank, &link_stats[rank], 0, &remote, kFlags});
      proxy.apply(BindPeerBuffer{session->slot, rank, kHandle, &remote, kBufferBytes});
    }
  }
  proxy.step();
  const std::uint64_t before = g_allocations.load();
  std::uint64_t pushed = 0;
  for (int pass = 0; pass < 20'000; ++pass) {
    for (TestSession* session : {&first, &second}) {
      for (auto& producer : session->producers) {
        for (std::uint64_t i = 0; i < 5; ++i) {
          pushed += producer.try_push(
                        write_command(static_cast<std::uint16_t>((producer.produced + i) % 3)))
                        ? 1
                        : 0;
        }
      }
    }
    proxy.step();
  }
  EXPECT_EQ(g_allocations.load() - before, 0u);
  EXPECT_EQ(events, 0u);
  EXPECT_GT(pushed, 10'000u);
  EXPECT_GT(first.completed(), 1'000u);
}

TEST(Allocation, NoneOverTheNullFabric) { expect_no_allocation(fabric::make_null_endpoint({})); }

TEST(Allocation, NoneUnderBackPressureReorderingAndArrivals) {
  expect_no_allocation(std::make_unique<MeanEndpoint>());
}

TEST(Allocation, TheCounterCounts) {
  const std::uint64_t before = g_allocations.load();
  ::operator delete(::operator new(1));
  EXPECT_EQ(g_allocations.load() - before, 1u);
}

}  // namespace
}  // namespace mk::daemon::test
