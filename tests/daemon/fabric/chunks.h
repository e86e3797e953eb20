/// \file
/// Writes into slots that are used again and again, as banks are. Two threads, as two proxies: the
/// receiver compares every byte of a chunk when it first sees the chunk's own flag, whatever else
/// is under way, then poisons the slot and gives it free.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/daemon/fabric/fabric_fixture.h"

namespace mk::fabric {

/// How many chunks a test sends over `setup`: an emulated machine with the kernel's software NIC
/// moves tens of MB/s, ofi_rxd waits long for what UDP dropped, and sanitizers slow all of them
/// down by five to twenty times.
inline std::uint32_t chunk_count(const FabricSetup& setup) {
  if (setup.config.fabric == "verbs" && !kSoftNic) return 5'000;
  if (setup.name == "ofi_udp") return 20'000;
#ifdef MK_SANITIZED
  return 20'000;
#else
  return 100'000;
#endif
}

class ChunkRun {
 public:
  ChunkRun(Node& from, Node& to, std::uint32_t chunks,
           std::chrono::milliseconds limit = patience() * std::chrono::seconds(60))
      : count_(chunks),
        limit_(limit),
        a_(from),
        b_(to),
        link_(join(from, to)),
        source_(from.memory(place(kSlots))),
        target_(to.memory(place(kSlots))),
        remote_(import(from, link_, target_)) {}

  /// Writes under way name the memory, whatever the run has come to.
  ~ChunkRun() {
    a_.endpoint->disconnect(link_.id);
    EXPECT_TRUE(pump({&a_, &b_}, [&] {
      return a_.completed.size() + a_.failed.size() >= posted_ && a_.settled();
    })) << "writes are lost";
    for (int i = 0; i < 1000; ++i) b_.poll();  // into the memory of GPUs
  }
  ChunkRun(const ChunkRun&) = delete;
  ChunkRun& operator=(const ChunkRun&) = delete;

  /// What was wrong first; empty: nothing.
  std::string run() {
    {
      const std::jthread receiver([this](const std::stop_token& stop) { receive(stop); });
      send();
    }
    a_.on_event = {};
    if (!wrong_.empty()) return wrong_;
    if (a_.completed.size() != count_ || a_.total(a_.completed) != count_ || !a_.failed.empty())
      return "not every write was completed once";
    if (!b_.ordered && (b_.arrivals.size() != count_ || b_.total(b_.arrivals) != count_))
      return "not every arrival was reported once";
    return {};
  }

 private:
  static constexpr std::uint32_t kSlots = 512;
  static constexpr std::uint32_t kLargeMax = 70'000, kMiddleMax = 9'000, kSmallMax = 257;
  static constexpr std::uint32_t kGuard = 16;  ///< bytes behind a chunk that must stay poisoned

  /// Where a slot begins: one in 16 has room for large chunks.
  static constexpr std::uint64_t place(std::uint32_t slot) {
    constexpr std::uint64_t kLarge = kLargeMax + kGuard, kMiddle = kMiddleMax + kGuard;
    const std::uint64_t behind = slot % 16;
    return slot / 16 * (kLarge + 15 * kMiddle) +
           (behind == 0 ? 0 : kLarge + (behind - 1) * kMiddle);
  }

  /// The bytes of chunk `number`, none of them poison: most fit into one packet, one in 8 has
  /// several, one in 256 is larger than what providers send at once.
  static std::span<const std::byte> bytes_of(std::uint32_t number) {
    static const std::vector<std::byte> all = [] {
      std::vector<std::byte> random((1 << 16) + kLargeMax);
      fill_random(random, 11);
      for (std::byte& byte : random) byte = byte == kPoison ? std::byte{0} : byte;
      return random;
    }();
    std::minstd_rand random(number + 1);
    random.discard(2);
    const auto below = [&](std::uint32_t limit) {
      return static_cast<std::uint32_t>(random() >> 8) % limit;
    };
    const std::uint32_t kind = below(16);
    std::uint32_t bytes = 1 + below(kSmallMax);
    if (number % 16 == 0 && kind == 0) {
      bytes = kMiddleMax + 1 + below(kLargeMax - kMiddleMax);
    } else if (kind < 2) {
      bytes = kSmallMax + 1 + below(kMiddleMax - kSmallMax);
    }
    return std::span(all).subspan(below(1 << 16), bytes);
  }

  void send() {
    std::vector<bool> sent(kSlots, true);  // the slot's last write is completed
    std::uint32_t completed = 0;
    a_.on_event = [&](const Event& event) {
      if (event.kind != Event::Kind::kCompleted) return;
      sent[event.cookie % kSlots] = true;
      ++completed;
    };
    const auto deadline = std::chrono::steady_clock::now() + limit_;
    while (!over_ && (shown_ < count_ || completed < count_ || !a_.settled())) {
      if (std::chrono::steady_clock::now() > deadline)
        return blame("only " + std::to_string(shown_) + " of " + std::to_string(count_) +
                     " arrived in time");
      std::vector<Write> batch;
      for (std::uint32_t next = posted_; batch.size() < shm::kBatchMax && next < count_; ++next) {
        const std::uint32_t slot = next % kSlots;
        if (!sent[slot] || times_shown_[slot].load(std::memory_order_acquire) != next / kSlots)
          break;
        const std::span<const std::byte> bytes = bytes_of(next);
        std::memcpy(source_.data() + place(slot), bytes.data(), bytes.size());
        batch.push_back(make_write(link_, slot, 1 + next / kSlots, next, source_, place(slot),
                                   *remote_, place(slot),
                                   static_cast<std::uint32_t>(bytes.size())));
      }
      const std::size_t taken = batch.empty() ? 0 : a_.endpoint->post(link_.id, batch);
      for (std::size_t i = 0; i < taken; ++i) sent[posted_++ % kSlots] = false;
      if (a_.poll() == 0 && taken == 0) std::this_thread::yield();
      if (!a_.failed.empty()) return blame("a write failed");
    }
  }

  void receive(const std::stop_token& stop) {
    std::array<std::uint32_t, kSlots> awaited;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) awaited[slot] = slot;
    while (!stop.stop_requested()) {
      b_.poll();
      bool any = false;
      for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        const std::uint32_t number = awaited[slot], epoch = 1 + number / kSlots;
        const std::uint32_t flag = b_.flag(slot);
        if (flag == epoch - 1) continue;
        if (flag != epoch || number >= count_)
          return blame("flag " + std::to_string(slot) + " shows " + std::to_string(flag) +
                       " where chunk " + std::to_string(number) + " was awaited");
        const std::span<const std::byte> bytes = bytes_of(number);
        std::byte* const there = target_.data() + place(slot);
        if (std::memcmp(there, bytes.data(), bytes.size()) != 0)
          return blame("chunk " + std::to_string(number) + " of " + std::to_string(bytes.size()) +
                       " bytes was not whole when its flag showed");
        for (std::uint32_t i = 0; i < kGuard; ++i) {
          if (there[bytes.size() + i] != kPoison)
            return blame("chunk " + std::to_string(number) + " wrote beyond its end");
        }
        std::memset(there, std::to_integer<int>(kPoison), bytes.size());
        awaited[slot] += kSlots;
        times_shown_[slot].store(epoch, std::memory_order_release);
        ++shown_;
        any = true;
      }
      if (!any) std::this_thread::yield();
    }
  }

  /// By either thread; the first word counts.
  void blame(const std::string& what) {
    if (!over_.exchange(true)) wrong_ = what;
  }

  const std::uint32_t count_;
  const std::chrono::milliseconds limit_;
  Node &a_, &b_;
  const TestLink link_;
  const Memory source_, target_;
  const std::unique_ptr<RemoteRegion> remote_;
  std::array<std::atomic<std::uint32_t>, kSlots> times_shown_{};
  std::atomic<std::uint32_t> shown_{0};
  std::atomic<bool> over_{false};
  std::uint32_t posted_ = 0;
  std::string wrong_;  ///< read when both threads are through
};

}  // namespace mk::fabric
