#include "daemon/service/daemon.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#include "daemon/config/compare.h"
#include "daemon/config/discovery_section.h"
#include "daemon/discovery/discovery.h"
#include "daemon/fabric/library_signals.h"
#include "daemon/metrics/metrics.h"
#include "daemon/rpc/grpc_channel.h"
#include "daemon/service/admin_guard.h"
#include "daemon/service/admin_listen.h"
#include "daemon/service/admin_service.h"
#include "daemon/service/grpc_peer_transport.h"
#include "daemon/service/grpc_server.h"
#include "daemon/service/live_config.h"
#include "daemon/service/node_options.h"
#include "daemon/service/own_certificates.h"
#include "daemon/service/process.h"
#include "daemon/service/reload_record.h"
#include "daemon/service/tls_refusals.h"
#include "daemon/service/version.h"
#include "daemon/service/waiting_admin.h"
#include "daemon/tls/own_files.h"

namespace mk::daemon {
namespace {

constexpr auto kServerGrace = std::chrono::seconds(1);

/// Whether what an error names may come later: a device, its port, an address.
bool may_come_later(const Error& error) {
  return error.code == ErrorCode::kUnavailable || error.code == ErrorCode::kNotFound;
}

/// "log.level \"info\" -> \"debug\"", for each.
std::string describe(const std::vector<ConfigChange>& changes, bool live) {
  std::string text;
  for (const ConfigChange& change : changes) {
    if (change.live != live) continue;
    const auto shown = [](const std::string& value) { return value.empty() ? "(none)" : value; };
    text += fmt::format("{}{} {} -> {}", text.empty() ? "" : ", ", change.key, shown(change.before),
                        shown(change.after));
  }
  return text;
}

}  // namespace

/// Members in the order of their needs: what is declared later goes first.
class Daemon::Impl {
 public:
  Impl(const Config& config, Logger& log, Wait wait_for)
      : logger(log), live(config), wait(std::move(wait_for)) {}
  ~Impl() { stop(std::chrono::steady_clock::now(), nullptr); }

  Status start(UniqueFd client_socket) {
    const Config config = live.get();
    MK_ASSIGN_OR_RETURN(const TlsTexts tls,
                        read_tls(config.tls.cert, config.tls.key, config.tls.ca));
    if (tls.enabled()) {
      certificates.note(look_at(tls_files(config), unix_now()));
      // Later, the daemon waits for better files; at the start, somebody is there to name them.
      if (const std::string dead = certificates.why_dead(); !dead.empty()) {
        return fail(ErrorCode::kInvalidArgument, "{}", dead);
      }
    } else if (!config.listen.local()) {
      logger.write(LogLevel::kWarning,
                   fmt::format("listening on {} without TLS: anybody on that network can speak to "
                               "this daemon",
                               config.listen.text()));
    }
    MK_ASSIGN_OR_RETURN(const GrpcListenOptions at_admin, admin_options(config, callers, logger));
    const auto open_rails = [&](bool first) { return open_node(config, client_socket, first); };
    MK_RETURN_IF_ERROR(when_there(at_admin, open_rails));
    client_socket.reset();
    take_signals_back();  // opening fabrics has loaded libraries
    PeerTransportOptions options;
    options.node = config.node_id;
    options.peers = config.peers;
    options.discovers = config.discovery.kind != "static";
    options.tls = tls;
    peers = std::make_unique<GrpcPeerTransport>(std::move(options), node->peer_sink(), logger);
    admin = std::make_unique<AdminService>(
        *node, *peers, AdminInfo{version_text(), config.listen.text(), config.limits.sessions},
        AdminActions{[this] { return set_drained(true); }, [this] { return set_drained(false); },
                     [this] { return sample(); },
                     [this](bool compare) { return config_view(compare); },
                     [this](const JobChange& change) { return set_job(change); },
                     [this] { return problems(); }, [this] { return certificates.why_dead(); },
                     [this] { return tls_refusals.list(); }});
    const auto open_port = [&](bool) { return listen(config, tls, at_admin); };
    MK_RETURN_IF_ERROR(when_there(at_admin, open_port));
    waiting.reset();
    MK_RETURN_IF_ERROR(listen_for_admins(at_admin));
    admin->set_listen(server->address().text());
    has_network = true;
    MK_RETURN_IF_ERROR(serve_metrics(config));
    MK_RETURN_IF_ERROR(node->start(*peers));
    peers->start();
    set_open(true);
    if (tls.enabled()) watch_certificates(config);
    return discover(config, tls);
  }

  /// From the first call on, if the configuration asks for them.
  Status serve_metrics(const Config& config) {
    if (metrics || !config.metrics.listen) return {};
    MK_ASSIGN_OR_RETURN(
        metrics, MetricsEndpoint::listen(*config.metrics.listen, [this] { return sample(); }));
    return {};
  }

  /// Attempts again and again while what it needs may come later and somebody waits for it.
  Status when_there(const GrpcListenOptions& at_admin,
                    const std::function<Status(bool first)>& attempt) {
    for (bool first = true;; first = false) {
      const Status status = attempt(first);
      if (status || !wait || !may_come_later(status.error())) return status;
      const std::string what = "waiting: " + status.error().message;
      if (!waiting) {
        waiting = std::make_unique<WaitingAdmin>(live.get());
        // Without its socket, systemd and the log tell.
        if (!at_admin.address.path.empty()) {
          make_admin_folder(live.get());
          const Status listening = waiting->listen(at_admin);
          if (!listening) logger.write(LogLevel::kWarning, listening.error().message);
        }
        MK_RETURN_IF_ERROR(serve_metrics(live.get()));
      }
      waiting->set_what(what, reloads.problems());
      const WaitEnd end = wait(what);
      if (!end.go_on) return fail(ErrorCode::kAborted, "stopped while {}", what);
      if (!end.refused_reload.empty()) reloads.note(end.refused_reload);
    }
  }

  Status open_node(const Config& config, const UniqueFd& client_socket, bool first) {
    MK_ASSIGN_OR_RETURN(NodeOptions options, node_options(config, live, logger, first));
    if (client_socket.valid()) {
      options.loop.listening_fd = ::fcntl(client_socket.get(), F_DUPFD_CLOEXEC, 0);
      if (options.loop.listening_fd < 0) return fail_errno(errno, "cannot keep the client socket");
    }
    MK_ASSIGN_OR_RETURN(node, Node::create(std::move(options)));
    return {};
  }

  /// Looks for other nodes from now on, when the configuration says how.
  Status discover(const Config& config, const TlsTexts& tls) {
    DiscoverySelf self{config.node_id, node->generation(), server->address(), version_text()};
    if (config.discovery.advertise) self.advertise = *config.discovery.advertise;
    MK_ASSIGN_OR_RETURN(auto source, open_discovery(config, self, tls));
    if (!source) return {};
    auto looking = std::make_unique<Discovery>(
        std::move(source), std::chrono::nanoseconds(config.discovery.interval_ns),
        [this](std::vector<PeerConfig> nodes) {
          std::lock_guard lock(peers_mutex);
          found = std::move(nodes);
          set_peers(live.get());
        },
        logger.sink());
    std::lock_guard lock(peers_mutex);
    discovery = std::move(looking);
    return {};
  }

  void stop_discovery() {
    std::unique_lock lock(peers_mutex);
    const auto looking = std::move(discovery);
    lock.unlock();  // its thread takes it to hand over a list
    if (looking) looking->stop();
  }

  /// What is wrong with the daemon as a whole.
  std::vector<std::string> problems() {
    std::vector<std::string> all = certificates.faults();
    for (std::string& one : reloads.problems()) all.push_back(std::move(one));
    std::lock_guard lock(peers_mutex);
    const std::string trouble = discovery ? discovery->trouble() : "";
    if (!trouble.empty()) {
      all.push_back(fmt::format("discovery ({}): {}", live.get().discovery.kind, trouble));
    }
    return all;
  }

  void watch_certificates(const Config& config) {
    certificate_watch = std::make_unique<CertificateWatch>(
        tls_files(config),
        CertificateWatch::Callbacks{[this] { return peers->unconnected(); },
                                    [this](const TlsReport& own) {
                                      certificates.note(own);
                                      update_serving();
                                    },
                                    [this](NodeId peer, const std::string& trouble) {
                                      peers->note_certificate(peer, trouble);
                                    }});
  }

  /// Those of the configuration, and those found beside them. With peers_mutex held.
  void set_peers(const Config& config) {
    std::vector<PeerConfig> all = config.peers;
    for (const PeerConfig& other : found) {
      if (std::any_of(config.peers.begin(), config.peers.end(),
                      [&](const PeerConfig& peer) { return peer.id == other.id; })) {
        continue;
      }
      if (may_reach(config, other.address)) {
        all.push_back(other);
      } else {
        logger.write_limited("found beyond", LogLevel::kWarning,
                             fmt::format("node {} was found at {}, which takes [tls] or "
                                         "insecure = true: left out",
                                         other.id, other.address.text()));
      }
    }
    peers->set_peers(all);
  }

  void set_open(bool takes_jobs) {
    open = takes_jobs;
    update_serving();
  }

  /// What health checks are told.
  void update_serving() {
    std::lock_guard lock(serving_mutex);
    const bool serving = open && !certificates.dead();
    if (server) server->set_serving(serving);
    if (admin_server) admin_server->set_serving(serving);
  }

  /// The peers' address, and the Admin service there, with rights apart.
  Status listen(const Config& config, const TlsTexts& tls, const GrpcListenOptions& at_admin) {
    AdminRights rights;
    rights.writers = config.admin.writers;
    if (!at_admin.address.path.empty()) {
      rights.instead = fmt::format(
          "; changes go to {} (mkctl --address), by root, the daemon's own user{}",
          at_admin.address.text(),
          config.admin.group.empty() ? "" : " or a member of group " + config.admin.group);
    }
    const bool certified = tls.enabled() && !config.listen.unix_socket;
    if (certified) rights.change = AdminRights::Change::kCertificate;
    lookers = std::make_unique<AdminGuard>(admin->service(), rights, callers, logger);
    rights.change = AdminRights::Change::kEverybody;
    changers = std::make_unique<AdminGuard>(admin->service(), rights, callers, logger);

    GrpcListenOptions at_listen = at_admin;
    at_listen.address = config.listen;
    at_listen.mode = 0660;  // who may speak to this socket may speak for a node
    at_listen.tls = tls;
    at_listen.refused_tls = [this](const auto& remotes, std::string_view why) {
      tls_refusals.note(remotes, why);
    };
    at_listen.services = {&peers->service(), &lookers->service()};
    at_listen.trusted_services = {&peers->service(), &changers->service()};
    MK_ASSIGN_OR_RETURN(server, GrpcServer::listen(at_listen));
    return {};
  }

  Status listen_for_admins(GrpcListenOptions at_admin) {
    if (at_admin.address.path.empty()) return {};
    make_admin_folder(live.get());
    at_admin.services = {&lookers->service()};
    at_admin.trusted_services = {&changers->service()};
    MK_ASSIGN_OR_RETURN(admin_server, GrpcServer::listen(at_admin));
    return {};
  }

  Result<JobChanged> set_job(const JobChange& change) {
    JobChanged changed;
    MK_ASSIGN_OR_RETURN(changed.share, live.change(change));
    MK_ASSIGN_OR_RETURN(changed.sessions,
                        node->loop().run_sync([job = change.job](ControlPlane& plane) {
                          return plane.refresh_shares(job);
                        }));
    return changed;
  }

  ReloadReport reload(const Result<Config>& loaded) {
    ReloadReport report = take_over(loaded);
    reloads.note(report.refused ? report.text : "");
    return report;
  }

  ReloadReport take_over(const Result<Config>& loaded) {
    if (!loaded) {
      return {true, fmt::format("the configuration is kept, since the new one is not valid: {}",
                                loaded.error().message)};
    }
    const auto changes = compare_configs(live.get(), *loaded);
    if (changes.empty()) return {false, "the configuration has not changed"};
    if (const std::string frozen = describe(changes, /*live=*/false); !frozen.empty()) {
      return {true, fmt::format("the configuration is kept, all of it: these changes need a "
                                "restart of mkerneld: {}",
                                frozen)};
    }
    live.set(*loaded);
    {
      std::lock_guard lock(peers_mutex);
      set_peers(*loaded);
    }
    node->loop().post([](ControlPlane& plane) { plane.refresh_shares(); });
    logger.set_level(log_level_of(loaded->log.level));
    return {false, fmt::format("the configuration is reloaded: {}", describe(changes, true))};
  }

  ConfigView config_view(bool compare) {
    ConfigView view{live.get(), "", {}};
    std::function<Result<Config>()> load;
    {
      std::lock_guard lock(source_mutex);
      view.file = config_file;
      load = load_config;
    }
    if (!compare || !load) return view;
    if (const auto loaded = load()) {
      view.changes = compare_configs(view.in_effect, *loaded);
    } else {
      view.changes = tl::unexpected(loaded.error());
    }
    return view;
  }

  MetricsSample sample() {
    MetricsSample sample;
    const Config config = live.get();
    sample.node = config.node_id;
    sample.version = version_text();
    sample.build = build_text();
    sample.fabric = config.fabric.name;
    sample.start_time_seconds = std::chrono::duration<double>(began.time_since_epoch()).count();
    sample.sessions_max = config.limits.sessions;
    if (config.tls.enabled()) sample.certificates = certificates.metrics();
    sample.reloads = reloads.metrics();
    sample.waiting = !has_network;
    if (sample.waiting) return sample;
    sample.fabric = node->capabilities(0).name;
    if (auto snapshot = node->snapshot()) sample.control = std::move(*snapshot);
    for (std::uint32_t rail = 0; rail < node->rails(); ++rail) {
      sample.rails.push_back(&node->proxy_stats(rail));
    }
    for (const PeerInfo& peer : peers->peers()) {
      sample.peers.push_back({peer.node, peer.state == PeerState::kUp, peer.messages_sent,
                              peer.messages_received, peer.breaks});
    }
    return sample;
  }

  std::vector<Progress> progress() {
    std::vector<Progress> all;
    for (std::uint32_t rail = 0; rail < node->rails(); ++rail) {
      all.push_back(
          {fmt::format("the proxy of rail {}", rail), node->proxy_stats(rail).passes.value()});
    }
    all.push_back({"the control thread", control_turns->load()});
    // Counted when the thread gets to it: seen by the next call.
    node->loop().post([turns = control_turns](ControlPlane&) { turns->fetch_add(1); });
    return all;
  }

  std::string status_text() {
    const auto snapshot = node->snapshot();
    if (!snapshot) return snapshot.error().message;
    std::set<std::string> jobs;
    for (const SessionInfo& session : snapshot->sessions) jobs.insert(session.job);
    const auto up = std::count_if(snapshot->links.begin(), snapshot->links.end(),
                                  [](const LinkInfo& link) { return link.state == "up"; });
    return fmt::format(
        "node {}{}: {} sessions of {} jobs, {} of {} links up; clients at {}, peers "
        "and tools at {}",
        node->id(), snapshot->draining ? " (draining)" : "", snapshot->sessions.size(), jobs.size(),
        up, snapshot->links.size(), node->socket_path(), server->address().text());
  }

  /// For people: the daemon stays up, and takes new jobs again when they say so.
  Status set_drained(bool drained) {
    std::lock_guard lock(drain_mutex);
    if (shutting_down) {
      return fail(ErrorCode::kDraining, "the daemon of node {} is shutting down", node->id());
    }
    set_open(!drained);
    if (drained) {
      node->drain("is drained for maintenance (mkctl drain)");
    } else {
      node->resume();
    }
    return {};
  }

  void drain() {
    std::lock_guard lock(drain_mutex);
    shutting_down = true;
    set_open(false);
    if (node) node->drain();
  }

  void stop(std::chrono::steady_clock::time_point deadline, StopPhase* phase) {
    if (stopped) return;
    stopped = true;
    const auto at = [phase](const char* what) {
      if (phase != nullptr) phase->store(what);
    };
    at("a reload or a drain under way");
    drain();
    at("readers of its metrics");
    metrics.reset();
    if (node) node->stop(deadline, phase);
    at("certificates");
    if (certificate_watch) certificate_watch->stop();
    at("discovery");
    stop_discovery();
    at("the streams of its peers");
    if (peers) peers->stop();
    at("calls of tools and peers");
    if (admin) admin->stop();
    const auto end = std::chrono::system_clock::now() + kServerGrace;
    if (server) server->shutdown(end);
    if (admin_server) admin_server->shutdown(end);
  }

  Logger& logger;
  LiveConfig live;
  const Wait wait;
  const std::shared_ptr<std::atomic<std::uint64_t>> control_turns =
      std::make_shared<std::atomic<std::uint64_t>>(0);
  const std::chrono::system_clock::time_point began = std::chrono::system_clock::now();
  ReloadRecord reloads;
  std::mutex source_mutex;
  std::string config_file;
  std::function<Result<Config>()> load_config;  ///< empty: there is nothing to load again
  std::unique_ptr<Node> node;
  std::unique_ptr<GrpcPeerTransport> peers;
  std::unique_ptr<AdminService> admin;
  ConnectionBook callers;
  std::unique_ptr<AdminGuard> lookers, changers;
  std::unique_ptr<WaitingAdmin> waiting;  ///< while something is not there yet
  std::unique_ptr<GrpcServer> server, admin_server;
  std::atomic<bool> has_network = false;  ///< `node` and `peers` are there, and the port is open
  std::atomic<bool> open = false;         ///< neither starting, nor drained, nor shutting down
  std::mutex serving_mutex;
  OwnCertificates certificates{logger};
  TlsRefusals tls_refusals{logger};
  std::unique_ptr<CertificateWatch> certificate_watch;
  std::mutex peers_mutex;
  std::vector<PeerConfig> found;  ///< by discovery
  std::unique_ptr<Discovery> discovery;
  bool stopped = false;
  std::mutex drain_mutex;
  bool shutting_down = false;                ///< nobody resumes it any more
  std::unique_ptr<MetricsEndpoint> metrics;  ///< asks all of the above
};

Result<std::unique_ptr<Daemon>> Daemon::start(const Config& config, Logger& logger,
                                              UniqueFd client_socket, Wait wait) {
  auto impl = std::make_unique<Impl>(config, logger, std::move(wait));
  MK_RETURN_IF_ERROR(impl->start(std::move(client_socket)));
  return std::unique_ptr<Daemon>(new Daemon(std::move(impl)));
}

Daemon::Daemon(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Daemon::~Daemon() = default;
std::string Daemon::listen() const { return impl_->server->address().text(); }
std::string Daemon::metrics_listen() const {
  return impl_->metrics ? impl_->metrics->address().text() : "";
}
Node& Daemon::node() { return *impl_->node; }
ReloadReport Daemon::reload(const Result<Config>& loaded) { return impl_->reload(loaded); }
Config Daemon::config() const { return impl_->live.get(); }
void Daemon::set_config_source(const std::string& file, std::function<Result<Config>()> load) {
  std::lock_guard lock(impl_->source_mutex);
  impl_->config_file = file;
  impl_->load_config = std::move(load);
}
std::vector<Progress> Daemon::progress() { return impl_->progress(); }
std::string Daemon::status_text() { return impl_->status_text(); }
void Daemon::drain() { impl_->drain(); }
void Daemon::stop(std::chrono::steady_clock::time_point deadline, StopPhase* phase) {
  impl_->stop(deadline, phase);
}

}  // namespace mk::daemon
