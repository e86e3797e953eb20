#include "daemon/service/daemon.h"

#include "daemon/service/admin_service.h"
#include "daemon/service/grpc_channel.h"
#include "daemon/service/grpc_peer_transport.h"
#include "daemon/service/grpc_server.h"
#include "daemon/service/version.h"

namespace mk::daemon {
namespace {

constexpr auto kServerGrace = std::chrono::seconds(1);

}  // namespace

NodeOptions node_options(const Config& config, Logger& logger) {
  NodeOptions options;
  options.control.node = config.node_id;
  options.control.version = version_text();
  options.control.sessions_max = config.limits.sessions;
  options.control.outstanding_max = config.limits.outstanding;
  options.control.registered_bytes_max = config.limits.registered_bytes;
  options.control.job_weight = [jobs = config.jobs](const std::string& job) {
    return job_weight(jobs, job);
  };
  options.control.log = logger.sink();
  options.loop.socket_path = config.socket.path;
  options.loop.socket_mode = config.socket.mode;
  options.rails.clear();
  for (std::uint32_t rail = 0; rail < config.fabric.rails; ++rail) {
    RailOptions one;
    one.endpoint.fabric = config.fabric.name;
    one.endpoint.rail = rail;
    one.endpoint.link_model = {config.fabric.loopback.bandwidth_bytes_per_second,
                               config.fabric.loopback.latency_ns};
    one.endpoint.provider = config.fabric.ofi.provider;
    one.endpoint.bind_address = config.fabric.ofi.bind;
    one.proxy.rail = rail;
    if (!config.proxy.cpus.empty()) one.proxy.cpu = static_cast<int>(config.proxy.cpus[rail]);
    one.proxy.batch_window_ns = config.proxy.batch_window_ns;
    one.proxy.spin_ns = config.proxy.spin_ns;
    one.proxy.sleep_ns_max = config.proxy.sleep_max_ns;
    options.rails.push_back(std::move(one));
  }
  return options;
}

/// Members in the order of their needs: what is declared later goes first.
class Daemon::Impl {
 public:
  explicit Impl(Logger& log) : logger(log) {}
  ~Impl() { stop(std::chrono::steady_clock::now()); }

  Status start(const Config& config) {
    MK_ASSIGN_OR_RETURN(const TlsTexts tls,
                        read_tls(config.tls.cert, config.tls.key, config.tls.ca));
    if (!tls.enabled() && !config.listen.local()) {
      logger.write(LogLevel::kWarning,
                   fmt::format("listening on {} without TLS: anybody on that network can speak to "
                               "this daemon",
                               config.listen.text()));
    }
    MK_ASSIGN_OR_RETURN(node, Node::create(node_options(config, logger)));
    PeerTransportOptions options;
    options.node = config.node_id;
    options.peers = config.peers;
    options.tls_cert = tls.cert;
    options.tls_key = tls.key;
    options.tls_ca = tls.ca;
    peers = std::make_unique<GrpcPeerTransport>(std::move(options), node->peer_sink(), logger);
    admin = std::make_unique<AdminService>(
        *node, *peers, AdminInfo{version_text(), config.listen.text(), config.limits.sessions});
    MK_ASSIGN_OR_RETURN(
        server, GrpcServer::listen(config.listen, tls, {&peers->service(), &admin->service()}));
    admin->set_listen(server->address().text());
    MK_RETURN_IF_ERROR(node->start(*peers));
    peers->start();
    server->set_serving(true);
    return {};
  }

  void drain() {
    if (server) server->set_serving(false);
    if (node) node->drain();
  }

  void stop(std::chrono::steady_clock::time_point deadline) {
    if (stopped) return;
    stopped = true;
    drain();
    if (node) node->stop(deadline);
    if (peers) peers->stop();
    if (admin) admin->stop();
    if (server) server->shutdown(std::chrono::system_clock::now() + kServerGrace);
  }

  Logger& logger;
  std::unique_ptr<Node> node;
  std::unique_ptr<GrpcPeerTransport> peers;
  std::unique_ptr<AdminService> admin;
  std::unique_ptr<GrpcServer> server;
  bool stopped = false;
};

Result<std::unique_ptr<Daemon>> Daemon::start(const Config& config, Logger& logger) {
  auto impl = std::make_unique<Impl>(logger);
  MK_RETURN_IF_ERROR(impl->start(config));
  return std::unique_ptr<Daemon>(new Daemon(std::move(impl)));
}

Daemon::Daemon(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Daemon::~Daemon() = default;
std::string Daemon::listen() const { return impl_->server->address().text(); }
Node& Daemon::node() { return *impl_->node; }
void Daemon::drain() { impl_->drain(); }
void Daemon::stop(std::chrono::steady_clock::time_point deadline) { impl_->stop(deadline); }

}  // namespace mk::daemon
