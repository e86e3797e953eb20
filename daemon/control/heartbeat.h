/// \file
/// The heartbeat words of all live segments. They are written by the caller of `beat`, so that
/// clients see a living daemon while the control thread is held up by a slow peer. They are written
/// only as long as the control thread shows that it gets on (`turn`): a daemon that hangs must look
/// like one.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>

namespace mk::daemon::control {

/// Thread-safe.
class HeartbeatTable {
 public:
  /// Without a turn for so long, the beats stop.
  static constexpr std::uint64_t kHungAfterNs = 30'000'000'000;

  /// One word is written to as long as its entry lives. Movable; may be empty.
  class Entry {
   public:
    Entry() = default;
    Entry(Entry&& other) noexcept;
    Entry& operator=(Entry&& other) noexcept;
    ~Entry();

   private:
    friend class HeartbeatTable;
    Entry(HeartbeatTable& table, std::uint64_t* word) : table_(&table), word_(word) {}
    HeartbeatTable* table_ = nullptr;
    std::uint64_t* word_ = nullptr;
  };

  /// The table outlives the entry, and the word its entry. The first beat is made at once.
  Entry add(std::uint64_t* word, std::uint64_t now_ns);
  /// The control thread gets on.
  void turn(std::uint64_t now_ns);
  void beat(std::uint64_t now_ns);

 private:
  std::mutex mutex_;
  std::set<std::uint64_t*> words_;
  std::uint64_t last_turn_ns_ = 0;
};

}  // namespace mk::daemon::control
