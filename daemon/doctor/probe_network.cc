#include <chrono>
#include <future>

#include "daemon/config/discovery_section.h"
#include "daemon/doctor/probe.h"
#include "daemon/tls/handshake.h"
#include "daemon/tls/own_files.h"
#include "shm/host/protocol.h"
#include "shm/host/unix_socket.h"
#include "shm/layout.h"

namespace mk::doctor {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience(2000);

/// What the node's certificate must be made out to.
std::string name_of(const daemon::Config& config, const daemon::Sighting& node) {
  for (const daemon::PeerConfig& peer : config.peers) {
    if (peer.id == node.node) return peer.name.empty() ? peer.address.host : peer.name;
  }
  const std::string name = node.node ? daemon::node_name_of(config, *node.node) : std::string();
  return name.empty() ? node.address.host : name;
}

/// What is known of one node after a look at its address.
PeerFacts look_at_peer(const daemon::Config& config, const daemon::Sighting& node) {
  PeerFacts facts{node.node, node.address.text(), node.trouble};
  if (!facts.trouble.empty()) return facts;
  const auto connection = daemon::connect_to(node.address, kPatience);
  if (!connection) {
    facts.trouble = connection.error().message;
  } else if (!node.node) {
    facts.trouble = "accepts connections, but has not said which node it is";
  } else if (config.tls.enabled() && !node.address.unix_socket) {
    const daemon::TlsFiles own = daemon::tls_files(config);
    const Status met = daemon::try_handshake(own, daemon::read_contents(own), *connection,
                                             name_of(config, node), kPatience);
    if (!met) facts.tls_trouble = met.error().message;
  }
  return facts;
}

/// What the daemon answers to a client's first message.
Result<shm::HelloReply> greet(const std::string& socket) {
  MK_ASSIGN_OR_RETURN(auto connection, shm::FrameSocket::connect(socket, kPatience));
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  shm::Hello hello;
  hello.abi_major = shm::kAbiMajor;
  hello.abi_minor = shm::kAbiMinor;
  hello.client_version = "doctor";
  MK_RETURN_IF_ERROR(connection.send(static_cast<std::uint16_t>(shm::Hello::kType), 1,
                                     shm::encode_message(hello), {}, deadline));
  MK_ASSIGN_OR_RETURN(const shm::Frame answer, connection.receive(deadline));
  if (answer.type == static_cast<std::uint16_t>(shm::MessageType::kError)) {
    MK_ASSIGN_OR_RETURN(const shm::ErrorReply error,
                        shm::decode_message<shm::ErrorReply>(answer.payload));
    return tl::unexpected<Error>(Error{error.code, error.message});
  }
  if (answer.type != static_cast<std::uint16_t>(shm::HelloReply::kType))
    return fail(ErrorCode::kProtocol, "the program that answers there is not a mkerneld");
  return shm::decode_message<shm::HelloReply>(answer.payload);
}

}  // namespace

void probe_daemon(const daemon::Config& config, Facts& facts) {
  facts.abi_major = shm::kAbiMajor;
  facts.abi_minor = shm::kAbiMinor;
  facts.daemon.socket = config.socket.path;
  const auto reply = greet(config.socket.path);
  if (!reply) {
    facts.daemon.trouble = reply.error().message;
    return;
  }
  facts.daemon.version = reply->daemon_version;
  facts.daemon.abi_major = reply->abi_major;
  facts.daemon.abi_minor = reply->abi_minor;
}

void probe_peers(const daemon::Config& config, const FindNodes& find, Facts& facts) {
  std::vector<daemon::Sighting> nodes;
  for (const daemon::PeerConfig& peer : config.peers) nodes.push_back({peer.id, peer.address});
  if (find && config.discovery.kind != "static") {
    const auto found = find(config);
    if (found) {
      nodes = *found;
    } else {
      facts.discovery_trouble =
          fmt::format("discovery ({}): {}", config.discovery.kind, found.error().message);
    }
  }
  // All at once: the patience with one is the patience with all.
  std::vector<std::future<PeerFacts>> looks;
  for (const daemon::Sighting& node : nodes) {
    looks.push_back(
        std::async(std::launch::async, [&config, &node] { return look_at_peer(config, node); }));
  }
  for (auto& look : looks) facts.peers.push_back(look.get());
}

void probe_tls(const daemon::Config& config, Facts& facts) {
  facts.now = daemon::unix_now();
  facts.tls.configured = config.tls.enabled() || !config.discovery.etcd.cert.empty();
  if (!facts.tls.configured) return;
  facts.tls.faults = daemon::certificate_faults(config, facts.now);
  if (!config.tls.enabled()) return;
  daemon::TlsReport report = daemon::look_at(daemon::tls_files(config), facts.now);
  facts.tls.expires = report.expires;
  facts.tls.names = std::move(report.names);
  facts.tls.name_doubt = daemon::name_doubt(config, facts.now);
}

}  // namespace mk::doctor
