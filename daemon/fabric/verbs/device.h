/// \file
/// One opened RDMA port: what was chosen and why, and what it can do. All objects of an endpoint
/// and all registered memory hold it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "daemon/fabric/verbs/handle.h"
#include "daemon/fabric/verbs/queue_pair.h"
#include "daemon/fabric/verbs/selection.h"
#include "daemon/fabric/verbs/wire.h"

namespace mk::fabric::verbs {

/// The ports of all of this machine's devices. A device that cannot be opened, and a port that does
/// not tell its state, is there with its trouble.
std::vector<PortEntry> read_ports();

class Device {
 public:
  /// Opens the port of `config.rail` by the rules of selection.h. kUnsupported when this machine
  /// has no usable RDMA port. `version`: of its first address.
  static Result<std::shared_ptr<Device>> open(const EndpointConfig& config,
                                              std::uint32_t version = 0);

  ibv_context* context() const { return context_.get(); }
  ibv_pd* domain() const { return domain_.get(); }
  std::uint8_t port() const { return path_.port; }
  /// "mlx5_0:1"
  const std::string& name() const { return name_; }
  /// As it was when it was opened.
  const PortEntry& entry() const { return entry_; }

  // -- any thread: these change when the port gets another address --
  LocalPath path() const;
  /// What was chosen and why, one line.
  std::string explanation() const;
  /// This port's part of an endpoint's address.
  Address address() const;
  /// Looks again for the LID, and for the GID and the partition by the rules of the start. Whether
  /// peers have to be told; an error: there is none to speak from now, and nothing can be connected
  /// until there is.
  Result<bool> relocate();
  /// Whether the last look found all.
  bool located() const;
  /// The same, or why not.
  Status check_located() const;
  /// Whether the port's link is up, as the device says now.
  Status check_up() const;
  /// Whether the device still answers; one that is gone refuses every call.
  Status check_alive() const;

  std::uint32_t work_requests_max() const { return work_requests_max_; }
  std::uint32_t completions_max() const { return completions_max_; }
  std::uint32_t shared_receives_max() const { return shared_receives_max_; }
  /// The longest write that is one request.
  std::uint64_t message_bytes_max() const { return message_bytes_max_; }

  /// Whether the GID that peers know is still at its place in the table, and is no makeshift (a
  /// link-local address, where the rules have found a better one meanwhile).
  bool gid_unchanged() const;
  /// Whether the partition is still at its place in the table: a queue pair names the place.
  bool pkey_unchanged() const;

  Result<RegionHandle> register_memory(std::byte* address, std::uint64_t bytes, int access) const;

 private:
  Status open_port(const VerbsOptions& options, const std::string& why);
  /// Where the port is now, by the rules.
  struct Place {
    ibv_gid_entry gid{};
    std::uint32_t lid = 0;
    std::uint16_t pkey_index = 0;
    std::uint32_t pkey = 0;
    std::string why;
  };
  Result<Place> find_place() const;
  void settle(const Place& place);

  ContextHandle context_;
  DomainHandle domain_;
  PortEntry entry_;
  std::string name_;
  std::string port_why_;
  std::int32_t wanted_gid_ = -1;
  std::uint32_t wanted_pkey_ = 0;
  /// Of what changes: the path's GID and partition, the LID, and what is said of them.
  mutable std::mutex mutex_;
  LocalPath path_;
  std::string explanation_;
  std::uint32_t lid_ = 0;
  std::uint32_t version_ = 0;
  bool located_ = false;
  std::string no_place_;  ///< while not located
  std::uint32_t pkey_ = 0;
  std::uint32_t work_requests_max_ = 0;
  std::uint32_t completions_max_ = 0;
  std::uint32_t shared_receives_max_ = 0;
  std::uint64_t message_bytes_max_ = 0;
};

}  // namespace mk::fabric::verbs
