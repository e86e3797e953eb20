/// \file
/// A daemon's thread that looks at certificates: at its own files, which may expire or be replaced
/// while it runs, and at those of peers that are not connected.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config/address.h"
#include "daemon/tls/certificates.h"

namespace mk::daemon {

class CertificateWatch {
 public:
  struct Target {
    std::uint32_t node = 0;
    Address address;
    std::string name;  ///< that its certificate must be made out to
  };
  /// All are called on the watch's thread, and never after `stop` has returned.
  struct Callbacks {
    std::function<std::vector<Target>()> targets;   ///< peers that are not connected now
    std::function<void(const TlsReport& own)> own;  ///< after each look at the own files
    /// After each look at a peer. Empty: TLS is not what keeps it away.
    std::function<void(std::uint32_t node, const std::string& trouble)> peer;
  };

  /// Looks at `own` now, and every `interval`; each time at one of the targets, in turn.
  CertificateWatch(TlsFiles own, Callbacks callbacks,
                   std::chrono::milliseconds interval = std::chrono::seconds(2));
  ~CertificateWatch() { stop(); }
  /// Returns within a moment, even while a name is being looked up or a file's mount hangs.
  void stop();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

}  // namespace mk::daemon
