// A gRPC listener under siege: connections that say nothing, by TCP and by Unix socket, and whether
// others get in beside them.
#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <vector>

#include "daemon/service/grpc_server.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"
#include "tests/daemon/service/process_rig.h"

namespace mk::daemon {
namespace {

namespace v1 = ::mkernel::v1;

class Version final : public v1::Admin::Service {
  grpc::Status GetVersion(grpc::ServerContext*, const v1::GetVersionRequest*,
                          v1::GetVersionResponse*) override {
    return grpc::Status::OK;
  }
};

class Listener : public testing::Test {
 protected:
  void listen(GrpcListenOptions options) {
    options.services = {&service};
    if (options.address.unix_socket) options.trusted_services = {&trusted_service};
    auto made = GrpcServer::listen(options);
    ASSERT_TRUE(made) << made.error().message;
    server = std::move(*made);
  }
  void TearDown() override {
    if (server) server->shutdown(std::chrono::system_clock::now());
  }

  UniqueFd connect() const {
    const Address& address = server->address();
    sockaddr_storage name{};
    socklen_t bytes = 0;
    if (address.unix_socket) {
      auto& at = reinterpret_cast<sockaddr_un&>(name);
      at.sun_family = AF_UNIX;
      address.path.copy(at.sun_path, sizeof at.sun_path - 1);
      bytes = sizeof at;
    } else {
      auto& at = reinterpret_cast<sockaddr_in&>(name);
      at.sin_family = AF_INET;
      at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      at.sin_port = htons(address.port);
      bytes = sizeof at;
    }
    UniqueFd fd(::socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&name), bytes), 0);
    return fd;
  }
  /// How many of them the server has hung up on.
  static std::size_t closed(const std::vector<UniqueFd>& connections) {
    std::size_t count = 0;
    for (const UniqueFd& fd : connections) {
      char bytes[4096];
      ssize_t got = 1;
      while (got > 0) got = ::recv(fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      count += got == 0 || errno == ECONNRESET ? 1 : 0;
    }
    return count;
  }
  bool answers() const {
    const auto stub = v1::Admin::NewStub(
        grpc::CreateChannel(grpc_target(server->address()), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    context.set_wait_for_ready(true);
    v1::GetVersionResponse response;
    return stub->GetVersion(&context, {}, &response).ok();
  }

  TempFolder folder;
  Version service, trusted_service;
  std::unique_ptr<GrpcServer> server;
};

TEST_F(Listener, SilentTcpConnectionsTakeTheirShareAndNoMore) {
  GrpcListenOptions options;
  options.address = {.host = "127.0.0.1", .port = 0};
  options.tcp = {.connections = 64,
                 .of_address = 32,
                 .unproved = 32,
                 .unproved_of_address = 16,
                 .handshake = std::chrono::minutes(10)};
  listen(options);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(connect());
  EXPECT_TRUE(eventually([&] { return closed(silent) >= 200 - 16; })) << closed(silent);
  EXPECT_TRUE(answers());
  EXPECT_LT(closed(silent), 200u) << "those within the bounds are left alone";
}

TEST_F(Listener, WhoHasSaidNothingAtTheHandshakesDeadlineGoes) {
  GrpcListenOptions options;
  options.address = {.host = "localhost", .port = 0};
  options.tcp.handshake = std::chrono::milliseconds(300);
  listen(options);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 8; ++i) silent.push_back(connect());
  EXPECT_TRUE(eventually([&] { return closed(silent) == 8; }));
  EXPECT_TRUE(answers());
}

TEST_F(Listener, AnAdministratorGetsInHoweverManyLook) {
  GrpcListenOptions options;
  options.address = {.unix_socket = true, .path = folder / "admin.sock"};
  options.unix_connections = {.connections = 4, .of_user = 2, .reserve = 4};
  listen(options);
  // This user is trusted, as the daemon's own: there are the places of all, and the reserve.
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(connect());
  EXPECT_TRUE(eventually([&] { return closed(silent) >= 12; })) << closed(silent);
  EXPECT_EQ(closed(silent), 12u);
  silent.erase(silent.begin());
  EXPECT_TRUE(eventually([&] { return answers(); })) << "a place came back";
}

TEST_F(Listener, SilentConnectionsAtAUnixSocketHaveADeadline) {
  GrpcListenOptions options;
  options.address = {.unix_socket = true, .path = folder / "admin.sock"};
  options.idle_timeout = std::chrono::milliseconds(300);
  listen(options);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 8; ++i) silent.push_back(connect());
  EXPECT_TRUE(eventually([&] { return closed(silent) == 8; })) << closed(silent);
  EXPECT_TRUE(answers());
}

}  // namespace
}  // namespace mk::daemon
