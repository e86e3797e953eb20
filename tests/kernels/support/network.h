/// \file
/// The daemons and the network of a cluster, as unfriendly as their contract allows: commands wait
/// for any time, are done in any order, and source bytes are read at the last moment. Data is
/// always there before its flag.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "shm/command.h"
#include "shm/ring.h"
#include "tests/kernels/support/cluster.h"

namespace mk::kernels::testing {

/// A flag that the test has set beyond any epoch.
inline constexpr std::uint32_t kForged = 1u << 30;

struct NetworkOptions {
  /// Rebuild epochs from the ten bits an immediate has room for, as the proxy of an unordered
  /// fabric does.
  bool immediates = false;
  // What no network does; a test that does not notice is blind.
  bool complete_early = false;  ///< count commands as completed when they are taken
  bool flags_first = false;  ///< show a chunk's flag at once and bring its bytes later; not headers
  bool keep_forged_flags = false;   ///< leave flags alone that the test has set to kForged
  bool truncate_one_chunk = false;  ///< move only the first 64 bytes (the header) of a larger one
  bool swap_in_one_chunk = false;   ///< exchange the halves of a chunk, but for its first 64 bytes
};

class Network {
 public:
  Network(Cluster& cluster, std::uint64_t seed, const NetworkOptions& options = {});

  /// Whether a command waits in a ring or on the way.
  bool busy() const;
  /// Takes a command from some ring, or delivers one that was taken, or half of that: its source
  /// may be reused long before it arrives. Returns whether it did.
  bool step();
  /// Takes what is in the rings, delivers nothing.
  bool take_all();

  /// Payload and commands taken from that rank so far.
  std::uint64_t bytes_of(std::uint32_t rank) const { return bytes_[rank]; }
  std::uint64_t commands_of(std::uint32_t rank) const { return commands_[rank]; }
  /// Empty, or the first breach of the contract by a sender (bad handle, out of bounds, a flag that
  /// went back, ...).
  const std::string& complaint() const { return complaint_; }

 private:
  struct Lane {
    std::uint32_t rank = 0;
    shm::RingConsumer consumer;
    std::deque<bool> done;  ///< of the commands taken and not yet completed, in ring order
    std::uint64_t first_pending = 0;  ///< sequence of done.front()
  };
  struct Pending {
    std::size_t lane = 0;
    std::uint64_t sequence = 0;
    shm::Command command;
    bool read = false;  ///< its source is, and it is completed; the peer has nothing of it yet
    std::uint32_t escapes = 0;       ///< so often it is not delivered when its turn comes
    std::vector<std::byte> payload;  ///< of what is read
  };

  bool take(std::size_t lane);
  /// Reads the source of a command and completes it.
  void read(Pending& pending);
  void deliver(std::list<Pending>::iterator which);
  /// Shows the command's flag.
  void show(const shm::Command& command);
  bool shows_first(const shm::Command& command) const {
    return options_.flags_first && command.bytes > 64;
  }
  void complete(const Pending& pending);
  void check(std::uint32_t rank, const std::uint64_t* words, const shm::Command& command);
  void complain(std::string text);

  Cluster& cluster_;
  NetworkOptions options_;
  std::mt19937_64 random_;
  std::vector<Lane> lanes_;
  std::list<Pending> pending_;
  std::vector<std::uint64_t> bytes_;
  std::vector<std::uint64_t> commands_;
  std::vector<std::vector<std::uint32_t>>
      granule_epochs_;  ///< by rank and granule: the last epoch seen
  bool truncated_ = false;
  bool swapped_ = false;
  std::string complaint_;
};

/// A Network with a thread that drives it, now and then falling asleep.
class NetworkThread {
 public:
  NetworkThread(Cluster& cluster, std::uint64_t seed, const NetworkOptions& options = {});
  /// Stops at once; what is on the way is lost.
  ~NetworkThread();
  /// Ends the thread; the network may then be asked what it saw.
  Network& stop();

 private:
  Network network_;
  std::atomic<bool> quit_{false};
  std::thread thread_;
};

}  // namespace mk::kernels::testing
