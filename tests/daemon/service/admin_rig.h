// A whole daemon in this process, and a stub of its Admin service.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>

#include "daemon/service/daemon.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"
#include "tests/daemon/service/process_rig.h"
#include "tests/daemon/service/raw_client.h"

namespace mk::daemon {

namespace v1 = ::mkernel::v1;

class OneDaemon : public testing::Test {
 protected:
  void SetUp() override {
    config.node_id = 3;
    config.fabric.name = "null";
    config.fabric.rails = 2;
    config.listen = {.unix_socket = true, .path = folder / "peer"};
    config.socket.path = folder / "sock";
    config.limits.sessions = 7;
    auto started = Daemon::start(config, logger);
    ASSERT_TRUE(started) << started.error().message;
    daemon = std::move(*started);
    channel = grpc::CreateChannel("unix:" + (folder / "peer"), grpc::InsecureChannelCredentials());
    stub = v1::Admin::NewStub(channel);
  }
  void TearDown() override {
    daemon.reset();
    EXPECT_TRUE(folder.empty());
  }

  template <class Method, class Request, class Response>
  grpc::Status ask(Method method, const Request& request, Response& response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    return ((*stub).*method)(&context, request, &response);
  }
  v1::GetStatusResponse status() {
    v1::GetStatusResponse response;
    const auto done = ask(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), response);
    EXPECT_TRUE(done.ok()) << done.error_message();
    return response;
  }

  TempFolder folder;
  Config config;
  Logger logger{LoggerOptions{.level = LogLevel::kError}};
  std::unique_ptr<Daemon> daemon;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Admin::Stub> stub;
};

}  // namespace mk::daemon
