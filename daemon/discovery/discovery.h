/// \file
/// Who the other daemons of the cluster are, while that changes: a source is looked at again and
/// again. Its users get the list whenever it differs. A static list needs none of this.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/control/log.h"
#include "daemon/rpc/grpc_channel.h"

namespace mk::daemon {

/// This daemon, as the others are to find it.
struct DiscoverySelf {
  std::uint32_t node = 0;
  std::uint64_t generation = 0;
  Address advertise;
  std::string version{};  ///< for users who look at etcd
};

/// Where the list comes from. Used by one thread; looking may take some seconds.
class DiscoverySource {
 public:
  virtual ~DiscoverySource() = default;
  /// The other nodes, ascending by id, each once. An error says what could not be asked: the last
  /// list stays in force then, since a name server that is down says nothing about the nodes.
  virtual Result<std::vector<PeerConfig>> look() = 0;
  /// What an administrator should know of a look that gave a list all the same; empty: nothing.
  virtual std::string remark() const { return {}; }
  /// Ends a look that waits for somebody; from any thread, once. Only `leave` is called after it.
  virtual void cancel() {}
  /// This daemon is leaving for good; the others need not find that out by waiting.
  virtual void leave() {}
};

/// The source that the configuration names, or null for "static".
Result<std::unique_ptr<DiscoverySource>> open_discovery(const Config& config,
                                                        const DiscoverySelf& self,
                                                        const TlsTexts& tls);

/// Looks at a source every `interval` on a thread of its own.
class Discovery {
 public:
  using Sink = std::function<void(std::vector<PeerConfig> nodes)>;

  /// `sink` is called on that thread with the whole list, first when the source has answered, then
  /// whenever it differs. `log` is called on that thread, too.
  Discovery(std::unique_ptr<DiscoverySource> source, std::chrono::nanoseconds interval, Sink sink,
            LogSink log);
  ~Discovery();  ///< stop()

  /// Ends the looking, then leaves; the sink is not called afterwards. Waits for a look under way.
  void stop();
  /// Why the last look failed, or what is wrong with what it found; empty: nothing is.
  std::string trouble() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
