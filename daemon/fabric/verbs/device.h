/// \file
/// One opened RDMA port: what was chosen and why, and what it can do. All objects of an endpoint
/// and all registered memory hold it.
#pragma once

#include <memory>
#include <string>

#include "daemon/fabric/verbs/handle.h"
#include "daemon/fabric/verbs/queue_pair.h"
#include "daemon/fabric/verbs/wire.h"

namespace mk::fabric::verbs {

class Device {
 public:
  /// Opens the port of `config.rail` by the rules of selection.h. kUnsupported when this machine
  /// has no usable RDMA port.
  static Result<std::shared_ptr<const Device>> open(const EndpointConfig& config);

  ibv_context* context() const { return context_.get(); }
  ibv_pd* domain() const { return domain_.get(); }
  const LocalPath& path() const { return path_; }
  /// "mlx5_0:1"
  const std::string& name() const { return name_; }
  /// What was chosen and why, one line.
  const std::string& explanation() const { return explanation_; }
  /// This port's part of an endpoint's address.
  Address address() const;

  std::uint32_t work_requests_max() const { return work_requests_max_; }
  std::uint32_t completions_max() const { return completions_max_; }
  std::uint32_t shared_receives_max() const { return shared_receives_max_; }

  /// Whether the GID that peers know is still in the table.
  bool gid_unchanged() const;
  /// Whether the partition is still at its place in the table.
  bool pkey_unchanged() const;

  Result<RegionHandle> register_memory(std::byte* address, std::uint64_t bytes, int access) const;

 private:
  Status open_port(const VerbsOptions& options, const std::string& why);

  ContextHandle context_;
  DomainHandle domain_;
  LocalPath path_;
  std::string name_;
  std::string explanation_;
  std::uint32_t lid_ = 0;
  std::uint32_t pkey_ = 0;
  std::uint32_t work_requests_max_ = 0;
  std::uint32_t completions_max_ = 0;
  std::uint32_t shared_receives_max_ = 0;
};

}  // namespace mk::fabric::verbs
