/// \file
/// What tools hear from a daemon that is not ready yet, since it waits for a device or an address.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/service/grpc_server.h"

namespace mk::daemon {

/// Answers GetStatus (HEALTH_NOT_READY, and what it waits for) and GetVersion; the health check
/// says NOT_SERVING.
class WaitingAdmin {
 public:
  /// It tells addresses and fabric as they are configured.
  explicit WaitingAdmin(const Config& config);
  ~WaitingAdmin();
  /// At the Admin service's own socket, until this goes.
  Status listen(GrpcListenOptions options);
  /// Sentences for users: what it waits for, and what else is wrong. Any thread.
  void set_what(const std::string& what, std::vector<std::string> problems);

 private:
  class Service;
  std::unique_ptr<Service> service_;
  std::unique_ptr<GrpcServer> server_;  ///< gone before what it serves
};

}  // namespace mk::daemon
