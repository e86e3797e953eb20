/// \file
/// Which daemons a command is for: flags, environment, configuration.
#pragma once

#include <string>
#include <vector>

#include "daemon/mkctl/daemon.h"
#include "shm/host/result.h"

namespace mk::mkctl {

/// mkerneld's port when an address names none.
inline constexpr const char* kPortDefault = "7171";
inline constexpr const char* kSystemConfig = "/etc/mkernel/mkerneld.toml";
/// Daemons of one command.
inline constexpr std::size_t kTargetsMax = 4096;

struct TargetFlags {
  std::string address, config, timeout = "5s";
  std::string host;   ///< NAME or NAME:PORT
  std::string hosts;  ///< several, with commas; @FILE: one per line
  std::string tls_cert, tls_key, tls_ca;
};

/// --hosts, --host or --address (one of them), else what the configuration says: never empty.
Result<std::vector<Target>> find_targets(const TargetFlags& flags);

/// The names in --hosts. Of a file, "#" begins a comment.
Result<std::vector<std::string>> split_hosts(const std::string& hosts);
/// A host's address: the port may be left out.
std::string with_port(const std::string& host);

}  // namespace mk::mkctl
