/// \file
/// What tools hear from a daemon that is not ready yet, since it waits for a device or an address.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "daemon/service/grpc_server.h"

namespace mk::daemon {

/// Answers GetStatus (HEALTH_NOT_READY, and what it waits for) and GetVersion; the health check
/// says NOT_SERVING.
class WaitingAdmin {
 public:
  explicit WaitingAdmin(std::uint32_t node);
  ~WaitingAdmin();
  /// At the Admin service's own socket, until this goes.
  Status listen(GrpcListenOptions options);
  /// A sentence for users. Any thread.
  void set_what(const std::string& what);

 private:
  class Service;
  std::unique_ptr<Service> service_;
  std::unique_ptr<GrpcServer> server_;  ///< gone before what it serves
};

}  // namespace mk::daemon
