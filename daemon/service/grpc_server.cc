#include "daemon/service/grpc_server.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>
#include <mutex>

#include "shm/host/unique_fd.h"
#include "shm/host/unix_socket.h"

namespace mk::daemon {
namespace {

/// Threads that answer Admin calls at once; peers and health do not need any of them.
constexpr int kSyncThreadsMax = 32;
constexpr mode_t kUnixSocketMode = 0660;

/// Whether somebody answers at a Unix socket: gRPC would take the path away from under it.
Status refuse_live_socket(const std::string& path) {
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const bool answered =
      ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  if (!answered) {
    if (errno == ENOENT || errno == ECONNREFUSED) return {};
    struct stat status {};
    if (::lstat(path.c_str(), &status) == 0 && !S_ISSOCK(status.st_mode)) {
      return fail(ErrorCode::kAlreadyExists, "cannot listen on unix:{}: it exists and is no socket",
                  path);
    }
    return fail_errno(errno, "cannot listen on unix:{}", path);
  }
  ucred holder{};
  socklen_t size = sizeof holder;
  ::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &holder, &size);
  return fail(ErrorCode::kAlreadyExists,
              "cannot listen on unix:{}: process {} listens there already; stop it or choose "
              "another --listen",
              path, holder.pid);
}

/// gRPC does not say why it could not listen; the same calls, made by ourselves, do.
tl::unexpected<Error> explain(const Address& address) {
  if (address.unix_socket) {
    const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un where{};
    where.sun_family = AF_UNIX;
    address.path.copy(where.sun_path, sizeof where.sun_path - 1);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&where), sizeof where) != 0) {
      return fail_errno(errno, "cannot listen on {}", address.text());
    }
    ::unlink(address.path.c_str());
    return fail(ErrorCode::kSystem, "gRPC cannot listen on {}", address.text());
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  if (const int error = ::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found)) {
    return fail(ErrorCode::kNotFound, "cannot listen on {}: {}", address.text(),
                ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(found, &::freeaddrinfo);
  const UniqueFd fd(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(fd.get(), 1) != 0) {
    const int error = errno;
    if (error == EADDRINUSE) {
      return fail(ErrorCode::kAlreadyExists,
                  "cannot listen on {}: another process holds the port; stop it or choose another "
                  "--listen (port 0: any free one)",
                  address.text());
    }
    return fail_errno(error, "cannot listen on {}", address.text());
  }
  return fail(ErrorCode::kSystem, "gRPC cannot listen on {}", address.text());
}

/// Health checking and reflection are process-wide switches of gRPC, to be set before any server.
void enable_plugins() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

std::shared_ptr<grpc::ServerCredentials> credentials_for(const Address& address,
                                                         const TlsTexts& tls) {
  if (!tls.enabled() || address.unix_socket) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = tls.ca;
  options.pem_key_cert_pairs.push_back({tls.key, tls.cert});
  return grpc::SslServerCredentials(options);
}

std::atomic<Logger*> grpc_logger{nullptr};

}  // namespace

class GrpcServer::Impl {
 public:
  ~Impl() {
    if (server) server->Shutdown(std::chrono::system_clock::now());
  }
  Address address;
  std::unique_ptr<grpc::Server> server;
};

Result<std::unique_ptr<GrpcServer>> GrpcServer::listen(
    const Address& address, const TlsTexts& tls, const std::vector<grpc::Service*>& services) {
  enable_plugins();
  auto impl = std::make_unique<Impl>();
  impl->address = address;
  if (address.unix_socket) MK_RETURN_IF_ERROR(refuse_live_socket(address.path));

  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address.unix_socket ? grpc_target(address) : address.text(),
                           credentials_for(address, tls), &port);
  for (grpc::Service* service : services) builder.RegisterService(service);
  builder.SetMaxReceiveMessageSize(kGrpcMessageBytesMax);
  builder.SetMaxSendMessageSize(kGrpcMessageBytesMax);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // two daemons must not share a port
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
  impl->server = builder.BuildAndStart();
  if (!impl->server || (!address.unix_socket && port <= 0)) {
    impl->server.reset();
    return explain(address);
  }
  if (address.unix_socket) {
    // Who may speak to this socket may speak for a node.
    if (::chmod(address.path.c_str(), kUnixSocketMode) != 0) {
      return fail_errno(errno, "cannot set the mode of {}", address.path);
    }
  } else {
    impl->address.port = static_cast<std::uint16_t>(port);
  }
  auto server = std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
  server->set_serving(false);
  return server;
}

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrpcServer::~GrpcServer() = default;

const Address& GrpcServer::address() const { return impl_->address; }

void GrpcServer::set_serving(bool serving) {
  grpc::HealthCheckServiceInterface* health = impl_->server->GetHealthCheckService();
  if (!health) return;
  for (const char* service : {"", "mkernel.v1.Admin", "mkernel.v1.Peer"}) {
    health->SetServingStatus(service, serving);
  }
}

void GrpcServer::shutdown(std::chrono::system_clock::time_point deadline) {
  impl_->server->Shutdown(deadline);
}

void route_grpc_log(Logger* logger) {
  grpc_logger.store(logger);
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  gpr_set_log_function([](gpr_log_func_args* args) {
    Logger* to = grpc_logger.load();
    if (!to) return;
    const auto level =
        args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
    to->write_limited(args->file, level, fmt::format("gRPC: {}", args->message));
  });
}

}  // namespace mk::daemon
