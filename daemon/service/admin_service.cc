#include "daemon/service/admin_service.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <set>

#include "daemon/config/secrets.h"
#include "daemon/service/admin_convert.h"
#include "daemon/service/admin_streams.h"
#include "daemon/service/admin_trace.h"
#include "daemon/service/version.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"

namespace mk::daemon {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

grpc::Status refuse(const Error& error) {
  const auto code = error.code == ErrorCode::kTimeout    ? grpc::StatusCode::DEADLINE_EXCEEDED
                    : error.code == ErrorCode::kDraining ? grpc::StatusCode::FAILED_PRECONDITION
                    : error.code == ErrorCode::kInvalidArgument ? grpc::StatusCode::INVALID_ARGUMENT
                    : error.code == ErrorCode::kNotFound        ? grpc::StatusCode::NOT_FOUND
                    : error.code == ErrorCode::kUnsupported     ? grpc::StatusCode::UNIMPLEMENTED
                                                                : grpc::StatusCode::UNAVAILABLE;
  return {code, error.message};
}

std::uint64_t commands_of(const v1::StatsSample& sample) {
  std::uint64_t sum = 0;
  for (const v1::Queue& queue : sample.queues()) sum += queue.commands();
  return sum;
}
std::uint64_t bytes_of(const v1::StatsSample& sample) {
  std::uint64_t sum = 0;
  for (const v1::Link& link : sample.links()) sum += link.bytes();
  return sum;
}

}  // namespace

class AdminService::Impl final : public v1::Admin::Service {
 public:
  Impl(Node& node, const GrpcPeerTransport& peers, AdminInfo info, AdminActions actions)
      : node_(node), peers_(peers), actions_(std::move(actions)), info_(std::move(info)) {}

  void set_listen(std::string listen) {
    std::lock_guard lock(mutex_);
    info_.listen = std::move(listen);
  }
  void stop() { streams_.stop(); }

  grpc::Status GetVersion(grpc::ServerContext*, const v1::GetVersionRequest*,
                          v1::GetVersionResponse* response) override {
    response->set_version(info_.version);
    response->set_abi_major(shm::kAbiMajor);
    response->set_abi_minor(shm::kAbiMinor);
    response->set_build(build_text());
    for (const std::string& fabric : built_fabrics()) response->add_fabrics(fabric);
    return grpc::Status::OK;
  }

  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* response) override {
    const auto snapshot = node_.snapshot();
    if (!snapshot) return refuse(snapshot.error());
    response->set_node(node_.id());
    response->set_version(info_.version);
    response->set_generation(node_.generation());
    response->set_pid(static_cast<std::uint32_t>(::getpid()));
    response->set_uptime_ns(static_cast<std::uint64_t>(nanoseconds(Clock::now() - began_).count()));
    {
      std::lock_guard lock(mutex_);
      response->set_listen(info_.listen);
    }
    response->set_socket(node_.socket_path());
    response->set_fabric(node_.capabilities(0).name);
    response->set_sessions(static_cast<std::uint32_t>(snapshot->sessions.size()));
    response->set_sessions_max(info_.sessions_max);
    for (std::uint32_t rail = 0; rail < node_.rails(); ++rail) {
      to_proto(rail, node_.proxy_stats(rail), true, *response->add_rails());
    }
    add_peers(*response);
    add_links(*snapshot, *response);
    if (actions_.problems) {
      for (const std::string& problem : actions_.problems()) response->add_problems(problem);
    }
    if (actions_.tls_refusals) {
      for (const TlsRefusal& refusal : actions_.tls_refusals())
        to_proto(refusal, *response->add_tls_refusals());
    }
    if (actions_.not_ready) response->set_not_ready_because(actions_.not_ready());
    const bool not_ready = !response->not_ready_because().empty();
    response->set_health(snapshot->draining              ? v1::GetStatusResponse::HEALTH_DRAINING
                         : not_ready                     ? v1::GetStatusResponse::HEALTH_NOT_READY
                         : response->problems_size() > 0 ? v1::GetStatusResponse::HEALTH_DEGRADED
                                                         : v1::GetStatusResponse::HEALTH_OK);
    return grpc::Status::OK;
  }

  grpc::Status ListSessions(grpc::ServerContext*, const v1::ListSessionsRequest*,
                            v1::ListSessionsResponse* response) override {
    const auto snapshot = node_.snapshot();
    if (!snapshot) return refuse(snapshot.error());
    for (const SessionInfo& one : snapshot->sessions) to_proto(one, *response->add_sessions());
    for (const SessionInfo& one : snapshot->recent_failures) {
      to_proto(one, *response->add_recent_failures());
    }
    return grpc::Status::OK;
  }

  grpc::Status ListQueues(grpc::ServerContext*, const v1::ListQueuesRequest*,
                          v1::ListQueuesResponse* response) override {
    const auto snapshot = node_.snapshot();
    if (!snapshot) return refuse(snapshot.error());
    for (const QueueInfo& one : snapshot->queues) to_proto(one, true, *response->add_queues());
    return grpc::Status::OK;
  }

  grpc::Status ListLinks(grpc::ServerContext*, const v1::ListLinksRequest*,
                         v1::ListLinksResponse* response) override {
    const auto snapshot = node_.snapshot();
    if (!snapshot) return refuse(snapshot.error());
    for (const LinkInfo& one : snapshot->links) to_proto(one, *response->add_links());
    return grpc::Status::OK;
  }

  grpc::Status WatchStats(grpc::ServerContext* context, const v1::WatchStatsRequest* request,
                          grpc::ServerWriter<v1::StatsSample>* writer) override {
    v1::StatsSample last;
    return streams_.run(*context, request->interval_ns(), request->samples(), [&] {
      v1::StatsSample sample;
      if (const grpc::Status taken = take_sample(last, sample); !taken.ok()) return taken;
      if (!writer->Write(sample)) return grpc::Status::CANCELLED;
      last = std::move(sample);
      return grpc::Status::OK;
    });
  }

  grpc::Status WatchMetrics(grpc::ServerContext* context, const v1::WatchMetricsRequest* request,
                            grpc::ServerWriter<v1::MetricsSample>* writer) override {
    if (!actions_.metrics) return refuse(without_action().error());
    return streams_.run(*context, request->interval_ns(), request->samples(), [&] {
      v1::MetricsSample sample;
      sample.set_unix_time_ns(unix_time_ns());
      for (const auto& family : to_families(actions_.metrics())) {
        to_proto(family, *sample.add_families());
      }
      return writer->Write(sample) ? grpc::Status::OK : grpc::Status::CANCELLED;
    });
  }

  grpc::Status RecordTrace(grpc::ServerContext* context, const v1::RecordTraceRequest* request,
                           grpc::ServerWriter<v1::TraceChunk>* writer) override {
    return recorder_.record(*context, *request, *writer);
  }

  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest*,
                        v1::ListJobsResponse* response) override {
    const auto snapshot = node_.snapshot();
    if (!snapshot) return refuse(snapshot.error());
    for (const JobInfo& one : snapshot->jobs) to_proto(one, *snapshot, *response->add_jobs());
    for (const EndedJob& one : snapshot->ended_jobs) to_proto(one, *response->add_ended());
    return grpc::Status::OK;
  }

  grpc::Status TerminateJob(grpc::ServerContext*, const v1::TerminateJobRequest* request,
                            v1::TerminateJobResponse* response) override {
    const auto ranks = node_.loop().run_sync(
        [job = request->job(), reason = request->reason()](ControlPlane& plane) {
          return plane.terminate_job(job, reason);
        });
    if (!ranks) return refuse(ranks.error());
    if (!*ranks) return refuse(ranks->error());
    response->set_sessions(**ranks);
    return grpc::Status::OK;
  }

  grpc::Status GetConfig(grpc::ServerContext*, const v1::GetConfigRequest* request,
                         v1::GetConfigResponse* response) override {
    if (!actions_.config) return refuse(without_action().error());
    const ConfigView view = actions_.config(request->compare());
    response->set_toml(without_secrets(print_config(view.in_effect)));
    response->set_file(view.file);
    if (!view.changes) {
      response->set_file_error(without_secrets(view.changes.error().message));
      return grpc::Status::OK;
    }
    for (const ConfigChange& change : *view.changes) to_proto(change, *response->add_changes());
    return grpc::Status::OK;
  }

  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest*,
                     v1::DrainResponse* response) override {
    if (const Status done = act(actions_.drain); !done) return refuse(done.error());
    const auto snapshot = node_.snapshot();
    if (!snapshot) return refuse(snapshot.error());
    std::set<std::string> jobs;
    for (const SessionInfo& one : snapshot->sessions) jobs.insert(one.job);
    response->set_sessions(static_cast<std::uint32_t>(snapshot->sessions.size()));
    for (const std::string& job : jobs) response->add_jobs(job);
    return grpc::Status::OK;
  }

  grpc::Status Resume(grpc::ServerContext*, const v1::ResumeRequest*,
                      v1::ResumeResponse*) override {
    const Status done = act(actions_.resume);
    return done ? grpc::Status::OK : refuse(done.error());
  }

  grpc::Status SetJob(grpc::ServerContext*, const v1::SetJobRequest* request,
                      v1::SetJobResponse* response) override {
    if (!actions_.set_job) return refuse(without_action().error());
    const auto changed = actions_.set_job(from_proto(*request));
    if (!changed) return refuse(changed.error());
    response->set_weight(changed->share.weight);
    response->set_bytes_per_second(changed->share.limit.bytes_per_second);
    response->set_commands_per_second(changed->share.limit.commands_per_second);
    response->set_sessions(changed->sessions);
    return grpc::Status::OK;
  }

 private:
  static Status act(const std::function<Status()>& action) {
    return action ? action() : without_action();
  }
  static Status without_action() {
    return fail(ErrorCode::kUnsupported, "this daemon can be looked at only");
  }

  void add_peers(v1::GetStatusResponse& response) {
    for (const PeerInfo& peer : peers_.peers()) {
      to_proto(peer, *response.add_peers());
      if (peer.state == PeerState::kUp) continue;
      if (peer.state == PeerState::kWaiting) {
        response.add_problems(fmt::format(
            "waiting for node {} ({}) to connect: it has the higher id, so it calls{}", peer.node,
            peer.address, peer.reason.empty() ? "" : "; last attempt: " + peer.reason));
        continue;
      }
      response.add_problems(fmt::format("node {} ({}) is not connected{}", peer.node, peer.address,
                                        peer.reason.empty() ? "" : ": " + peer.reason));
    }
  }

  static void add_links(const ControlSnapshot& snapshot, v1::GetStatusResponse& response) {
    std::uint32_t up = 0;
    for (const LinkInfo& link : snapshot.links) {
      if (link.state == "up") ++up;
      if (link.state != "error") continue;
      response.add_problems(fmt::format("the link of rail {} to {} is in error: {}", link.rail,
                                        link.peer_name, link.reason));
    }
    response.set_links(static_cast<std::uint32_t>(snapshot.links.size()));
    response.set_links_up(up);
  }

  /// `last`: the one before in the stream; without a time when there is none.
  grpc::Status take_sample(const v1::StatsSample& last, v1::StatsSample& sample) {
    const auto snapshot = node_.snapshot();
    if (!snapshot) return refuse(snapshot.error());
    sample.set_unix_time_ns(unix_time_ns());
    sample.set_node(node_.id());
    sample.set_draining(snapshot->draining);
    sample.set_sessions(static_cast<std::uint32_t>(snapshot->sessions.size()));
    for (const SessionInfo& one : snapshot->sessions) to_proto(one, *sample.add_ranks());
    for (const QueueInfo& queue : snapshot->queues) to_proto(queue, false, *sample.add_queues());
    for (const LinkInfo& link : snapshot->links) to_proto(link, *sample.add_links());
    for (const JobInfo& job : snapshot->jobs) to_proto(job, *snapshot, *sample.add_jobs());
    for (const PeerInfo& peer : peers_.peers()) to_proto(peer, *sample.add_peers());
    for (std::uint32_t rail = 0; rail < node_.rails(); ++rail) {
      to_proto(rail, node_.proxy_stats(rail), false, *sample.add_rails());
    }
    if (last.unix_time_ns() == 0 || sample.unix_time_ns() <= last.unix_time_ns()) return {};
    sample.set_elapsed_ns(sample.unix_time_ns() - last.unix_time_ns());
    const double seconds = 1e-9 * static_cast<double>(sample.elapsed_ns());
    sample.set_commands_per_second(rate(commands_of(last), commands_of(sample), seconds));
    sample.set_bytes_per_second(rate(bytes_of(last), bytes_of(sample), seconds));
    return {};
  }

  static std::uint64_t unix_time_ns() {
    return static_cast<std::uint64_t>(
        nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());
  }

  /// A session that ended takes its counts along: then there is no rate.
  static double rate(std::uint64_t before, std::uint64_t after, double seconds) {
    return after > before && seconds > 0 ? static_cast<double>(after - before) / seconds : 0;
  }

  Node& node_;
  const GrpcPeerTransport& peers_;
  const AdminActions actions_;
  AdminInfo info_;
  const Clock::time_point began_ = Clock::now();
  std::mutex mutex_;
  AdminStreams streams_{kWatchersMax};
  TraceRecorder recorder_{node_, streams_};
};

AdminService::AdminService(Node& node, const GrpcPeerTransport& peers, AdminInfo info,
                           AdminActions actions)
    : impl_(std::make_unique<Impl>(node, peers, std::move(info), std::move(actions))) {}
AdminService::~AdminService() = default;
grpc::Service& AdminService::service() { return *impl_; }
void AdminService::set_listen(std::string listen) { impl_->set_listen(std::move(listen)); }
void AdminService::stop() { impl_->stop(); }

}  // namespace mk::daemon
