/// \file
/// Real daemons that can be killed, stopped, started again and cut off, and what they hold.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/tools/launch/process.h"
#include "shm/host/result.h"

namespace mk::faults {

/// What a daemon holds of the system, gRPC's own pools left out.
struct Holdings {
  std::size_t descriptors = 0, memory_files = 0, sockets = 0, mapped_files = 0, threads = 0;
  std::size_t sessions = 0;  ///< as mkctl shows
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
  /// Waits for its end after a signal that ends it.
  bool gone(std::uint32_t node);
  bool running(std::uint32_t node);
  pid_t pid(std::uint32_t node) const { return daemons_[node]->pid(); }
  std::string socket(std::uint32_t node) const;
  std::uint32_t size() const { return static_cast<std::uint32_t>(daemons_.size()); }
  std::string log(std::uint32_t node) const;
  /// Every daemon that runs is connected to every other one.
  bool connected();

  Holdings holdings(std::uint32_t node);
  /// What they hold now is what they are to hold after each fault.
  void take_baseline();
  /// Empty when every daemon comes back to its baseline in time; else what differs.
  std::string compare_with_baseline();

  /// Takes the link between the namespaces down, and up again.
  void cut(bool down);

 private:
  std::string ctl(std::uint32_t node, const std::string& arguments);
  std::size_t files_in_folder() const;

  const Programs programs_;
  const std::string folder_;
  const bool namespaces_;
  const std::string prefix_;  ///< of the namespaces' names
  std::vector<std::optional<tools::Process>> daemons_;
  std::vector<Holdings> baseline_;
  std::size_t files_ = 0;
};

/// Runs a shell command; its exit status.
int shell(const std::string& command);

}  // namespace mk::faults
