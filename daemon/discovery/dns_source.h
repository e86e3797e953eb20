/// \file
/// Discovery by DNS: the addresses of a name (a Kubernetes headless service), each asked over the
/// Peer service which node it is. DNS holds no node ids, and pods come and go under any address.
///
/// With TLS, a daemon is asked that shows a certificate for the name it was found under, which all
/// may share. What it then says counts only for a node whose own name its certificate holds, too
/// (PeerConfig::name, by node_name_of).
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/discovery/discovery.h"
#include "daemon/discovery/resolver.h"
#include "daemon/rpc/tls_reader.h"
#include "proto/mkernel/v1/peer.grpc.pb.h"

namespace mk::daemon {

class DnsSource final : public DiscoverySource {
 public:
  /// `config`: discovery.dns, checked.
  DnsSource(const Config& config, const DiscoverySelf& self, const TlsTexts& tls);

  /// Nodes that answered now or did before, while DNS has their address; an address that has never
  /// answered is left out. Two daemons that answer with one node id, or one with ours, are an error
  /// that names them. An address that does not answer now yields to one that does.
  Result<std::vector<PeerConfig>> look() override;
  /// Those whose certificate speaks for another node than they say they are: they are left out.
  std::string remark() const override;
  /// Addresses of the last look that have never answered.
  std::vector<Address> silent() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Host {
    DnsAnswer answer;
    std::unique_ptr<::mkernel::v1::Peer::Stub> stub;
    bool known = false;  ///< it has said who it is
    std::uint32_t node = 0;
    std::uint64_t generation = 0;
    bool answers = false;        ///< it has said so when it was asked last
    Clock::time_point answered;  ///< when it said so last
    std::string trouble;         ///< with its certificate
  };
  /// Asks all of them at once who they are.
  void identify(const std::vector<Host*>& hosts);
  /// Those known as one node under different generations, or as this node under another.
  std::vector<Host*> rivals();
  /// Channels show and trust what the files of [tls] had when they were last read.
  void renew_tls();

  const Config config_;
  const DnsQuestion question_;
  const std::string server_;
  const DiscoverySelf self_;
  TlsReader tls_files_;
  TlsTexts tls_;                       ///< of the channels in `hosts_`
  std::map<std::string, Host> hosts_;  ///< by address
};

}  // namespace mk::daemon
