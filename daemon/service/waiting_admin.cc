#include "daemon/service/waiting_admin.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <mutex>

#include "daemon/service/version.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"
#include "shm/layout.h"

namespace mk::daemon {

namespace v1 = ::mkernel::v1;

class WaitingAdmin::Service final : public v1::Admin::Service {
 public:
  explicit Service(std::uint32_t node) : node_(node) {}

  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* response) override {
    using std::chrono::steady_clock;
    response->set_node(node_);
    response->set_version(version_text());
    response->set_pid(static_cast<std::uint32_t>(::getpid()));
    response->set_uptime_ns(
        static_cast<std::uint64_t>(std::chrono::nanoseconds(steady_clock::now() - began_).count()));
    response->set_health(v1::GetStatusResponse::HEALTH_NOT_READY);
    std::lock_guard lock(mutex_);
    response->add_problems(what_);
    return grpc::Status::OK;
  }

  grpc::Status GetVersion(grpc::ServerContext*, const v1::GetVersionRequest*,
                          v1::GetVersionResponse* response) override {
    response->set_version(version_text());
    response->set_abi_major(shm::kAbiMajor);
    response->set_abi_minor(shm::kAbiMinor);
    response->set_build(build_text());
    for (const std::string& fabric : built_fabrics()) response->add_fabrics(fabric);
    return grpc::Status::OK;
  }

  void set_what(const std::string& what) {
    std::lock_guard lock(mutex_);
    what_ = what;
  }

 private:
  const std::uint32_t node_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::string what_;
};

WaitingAdmin::WaitingAdmin(std::uint32_t node) : service_(std::make_unique<Service>(node)) {}
WaitingAdmin::~WaitingAdmin() = default;
void WaitingAdmin::set_what(const std::string& what) { service_->set_what(what); }

Status WaitingAdmin::listen(GrpcListenOptions options) {
  options.services = {service_.get()};
  options.trusted_services = {service_.get()};
  MK_ASSIGN_OR_RETURN(server_, GrpcServer::listen(options));
  return {};
}

}  // namespace mk::daemon
