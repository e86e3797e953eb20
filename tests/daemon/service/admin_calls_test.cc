// The Admin calls about jobs, metrics, the configuration and traces, on a whole daemon.
#include <set>
#include <thread>

#include "tests/daemon/service/admin_rig.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;
using Stub = v1::Admin::Stub;

class AdminCalls : public OneDaemon {
 protected:
  std::unique_ptr<RawClient> attach(const std::string& job) {
    auto attached = RawClient::attach(folder / "sock", job);
    EXPECT_TRUE(attached) << attached.error().message;
    auto client = std::make_unique<RawClient>(std::move(*attached));
    EXPECT_TRUE(client->wait_for(shm::MessageType::kJobUp));
    return client;
  }
  std::vector<v1::MetricsSample> watch(std::uint64_t interval_ms, std::uint32_t samples) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::WatchMetricsRequest request;
    request.set_interval_ns(interval_ms * 1'000'000);
    request.set_samples(samples);
    const auto reader = stub->WatchMetrics(&context, request);
    std::vector<v1::MetricsSample> all;
    for (v1::MetricsSample sample; reader->Read(&sample);) all.push_back(sample);
    const grpc::Status done = reader->Finish();
    EXPECT_TRUE(done.ok()) << done.error_message();
    return all;
  }
};

TEST_F(AdminCalls, ListsJobsWithWhatTheirRanksHave) {
  const auto client = attach("train");
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(ask(&Stub::ListJobs, v1::ListJobsRequest(), jobs).ok());
  ASSERT_EQ(jobs.jobs_size(), 1);
  EXPECT_EQ(jobs.jobs(0).job(), "train");
  EXPECT_EQ(jobs.jobs(0).state(), "up");
  EXPECT_EQ(jobs.jobs(0).waits_for(), "");
  EXPECT_EQ(jobs.jobs(0).world(), 1u);
  EXPECT_EQ(jobs.jobs(0).sessions(), 1u);
  EXPECT_EQ(jobs.jobs(0).missing_ranks_size(), 0);
  EXPECT_GT(jobs.jobs(0).age_ns(), 0u);
}

TEST_F(AdminCalls, TerminatesAJobOnce) {
  const auto client = attach("train");
  v1::TerminateJobRequest request;
  request.set_job("train");
  request.set_reason("why not");
  v1::TerminateJobResponse response;
  ASSERT_TRUE(ask(&Stub::TerminateJob, request, response).ok());
  EXPECT_EQ(response.sessions(), 1u);
  EXPECT_TRUE(client->wait_for(shm::MessageType::kSessionFailed));
  v1::ListSessionsResponse sessions;
  ASSERT_TRUE(ask(&Stub::ListSessions, v1::ListSessionsRequest(), sessions).ok());
  ASSERT_EQ(sessions.recent_failures_size(), 1);
  EXPECT_THAT(sessions.recent_failures(0).reason(), HasSubstr("administrator on node 3: why not"));
  const grpc::Status again = ask(&Stub::TerminateJob, request, response);
  EXPECT_EQ(again.error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(AdminCalls, EveryWatcherOfMetricsHasItsOwnPace) {
  std::vector<v1::MetricsSample> fast, slow;
  const auto begin = std::chrono::steady_clock::now();
  std::thread other([&] { slow = watch(1000, 2); });
  fast = watch(100, 6);
  const auto fast_took = std::chrono::steady_clock::now() - begin;
  other.join();
  // Samples are due at fixed times after the call: one that is late leaves the next less.
  EXPECT_EQ(fast.size(), 6u);
  EXPECT_EQ(slow.size(), 2u);
  EXPECT_GE(fast_took, std::chrono::milliseconds(500));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1000));
  std::set<std::string> names;
  for (const v1::MetricFamily& family : fast[0].families()) {
    EXPECT_NE(family.type(), v1::MetricFamily::TYPE_UNSPECIFIED) << family.name();
    EXPECT_TRUE(names.insert(family.name()).second) << family.name();
  }
  for (const char* name : {"mkernel_build_info", "mkernel_commands_total", "mkernel_sessions",
                           "mkernel_commit_to_post_seconds", "mkernel_arrival_to_flag_seconds"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

TEST_F(AdminCalls, TellsItsConfigurationAndComparesItsFile) {
  v1::GetConfigRequest request;
  v1::GetConfigResponse response;
  ASSERT_TRUE(ask(&Stub::GetConfig, request, response).ok());
  EXPECT_THAT(response.toml(), HasSubstr("\nsessions = 7\n"));
  EXPECT_EQ(response.file(), "");
  Config other = config;
  other.limits.sessions = 8;
  other.log.level = "debug";
  daemon->set_config_source("/somewhere", [&other] { return Result<Config>(other); });
  request.set_compare(true);
  ASSERT_TRUE(ask(&Stub::GetConfig, request, response).ok());
  EXPECT_EQ(response.file(), "/somewhere");
  ASSERT_EQ(response.changes_size(), 2);
  EXPECT_EQ(response.changes(0).key(), "limits.sessions");
  EXPECT_EQ(response.changes(0).before(), "7");
  EXPECT_EQ(response.changes(0).after(), "8");
  EXPECT_FALSE(response.changes(0).live());
  EXPECT_TRUE(response.changes(1).live());
  daemon->set_config_source("/somewhere", [] {
    return Result<Config>(fail(ErrorCode::kInvalidArgument, "password = \"hunter2\" is no key"));
  });
  ASSERT_TRUE(ask(&Stub::GetConfig, request, response).ok());
  EXPECT_EQ(response.file_error(), "password = \"(secret)\" is no key");
  daemon->set_config_source("", nullptr);
}

TEST_F(AdminCalls, RecordsOneTraceAtATime) {
  v1::RecordTraceRequest request;
  request.set_duration_ns(2'000'000'000);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const auto first = stub->RecordTrace(&context, request);
  const auto second_code = [&] {
    grpc::ClientContext second;
    const auto reader = stub->RecordTrace(&second, request);
    v1::TraceChunk chunk;
    EXPECT_FALSE(reader->Read(&chunk));
    return reader->Finish().error_code();
  };
  // The first may not have begun yet when the second does: then it is the first that is refused.
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (!daemon->node().trace(0).on() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(second_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  v1::TraceChunk chunk;
  ASSERT_TRUE(first->Read(&chunk));
  EXPECT_EQ(chunk.node(), 3u);
  EXPECT_EQ(chunk.events_size(), 0);
  EXPECT_EQ(chunk.dropped(), 0u);
  EXPECT_FALSE(first->Read(&chunk));
  EXPECT_TRUE(first->Finish().ok());
  for (const std::uint64_t duration : {0ull, 999'999ull, 60'000'000'001ull}) {
    request.set_duration_ns(duration);
    EXPECT_EQ(second_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
}

TEST_F(AdminCalls, ACallerThatGoesEndsItsTrace) {
  v1::RecordTraceRequest request;
  request.set_duration_ns(60'000'000'000);
  {
    grpc::ClientContext context;
    const auto reader = stub->RecordTrace(&context, request);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    context.TryCancel();
    (void)reader->Finish();
  }
  request.set_duration_ns(1'000'000);
  EXPECT_TRUE(eventually([&] {
    grpc::ClientContext context;
    const auto reader = stub->RecordTrace(&context, request);
    for (v1::TraceChunk chunk; reader->Read(&chunk);) {
    }
    return reader->Finish().ok();
  }));
}

TEST_F(AdminCalls, ACallerThatDoesNotReadItsTraceKeepsTheRecordersForSecondsOnly) {
  v1::RecordTraceRequest request;
  request.set_duration_ns(500'000'000);
  grpc::ClientContext context;
  const auto unread = stub->RecordTrace(&context, request);
  TraceBuffer& trace = daemon->node().trace(0);
  ASSERT_TRUE(eventually([&] { return trace.on(); }));
  // More than any window between the two: no rail does anything, so nobody else records.
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (trace.on() && std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 10'000; ++i) trace.record({.time_ns = 1, .cookie = ~std::uint64_t{0}});
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_FALSE(trace.on());
  for (v1::TraceChunk chunk; unread->Read(&chunk);) {
  }
  EXPECT_EQ(unread->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(AdminCalls, AStopEndsThem) {
  grpc::ClientContext context;
  v1::RecordTraceRequest request;
  request.set_duration_ns(60'000'000'000);
  const auto reader = stub->RecordTrace(&context, request);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon->stop(std::chrono::steady_clock::now());
  for (v1::TraceChunk chunk; reader->Read(&chunk);) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

}  // namespace
}  // namespace mk::daemon
