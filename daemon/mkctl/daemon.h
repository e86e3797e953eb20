/// \file
/// One mkerneld as mkctl speaks to it.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

#include "daemon/mkctl/answer.h"
#include "daemon/rpc/grpc_channel.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"

namespace mk::mkctl {

namespace v1 = ::mkernel::v1;

/// Where a daemon is, and how long it may take to answer.
struct Target {
  std::string name;  ///< as the user called it
  daemon::Address address;
  daemon::ChannelOptions channel;
  std::chrono::nanoseconds timeout{};
};

class Daemon {
 public:
  explicit Daemon(Target target);

  const std::string& name() const { return target_.name; }
  std::chrono::nanoseconds timeout() const { return target_.timeout; }
  v1::Admin::Stub& stub() { return *stub_; }

  template <class Method, class Request, class Response>
  grpc::Status ask(Method method, const Request& request, Response& response) {
    grpc::ClientContext context;
    context.set_deadline(deadline(target_.timeout));
    return ((*stub_).*method)(&context, request, &response);
  }
  static std::chrono::system_clock::time_point deadline(std::chrono::nanoseconds patience) {
    return std::chrono::system_clock::now() +
           std::chrono::duration_cast<std::chrono::milliseconds>(patience);
  }

  /// A daemon at another address, which is asked in the same way.
  std::unique_ptr<Daemon> beside(daemon::Address address) const;

  /// What went wrong, as a sentence, and the exit code for it.
  Answer explain(const grpc::Status& status) const;

 private:
  const Target target_;
  const std::unique_ptr<v1::Admin::Stub> stub_;
};

}  // namespace mk::mkctl
