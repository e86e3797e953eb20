#include "daemon/service/admin_service.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>

#include "daemon/service/admin_convert.h"
#include "daemon/service/version.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"

namespace mk::daemon {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr nanoseconds kIntervalDefault = std::chrono::seconds(1);
constexpr nanoseconds kIntervalMin = std::chrono::milliseconds(100);
constexpr nanoseconds kIntervalMax = std::chrono::seconds(60);
/// How soon a watch notices that its caller has gone.
constexpr nanoseconds kCancelPoll = std::chrono::milliseconds(200);

grpc::Status refuse(const Error& error) {
  const auto code = error.code == ErrorCode::kTimeout    ? grpc::StatusCode::DEADLINE_EXCEEDED
                    : error.code == ErrorCode::kDraining ? grpc::StatusCode::FAILED_PRECONDITION
                    : error.code == ErrorCode::kInvalidArgument ? grpc::StatusCode::INVALID_ARGUMENT
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
  void stop() {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    stopped_.notify_all();
  }

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
    add_rails(*response);
    add_peers(*response);
    add_links(*snapshot, *response);
    if (actions_.problems) {
      for (const std::string& problem : actions_.problems()) response->add_problems(problem);
    }
    response->set_health(snapshot->draining              ? v1::GetStatusResponse::HEALTH_DRAINING
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
    const auto asked = request->interval_ns();
    if (asked != 0 && (asked < static_cast<std::uint64_t>(kIntervalMin.count()) ||
                       asked > static_cast<std::uint64_t>(kIntervalMax.count()))) {
      return {grpc::StatusCode::INVALID_ARGUMENT,
              fmt::format("interval_ns is {}; 0 (1 s) or {} to {} is allowed", asked,
                          kIntervalMin.count(), kIntervalMax.count())};
    }
    const nanoseconds interval =
        asked == 0 ? kIntervalDefault : nanoseconds(static_cast<std::int64_t>(asked));
    {
      std::lock_guard lock(mutex_);
      if (watchers_ >= kWatchersMax) {
        return {grpc::StatusCode::RESOURCE_EXHAUSTED,
                fmt::format("{} callers watch already, more are not allowed", kWatchersMax)};
      }
      ++watchers_;
    }
    const grpc::Status status = watch(*context, interval, request->samples(), *writer);
    std::lock_guard lock(mutex_);
    --watchers_;
    return status;
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
    if (!actions_.set_job) return {grpc::StatusCode::UNIMPLEMENTED, "jobs cannot be changed here"};
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
    if (action) return action();
    return fail(ErrorCode::kUnsupported, "this daemon can be looked at only");
  }

  void add_rails(v1::GetStatusResponse& response) {
    for (std::uint32_t rail = 0; rail < node_.rails(); ++rail) {
      const ProxyStats& stats = node_.proxy_stats(rail);
      v1::RailStatus& one = *response.add_rails();
      one.set_rail(rail);
      one.set_passes(stats.passes.value());
      one.set_busy_passes(stats.busy_passes.value());
      one.set_sleeps(stats.sleeps.value());
      one.set_arrivals(stats.arrivals.value());
      one.set_bad_arrivals(stats.bad_arrivals.value());
    }
  }

  void add_peers(v1::GetStatusResponse& response) {
    for (const PeerInfo& peer : peers_.peers()) {
      to_proto(peer, *response.add_peers());
      if (peer.state == PeerState::kUp) continue;
      response.add_problems(
          fmt::format("node {} ({}) is not connected{}{}", peer.node, peer.address,
                      peer.state == PeerState::kWaiting ? ", it has to call this daemon" : "",
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

  grpc::Status watch(grpc::ServerContext& context, nanoseconds interval, std::uint32_t samples,
                     grpc::ServerWriter<v1::StatsSample>& writer) {
    v1::StatsSample last;
    Clock::time_point last_at{};
    Clock::time_point next = Clock::now();
    for (std::uint32_t count = 0; samples == 0 || count < samples; ++count) {
      if (count > 0 && !sleep_until(next, context)) {
        return {grpc::StatusCode::UNAVAILABLE, "the daemon is shutting down"};
      }
      if (context.IsCancelled()) return grpc::Status::CANCELLED;
      const auto snapshot = node_.snapshot();
      if (!snapshot) return refuse(snapshot.error());
      const Clock::time_point at = Clock::now();
      v1::StatsSample sample = take_sample(*snapshot);
      if (count > 0) {
        const double seconds = std::chrono::duration<double>(at - last_at).count();
        sample.set_elapsed_ns(static_cast<std::uint64_t>(nanoseconds(at - last_at).count()));
        sample.set_commands_per_second(rate(commands_of(last), commands_of(sample), seconds));
        sample.set_bytes_per_second(rate(bytes_of(last), bytes_of(sample), seconds));
      }
      if (!writer.Write(sample)) return grpc::Status::CANCELLED;
      last = std::move(sample);
      last_at = at;
      // Samples that a slow reader held up are left out, not caught up on.
      next = std::max(next + interval, Clock::now());
    }
    return grpc::Status::OK;
  }

  static v1::StatsSample take_sample(const ControlSnapshot& snapshot) {
    v1::StatsSample sample;
    sample.set_unix_time_ns(static_cast<std::uint64_t>(
        nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count()));
    sample.set_sessions(static_cast<std::uint32_t>(snapshot.sessions.size()));
    for (const QueueInfo& queue : snapshot.queues) to_proto(queue, false, *sample.add_queues());
    for (const LinkInfo& link : snapshot.links) to_proto(link, *sample.add_links());
    return sample;
  }

  /// A session that ended takes its counts along: then there is no rate.
  static double rate(std::uint64_t before, std::uint64_t after, double seconds) {
    return after > before && seconds > 0 ? static_cast<double>(after - before) / seconds : 0;
  }

  /// False when the service stops.
  bool sleep_until(Clock::time_point until, const grpc::ServerContext& context) {
    std::unique_lock lock(mutex_);
    while (!stopping_ && !context.IsCancelled()) {
      const auto wake = std::min(until, Clock::now() + kCancelPoll);
      stopped_.wait_until(lock, wake, [this] { return stopping_; });
      if (Clock::now() >= until) break;
    }
    return !stopping_;
  }

  Node& node_;
  const GrpcPeerTransport& peers_;
  const AdminActions actions_;
  AdminInfo info_;
  const Clock::time_point began_ = Clock::now();
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  std::uint32_t watchers_ = 0;
};

AdminService::AdminService(Node& node, const GrpcPeerTransport& peers, AdminInfo info,
                           AdminActions actions)
    : impl_(std::make_unique<Impl>(node, peers, std::move(info), std::move(actions))) {}
AdminService::~AdminService() = default;
grpc::Service& AdminService::service() { return *impl_; }
void AdminService::set_listen(std::string listen) { impl_->set_listen(std::move(listen)); }
void AdminService::stop() { impl_->stop(); }

}  // namespace mk::daemon
