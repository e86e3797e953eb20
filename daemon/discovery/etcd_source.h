/// \file
/// Discovery by etcd (v3): every daemon keeps a key of its own under a lease that it renews, and
/// reads the others'. A daemon that dies stops renewing, and its key goes with the lease.
///
/// `<prefix><node id>` holds JSON: {"address": "10.0.0.2:7171", "name": "", "version": "0.1.0"};
/// readers ignore what they don't know.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/discovery/discovery.h"
#include "daemon/rpc/tls_reader.h"
#include "proto/etcd/rpc.grpc.pb.h"

namespace mk::daemon {

class EtcdSource final : public DiscoverySource {
 public:
  /// `config`: discovery.etcd, checked. `tls`: for etcd, which need not be the daemons' own.
  EtcdSource(const Config& config, const DiscoverySelf& self, const TlsTexts& tls);

  /// Renews the lease, registers this daemon when it is not, and reads the list, at the first
  /// endpoint that answers. An error, too, when another daemon (by its address) has our node id.
  Result<std::vector<PeerConfig>> look() override;
  /// The list alone: nothing is registered, and no lease taken.
  Result<std::vector<PeerConfig>> list();
  void cancel() override;
  /// Gives the lease back: our key goes at once.
  void leave() override;

 private:
  class Call;
  struct Endpoint {
    std::string name;
    std::unique_ptr<etcdserverpb::KV::Stub> kv;
    std::unique_ptr<etcdserverpb::Lease::Stub> lease;
  };
  using Nodes = Result<std::vector<PeerConfig>>;
  void open_endpoints(const TlsTexts& tls);
  /// The endpoints' channels show and trust what etcd's files had when they were last read.
  void renew_tls();
  /// What `ask` gets from the first endpoint that answers.
  Nodes ask_in_turn(Nodes (EtcdSource::*ask)(Endpoint&));
  Nodes look_at(Endpoint& endpoint);
  Nodes read_list(Endpoint& endpoint);
  Status renew(Endpoint& endpoint);
  /// Whether the lease still exists.
  Result<bool> keep_alive(Endpoint& endpoint);
  Status put(Endpoint& endpoint);
  /// Puts our key when its last change was `revision` (0: there is none), else answers what is
  /// there.
  Result<std::optional<etcdserverpb::KeyValue>> put_if_unchanged(Endpoint& endpoint,
                                                                 std::int64_t revision);
  std::string key() const { return prefix_ + std::to_string(self_.node); }

  const Config config_;
  const std::string prefix_;
  const std::int64_t ttl_seconds_;
  const DiscoverySelf self_;
  const std::string value_;
  TlsReader tls_files_;
  TlsTexts tls_;  ///< of the channels in `endpoints_`
  std::vector<Endpoint> endpoints_;
  std::size_t first_ = 0;   ///< the endpoint that answered last
  std::int64_t lease_ = 0;  ///< 0: none
  bool registered_ = false;
  std::mutex mutex_;
  Call* call_ = nullptr;  ///< under way
  bool cancelled_ = false;
};

}  // namespace mk::daemon
