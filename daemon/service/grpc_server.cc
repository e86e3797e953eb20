#include "daemon/service/grpc_server.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_posix.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "shm/host/unique_fd.h"

namespace mk::daemon {
namespace {

/// Threads that answer Admin calls at once; peers and health do not need any of them.
constexpr int kSyncThreadsMax = 32;
constexpr unsigned kCertificatePollSeconds = 2;
constexpr int kStreamsMax = 64;  ///< calls under way on one connection

/// Health checking and reflection are process-wide switches of gRPC, to be set before any server.
void enable_plugins() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

std::shared_ptr<grpc::ServerCredentials> credentials_for(const TlsTexts& tls) {
  if (!tls.enabled()) return grpc::InsecureServerCredentials();
  if (!tls.cert_path.empty()) {
    namespace x = grpc::experimental;
    x::TlsServerCredentialsOptions options(std::make_shared<x::FileWatcherCertificateProvider>(
        tls.key_path, tls.cert_path, tls.ca_path, kCertificatePollSeconds));
    options.watch_identity_key_cert_pairs();
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    return x::TlsServerCredentials(options);
  }
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = tls.ca;
  options.pem_key_cert_pairs.push_back({tls.key, tls.cert});
  return grpc::SslServerCredentials(options);
}

std::atomic<Logger*> grpc_logger{nullptr};

/// Servers that want to hear of failed handshakes. gRPC tells of these in its log alone, without
/// the address, in the thread that has just read from the connection.
class HandshakeListeners {
 public:
  using Told = std::function<void(const std::vector<std::string>&, std::string_view)>;

  void add(const TcpGate& gate, Told told) {
    std::lock_guard lock(mutex_);
    all_.emplace_back(&gate, std::move(told));
  }
  /// Nobody is told any more when this returns.
  void remove(const TcpGate* gate) {
    std::lock_guard lock(mutex_);
    std::erase_if(all_, [gate](const auto& one) { return one.first == gate; });
  }
  /// Whether the message is of a failed handshake, and somebody knows of whom.
  bool heard(std::string_view message) {
    constexpr std::string_view kFailed = "Handshake failed with fatal error ";
    const std::size_t at = message.find(kFailed);
    if (at == std::string_view::npos) return false;
    std::lock_guard lock(mutex_);
    bool known = false;
    for (const auto& [gate, told] : all_) {
      const std::vector<std::string> remotes = gate->last_heard();
      if (remotes.empty()) continue;
      told(remotes, message.substr(at + kFailed.size()));
      known = true;
    }
    return known;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<const TcpGate*, Told>> all_;
};

HandshakeListeners& handshake_listeners() {
  static auto* const listeners = new HandshakeListeners;  // gRPC's threads outlive what is static
  return *listeners;
}

}  // namespace

class GrpcServer::Impl {
 public:
  ~Impl() {
    close_gates();
    for (const auto& server : servers) server->Shutdown(std::chrono::system_clock::now());
  }

  void close_gates() {
    handshake_listeners().remove(tcp.get());
    gate.reset();
    tcp.reset();
  }

  /// A server of `services`, on what a gate brings.
  Status serve(const GrpcListenOptions& options, const std::vector<grpc::Service*>& services) {
    grpc::ServerBuilder builder;
    if (!address.unix_socket) {
      acceptor = builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          credentials_for(options.tls));
    }
    for (grpc::Service* service : services) builder.RegisterService(service);
    builder.SetMaxReceiveMessageSize(kGrpcMessageBytesMax);
    builder.SetMaxSendMessageSize(kGrpcMessageBytesMax);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kGrpcStreamWindowBytes);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    // A silent connection is closed: without TLS, and at a Unix socket, when it has been
    // idle for long.
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                               static_cast<int>(options.tcp.handshake.count()));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                               static_cast<int>(options.idle_timeout.count()));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsMax);
    // Peers ping to learn whether we live; we do so to learn whether they do.
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 2'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 3'000);
    grpc::ResourceQuota quota("mkerneld");
    quota.SetMaxThreads(kSyncThreadsMax);
    builder.SetResourceQuota(quota);
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
    auto server = builder.BuildAndStart();
    if (!server) return fail(ErrorCode::kSystem, "gRPC makes no server for {}", address.text());
    servers.push_back(std::move(server));
    return {};
  }

  Status open_tcp(const GrpcListenOptions& options) {
    MK_ASSIGN_OR_RETURN(tcp, TcpGate::open(address, options.tcp));
    address.port = tcp->port();
    if (options.tls.enabled() && options.refused_tls)
      handshake_listeners().add(*tcp, options.refused_tls);
    return {};
  }

  /// After the server has been made.
  void start_tcp(Logger* logger) {
    tcp->start(
        [this](UniqueFd connection, int listener) {
          grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters accepted;
          accepted.listener_fd = listener;
          accepted.fd = connection.release();
          acceptor->HandleNewConnection(&accepted);
        },
        told(logger));
  }

  static std::function<void(const std::string&)> told(Logger* logger) {
    return [logger](const std::string& what) {
      if (logger != nullptr) logger->write_limited("turned away", LogLevel::kWarning, what);
    };
  }

  Status open_gate(const GrpcListenOptions& options) {
    MK_ASSIGN_OR_RETURN(
        gate, UnixGate::open({address.path, static_cast<mode_t>(options.mode), options.group,
                              options.unix_connections, told(options.logger)},
                             options.book != nullptr ? *options.book : own_book,
                             [this](UniqueFd connection, bool trusted) {
                               grpc::Server& server = *servers[trusted ? servers.size() - 1 : 0];
                               grpc::AddInsecureChannelFromFd(&server, connection.release());
                             }));
    return {};
  }

  Address address;
  ConnectionBook own_book;
  std::vector<std::unique_ptr<grpc::Server>> servers;  ///< for everybody, then for the trusted
  std::unique_ptr<UnixGate> gate;
  std::unique_ptr<TcpGate> tcp;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
};

Result<std::unique_ptr<GrpcServer>> GrpcServer::listen(const GrpcListenOptions& options) {
  enable_plugins();
  auto impl = std::make_unique<Impl>();
  impl->address = options.address;
  if (!options.address.unix_socket) MK_RETURN_IF_ERROR(impl->open_tcp(options));
  MK_RETURN_IF_ERROR(impl->serve(options, options.services));
  if (!options.address.unix_socket) {
    impl->start_tcp(options.logger);
  } else {
    if (!options.trusted_services.empty()) {
      MK_RETURN_IF_ERROR(impl->serve(options, options.trusted_services));
    }
    if (Status opened = impl->open_gate(options); !opened) {
      return fail(opened.error().code, "cannot listen on {}: {}", options.address.text(),
                  opened.error().message);
    }
  }
  auto server = std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
  server->set_serving(false);
  return server;
}

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrpcServer::~GrpcServer() = default;

const Address& GrpcServer::address() const { return impl_->address; }

void GrpcServer::set_serving(bool serving) {
  for (const auto& server : impl_->servers) {
    grpc::HealthCheckServiceInterface* health = server->GetHealthCheckService();
    if (!health) continue;
    for (const char* service : {"", "mkernel.v1.Admin", "mkernel.v1.Peer"}) {
      health->SetServingStatus(service, serving);
    }
  }
}

void GrpcServer::shutdown(std::chrono::system_clock::time_point deadline) {
  impl_->close_gates();
  for (const auto& server : impl_->servers) server->Shutdown(deadline);
}

void route_grpc_log(Logger* logger) {
  grpc_logger.store(logger);
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  gpr_set_log_function([](gpr_log_func_args* args) {
    Logger* to = grpc_logger.load();
    if (!to) return;
    const auto level =
        args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
    if (handshake_listeners().heard(args->message)) return;
    // It repeats itself with every try to connect; `status` has the cause in our own words.
    constexpr LogKind kRepeated("grpc", 3, std::chrono::seconds(30));
    to->write_limited(kRepeated, level, fmt::format("gRPC: {}", args->message));
  });
}

}  // namespace mk::daemon
