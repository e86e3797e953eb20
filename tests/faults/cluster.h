/// \file
/// Real daemons that can be killed, stopped, started again and cut off, and what they hold.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/tools/launch/process.h"
#include "shm/host/result.h"

namespace mk::faults {

using Clock = std::chrono::steady_clock;

/// What a daemon holds of the system, gRPC's own pools left out.
struct Holdings {
  std::size_t descriptors = 0, memory_files = 0, sockets = 0, mapped_files = 0, threads = 0;
  friend bool operator==(const Holdings&, const Holdings&) = default;
  /// Nothing more than before; memory and threads exactly as before.
  bool within(const Holdings& before) const;
  std::string text() const;
};

struct Programs {
  std::string mkerneld, mkctl, rank;
};

class Cluster {
 public:
  /// Sockets, logs and configurations go to `folder`. `namespaces`: the daemons speak TCP and
  /// libfabric's tcp to each other, each in a network namespace of its own (two nodes, root only).
  Cluster(Programs programs, std::string folder, std::uint32_t nodes, bool namespaces = false);
  ~Cluster();

  Status start(std::uint32_t node);
  void signal(std::uint32_t node, int number);
  /// SIGKILL; returns when a client that was connected could see it: when the kernel closed the
  /// daemon's end. (A process that is not let run does not die either.)
  Clock::time_point kill(std::uint32_t node);
  /// Waits for its end after a signal that ends it.
  bool gone(std::uint32_t node);
  bool running(std::uint32_t node);
  pid_t pid(std::uint32_t node) const { return daemons_[node]->pid(); }
  std::string socket(std::uint32_t node) const;
  std::uint32_t size() const { return static_cast<std::uint32_t>(daemons_.size()); }
  /// The end of every daemon's log.
  std::string logs() const;
  /// When this node's daemon first wrote a line with `text`, of those written since `since`.
  std::optional<Clock::time_point> logged(std::uint32_t node, const std::string& text,
                                          Clock::time_point since) const;
  /// Every daemon that runs is connected to every other one.
  bool connected();
  /// As mkctl shows; none when it shows nothing.
  std::optional<std::size_t> sessions(std::uint32_t node);

  Holdings holdings(std::uint32_t node) const;
  /// What the daemon holds when it has come to rest is what it is to hold after each fault.
  void take_baseline(std::uint32_t node);
  void take_baselines();
  /// Empty when every daemon comes back to its baseline in time; else what differs.
  std::string compare_with_baselines();

  /// Takes the link between the namespaces down, and up again.
  void cut(bool down);

 private:
  struct Baseline {
    Holdings holdings;
    std::optional<std::size_t> sessions;
  };
  std::string ctl(std::uint32_t node, const std::string& arguments);
  std::string log_path(std::uint32_t node) const;
  std::size_t files_in_folder() const;

  const Programs programs_;
  const std::string folder_;
  const bool namespaces_;
  const std::string prefix_;  ///< of the namespaces' names
  std::vector<std::optional<tools::Process>> daemons_;
  std::vector<Baseline> baselines_;
  std::size_t files_ = 0;
};

/// Runs a shell command; its exit status.
int shell(const std::string& command);
/// What it writes.
std::string output_of(const std::string& command);

}  // namespace mk::faults
