/// \file
/// The Admin service (proto/mkernel/v1/admin.proto): what people and tools may see of a daemon.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config/compare.h"
#include "daemon/config/config.h"
#include "daemon/control/node.h"
#include "daemon/metrics/metrics.h"
#include "daemon/service/grpc_peer_transport.h"
#include "daemon/service/live_config.h"
#include "daemon/service/tls_refusals.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace mk::daemon {

/// What does not change while the daemon runs.
struct AdminInfo {
  std::string version;
  std::string listen;
  std::uint32_t sessions_max = 0;
};

/// The configuration in effect, and what its file would change now.
struct ConfigView {
  Config in_effect;
  std::string file;  ///< empty: there is none
  /// Only when asked for; an error when the file could not be taken.
  Result<std::vector<ConfigChange>> changes;
};

/// What people may ask of the daemon; called on the server's threads.
struct AdminActions {
  std::function<Status()> drain, resume;
  std::function<MetricsSample()> metrics;
  std::function<ConfigView(bool compare)> config;
  std::function<Result<JobChanged>(const JobChange&)> set_job;
  /// Of the daemon as a whole, beside those of peers and links.
  std::function<std::vector<std::string>()> problems;
  /// The one of them that keeps it from its work; empty: none.
  std::function<std::string()> not_ready;
  std::function<std::vector<TlsRefusal>()> tls_refusals;
};

class AdminService {
 public:
  /// Callers of WatchStats and WatchMetrics at once.
  static constexpr std::uint32_t kWatchersMax = 16;

  /// `node` and `peers` outlive this.
  AdminService(Node& node, const GrpcPeerTransport& peers, AdminInfo info,
               AdminActions actions = {});
  ~AdminService();  ///< after the server's shutdown

  /// To be registered with the server; its calls run on the server's own threads, at most until the
  /// control thread has answered or 5 s have passed.
  grpc::Service& service();
  /// The real address is known only when the server listens.
  void set_listen(std::string listen);
  /// Ends all calls that go on (UNAVAILABLE) and refuses new ones.
  void stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
