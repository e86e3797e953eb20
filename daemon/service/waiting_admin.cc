#include "daemon/service/waiting_admin.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <utility>

#include "daemon/service/version.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"
#include "shm/layout.h"

namespace mk::daemon {

namespace v1 = ::mkernel::v1;

class WaitingAdmin::Service final : public v1::Admin::Service {
 public:
  explicit Service(const Config& config) : config_(config) {}

  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* response) override {
    using std::chrono::steady_clock;
    response->set_node(config_.node_id);
    response->set_version(version_text());
    response->set_pid(static_cast<std::uint32_t>(::getpid()));
    response->set_uptime_ns(
        static_cast<std::uint64_t>(std::chrono::nanoseconds(steady_clock::now() - began_).count()));
    response->set_health(v1::GetStatusResponse::HEALTH_NOT_READY);
    response->set_listen(config_.listen.text());
    response->set_socket(config_.socket.path);
    response->set_fabric(config_.fabric.name);
    response->set_sessions_max(config_.limits.sessions);
    std::lock_guard lock(mutex_);
    response->set_not_ready_because(what_);
    response->add_problems(what_);
    for (const std::string& problem : problems_) response->add_problems(problem);
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

  void set_what(const std::string& what, std::vector<std::string> problems) {
    std::lock_guard lock(mutex_);
    what_ = what;
    problems_ = std::move(problems);
  }

 private:
  const Config config_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::string what_;
  std::vector<std::string> problems_;
};

WaitingAdmin::WaitingAdmin(const Config& config) : service_(std::make_unique<Service>(config)) {}
WaitingAdmin::~WaitingAdmin() = default;
void WaitingAdmin::set_what(const std::string& what, std::vector<std::string> problems) {
  service_->set_what(what, std::move(problems));
}

Status WaitingAdmin::listen(GrpcListenOptions options) {
  options.services = {service_.get()};
  options.trusted_services = {service_.get()};
  MK_ASSIGN_OR_RETURN(server_, GrpcServer::listen(options));
  return {};
}

}  // namespace mk::daemon
