/// \file
/// A throw-away cluster on this machine: one real mkerneld process per node, sockets and logs in a
/// private folder.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "client/tools/launch/process.h"
#include "shm/host/result.h"

namespace mk::tools {

struct DaemonSetOptions {
  std::uint32_t nodes = 2;
  std::uint32_t rails = 1;             ///< NICs (and proxy threads) of each node
  std::string fabric = "loopback";     ///< as mkerneld takes it; empty: as it is by itself
  std::string link_bandwidth;          ///< loopback: "2GB/s"; empty: unpaced
  std::string link_latency;            ///< loopback: "5us"; empty: none
  std::vector<std::string> arguments;  ///< more of them, of each daemon
  std::string program;  ///< path of mkerneld; empty: found beside this program or in its build tree
  std::chrono::milliseconds start_timeout{30'000};
};

class DaemonSet {
 public:
  /// Starts the daemons and waits until each one takes clients. On failure the error carries the
  /// end of the log of the daemon that failed.
  static Result<DaemonSet> start(const DaemonSetOptions& options);

  /// Where node `node`'s ranks attach, and where its Admin service listens (a gRPC target).
  const std::string& client_socket(std::uint32_t node) const { return nodes_[node].client_socket; }
  const std::string& admin_address(std::uint32_t node) const { return nodes_[node].admin_address; }
  const std::string& log_path(std::uint32_t node) const { return nodes_[node].log_path; }
  Process& process(std::uint32_t node) { return nodes_[node].process; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(nodes_.size()); }
  const std::string& folder() const { return folder_.path(); }

  /// An error naming the first daemon that has ended, with the end of its log.
  Status check();
  /// SIGTERM, then wait: every daemon drains and exits with 0, or the error says which did not.
  Status stop(std::chrono::milliseconds timeout);
  /// Leaves the folder with the logs in place.
  void keep_folder() { folder_.keep(); }

 private:
  struct Node {
    std::string client_socket;
    std::string admin_address;
    std::string log_path;
    Process process;
  };
  explicit DaemonSet(TemporaryFolder folder) : folder_(std::move(folder)) {}

  TemporaryFolder folder_;  ///< goes last: the daemons write their logs into it
  std::vector<Node> nodes_;
};

}  // namespace mk::tools
