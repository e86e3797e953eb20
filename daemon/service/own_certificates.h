/// \file
/// What is wrong with the daemon's own certificate files: for its status, log, metrics and health.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "daemon/metrics/metrics.h"
#include "daemon/service/log.h"
#include "daemon/tls/own_files.h"
#include "daemon/tls/peer_watch.h"

namespace mk::daemon {

/// Thread-safe.
class OwnCertificates {
 public:
  explicit OwnCertificates(Logger& logger) : logger_(logger) {}

  /// After a look: writes what is new to the log.
  void note(const TlsReport& report);
  /// A sentence each.
  std::vector<std::string> faults() const;
  /// Nobody can be served at the peers' address with the files as they are.
  bool dead() const { return !why_dead().empty(); }
  std::string why_dead() const;
  CertificateMetrics metrics() const;

 private:
  Logger& logger_;
  mutable std::mutex mutex_;
  TlsReport report_;
};

}  // namespace mk::daemon
