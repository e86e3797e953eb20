/// \file
/// What Prometheus sees of a daemon: one look at its counters, as metric families, and the HTTP
/// endpoint that serves them.
///
/// Looking costs the proxies nothing but the reads of their counters' cache lines: everything is
/// computed on the endpoint's own thread, from a snapshot that the control thread makes.
#pragma once

#include <prometheus/metric_family.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/config/address.h"
#include "daemon/control/control_plane.h"
#include "daemon/proxy/stats.h"
#include "shm/host/result.h"

namespace mk::daemon {

/// Another daemon, as this one's transport knows it.
struct PeerMetrics {
  NodeId node = 0;
  bool up = false;
  std::uint64_t messages_sent = 0, messages_received = 0, breaks = 0;
};

/// Reloads of the configuration since the start.
struct ReloadMetrics {
  std::uint64_t succeeded = 0, refused = 0;
  bool last_succeeded = true;
};

/// The certificates of [tls].
struct CertificateMetrics {
  std::uint64_t faults = 0;
  std::optional<std::int64_t> expires;  ///< Unix seconds
};

/// One look.
struct MetricsSample {
  NodeId node = 0;
  std::string version, build, fabric;
  double start_time_seconds = 0;  ///< of the daemon, since the epoch
  bool waiting = false;           ///< for its network: then only what does not need that is told
  std::uint32_t sessions_max = 0;
  std::optional<ControlSnapshot> control;  ///< nothing when the control thread did not answer
  std::vector<const ProxyStats*> rails;    ///< index = rail
  std::vector<PeerMetrics> peers;
  ReloadMetrics reloads;
  std::optional<CertificateMetrics> certificates;  ///< nothing without TLS
};

/// The sample as Prometheus wants it: names and base units by its rules. Every series carries the
/// label `node`, and others only with bounded values (rail, peer, job, rank, lane, state, result).
std::vector<prometheus::MetricFamily> to_families(const MetricsSample& sample);

/// Serves /metrics over HTTP.
class MetricsEndpoint {
 public:
  /// `sample` is called on the endpoint's thread, once per scrape, until this is destroyed.
  /// `address` is HOST:PORT on a loopback interface. Port 0: any free one.
  static Result<std::unique_ptr<MetricsEndpoint>> listen(const Address& address,
                                                         std::function<MetricsSample()> sample);
  ~MetricsEndpoint();

  /// With the real port.
  const Address& address() const;

 private:
  class Impl;
  explicit MetricsEndpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
