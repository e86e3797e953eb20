// The Admin service, health checking and reflection of a whole daemon in this process.
#include "daemon/service/admin_service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "daemon/service/admin_convert.h"
#include "tests/daemon/service/admin_rig.h"
#include "tests/daemon/service/raw_call.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;

TEST_F(OneDaemon, SaysItsVersion) {
  v1::GetVersionResponse response;
  ASSERT_TRUE(ask(&v1::Admin::Stub::GetVersion, v1::GetVersionRequest(), response).ok());
  EXPECT_NE(response.version(), "");
  EXPECT_EQ(response.abi_major(), shm::kAbiMajor);
  EXPECT_EQ(response.abi_minor(), shm::kAbiMinor);
  EXPECT_THAT(response.fabrics(), testing::Contains("loopback"));
}

TEST_F(OneDaemon, SaysItsStatus) {
  const v1::GetStatusResponse response = status();
  EXPECT_EQ(response.health(), v1::GetStatusResponse::HEALTH_OK);
  EXPECT_EQ(response.problems_size(), 0);
  EXPECT_EQ(response.node(), 3u);
  EXPECT_EQ(response.pid(), static_cast<std::uint32_t>(::getpid()));
  EXPECT_EQ(response.generation(), daemon->node().generation());
  EXPECT_EQ(response.listen(), "unix:" + (folder / "peer"));
  EXPECT_EQ(response.socket(), folder / "sock");
  EXPECT_EQ(response.fabric(), "null");
  EXPECT_EQ(response.rails_size(), 2);
  EXPECT_EQ(response.sessions(), 0u);
  EXPECT_EQ(response.sessions_max(), 7u);
  EXPECT_GT(response.uptime_ns(), 0u);
}

TEST_F(OneDaemon, ListsSessionsAndTheirQueues) {
  auto client = RawClient::attach(folder / "sock", "admin-test");
  ASSERT_TRUE(client) << client.error().message;
  ASSERT_TRUE(client->wait_for(shm::MessageType::kJobUp));
  v1::ListSessionsResponse sessions;
  ASSERT_TRUE(ask(&v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), sessions).ok());
  ASSERT_EQ(sessions.sessions_size(), 1);
  const v1::Session& session = sessions.sessions(0);
  EXPECT_EQ(session.job(), "admin-test");
  EXPECT_EQ(session.state(), "up");
  EXPECT_EQ(session.world(), 1u);
  EXPECT_EQ(session.local_size(), 1u);
  EXPECT_EQ(session.pid(), ::getpid());
  EXPECT_EQ(session.uid(), ::getuid());
  v1::ListQueuesResponse queues;
  ASSERT_TRUE(ask(&v1::Admin::Stub::ListQueues, v1::ListQueuesRequest(), queues).ok());
  ASSERT_EQ(queues.queues_size(), 1);
  EXPECT_EQ(queues.queues(0).session_id(), session.session_id());
  EXPECT_EQ(queues.queues(0).job(), "admin-test");
  EXPECT_EQ(queues.queues(0).depth(), 0u);
  EXPECT_EQ(queues.queues(0).mean_batch(), 0);
  EXPECT_EQ(queues.queues(0).commit_to_post().count(), 0u);
  v1::ListLinksResponse links;
  ASSERT_TRUE(ask(&v1::Admin::Stub::ListLinks, v1::ListLinksRequest(), links).ok());
  EXPECT_EQ(links.links_size(), 0);
  EXPECT_EQ(status().sessions(), 1u);
}

TEST_F(OneDaemon, StreamsStats) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  v1::WatchStatsRequest request;
  request.set_interval_ns(100'000'000);
  request.set_samples(3);
  const auto begin = std::chrono::steady_clock::now();
  const auto reader = stub->WatchStats(&context, request);
  v1::StatsSample sample;
  ASSERT_TRUE(reader->Read(&sample));
  EXPECT_EQ(sample.elapsed_ns(), 0u);
  std::uint64_t last = sample.unix_time_ns();
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(reader->Read(&sample));
    EXPECT_GT(sample.elapsed_ns(), 0u);  // one that is late leaves the next less
    EXPECT_GT(sample.unix_time_ns(), last);
    last = sample.unix_time_ns();
  }
  EXPECT_FALSE(reader->Read(&sample));
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(200));
}

TEST_F(OneDaemon, RefusesStatsAtABadRate) {
  for (const std::uint64_t interval : {1ull, 99'999'999ull, 60'000'000'001ull, ~0ull}) {
    grpc::ClientContext context;
    v1::WatchStatsRequest request;
    request.set_interval_ns(interval);
    const auto reader = stub->WatchStats(&context, request);
    v1::StatsSample sample;
    EXPECT_FALSE(reader->Read(&sample));
    const grpc::Status done = reader->Finish();
    EXPECT_EQ(done.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(done.error_message(), HasSubstr("100000000 to 60000000000 is allowed"));
  }
}

TEST_F(OneDaemon, BoundsTheWatchersAndSurvivesTheirGoing) {
  const auto watch = [&](grpc::ClientContext& context) {
    v1::WatchStatsRequest request;
    request.set_interval_ns(200'000'000);
    auto reader = stub->WatchStats(&context, request);
    v1::StatsSample sample;
    const bool first = reader->Read(&sample);
    return std::pair(std::move(reader), first);
  };
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::StatsSample>>> readers;
  for (std::uint32_t i = 0; i < AdminService::kWatchersMax; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    auto [reader, first] = watch(*contexts.back());
    ASSERT_TRUE(first);
    readers.push_back(std::move(reader));
  }
  {
    grpc::ClientContext context;
    auto [reader, first] = watch(context);
    EXPECT_FALSE(first);
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  EXPECT_EQ(status().health(), v1::GetStatusResponse::HEALTH_OK);  // others are still served
  for (auto& context : contexts) context->TryCancel();
  for (auto& reader : readers) reader->Finish();
  EXPECT_TRUE(eventually([&] {
    grpc::ClientContext context;
    auto [reader, first] = watch(context);
    context.TryCancel();
    reader->Finish();
    return first;
  }));
}

TEST_F(OneDaemon, EndsWatchesWhenItStops) {
  grpc::ClientContext context;
  v1::WatchStatsRequest request;
  request.set_interval_ns(60'000'000'000);
  const auto reader = stub->WatchStats(&context, request);
  v1::StatsSample sample;
  ASSERT_TRUE(reader->Read(&sample));
  daemon->stop(std::chrono::steady_clock::now());
  EXPECT_FALSE(reader->Read(&sample));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(OneDaemon, DrainingShowsInStatusAndHealth) {
  auto client = RawClient::attach(folder / "sock", "stays");
  ASSERT_TRUE(client) << client.error().message;
  EXPECT_EQ(health_of(*channel, ""), kServing);
  EXPECT_EQ(health_of(*channel, "mkernel.v1.Peer"), kServing);
  EXPECT_EQ(health_of(*channel, "nobody"), kHealthUnknown);
  daemon->drain();
  EXPECT_EQ(health_of(*channel, ""), kNotServing);
  EXPECT_TRUE(
      eventually([&] { return status().health() == v1::GetStatusResponse::HEALTH_DRAINING; }));
  const auto late = RawClient::attach(folder / "sock", "late");
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kDraining);
}

TEST_F(OneDaemon, ReflectionListsTheServices) {
  const std::string answer = reflection_list_services(*channel);
  for (const char* service : {"mkernel.v1.Admin", "mkernel.v1.Peer", "grpc.health.v1.Health"}) {
    EXPECT_THAT(answer, HasSubstr(service));
  }
}

TEST(AdminStatus, NamesThePeersThatAreAbsent) {
  TempFolder folder;
  Config config;
  config.node_id = 1;
  config.fabric.name = "null";
  config.listen = {.unix_socket = true, .path = folder / "peer"};
  config.socket.path = folder / "sock";
  config.peers = {{0, {.unix_socket = true, .path = folder / "absent"}},
                  {2, {.unix_socket = true, .path = folder / "late"}}};
  Logger logger{LoggerOptions{.level = LogLevel::kError}};
  auto daemon = Daemon::start(config, logger);
  ASSERT_TRUE(daemon) << daemon.error().message;
  const auto stub = v1::Admin::NewStub(
      grpc::CreateChannel("unix:" + (folder / "peer"), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::GetStatusResponse response;
  ASSERT_TRUE(stub->GetStatus(&context, {}, &response).ok());
  EXPECT_EQ(response.health(), v1::GetStatusResponse::HEALTH_DEGRADED);
  ASSERT_EQ(response.problems_size(), 2);
  EXPECT_THAT(response.problems(0),
              HasSubstr("node 0 (unix:" + (folder / "absent") + ") is not connected"));
  EXPECT_THAT(response.problems(1),
              HasSubstr("waiting for node 2 (unix:" + (folder / "late") + ") to connect"));
  EXPECT_EQ(response.peers(0).state(), v1::PeerStatus::STATE_CONNECTING);
  EXPECT_EQ(response.peers(1).state(), v1::PeerStatus::STATE_WAITING);
}

TEST(AdminConvert, PercentilesAreUpperBoundsOfTheirBuckets) {
  LatencyHistogram histogram;
  v1::LatencyHistogram empty;
  to_proto(histogram, true, empty);
  EXPECT_EQ(empty.count(), 0u);
  EXPECT_EQ(empty.p50_ns(), 0u);
  for (std::uint64_t ns = 1; ns <= 1000; ++ns) histogram.record(ns);
  histogram.record(5'000'000'000'000);  // beyond the last bucket's bound
  v1::LatencyHistogram full;
  to_proto(histogram, true, full);
  EXPECT_EQ(full.count(), 1001u);
  EXPECT_GE(full.p50_ns(), 501u);
  EXPECT_LE(full.p50_ns(), 501 * 5 / 4);
  EXPECT_GE(full.p99_ns(), 991u);
  EXPECT_LE(full.p99_ns(), 991 * 5 / 4);
  std::uint64_t sum = 0, last = 0;
  for (const auto& bucket : full.buckets()) {
    EXPECT_GE(bucket.lower_bound_ns(), last);
    EXPECT_GT(bucket.upper_bound_ns(), bucket.lower_bound_ns());
    last = bucket.upper_bound_ns();
    sum += bucket.count();
  }
  EXPECT_EQ(sum, 1001u);
  v1::LatencyHistogram brief;
  to_proto(histogram, false, brief);
  EXPECT_EQ(brief.buckets_size(), 0);
  EXPECT_EQ(brief.p99_ns(), full.p99_ns());
}

TEST(AdminConvert, QueuesCarryTheirCounters) {
  auto stats = std::make_shared<SessionStats>();
  LaneStats& lane = stats->lanes[2];
  lane.commands.set(12);
  lane.batches.set(5);
  lane.bytes.set(4096);
  lane.completed.set(11);
  lane.credit_stalls.set(3);
  lane.commit_to_post.record(300);
  v1::Queue queue;
  to_proto(QueueInfo{.session_id = 9, .lane = 2, .job = "j", .rank = 4, .depth = 1, .stats = stats},
           true, queue);
  EXPECT_EQ(queue.session_id(), 9u);
  EXPECT_EQ(queue.lane(), 2u);
  EXPECT_EQ(queue.rank(), 4u);
  EXPECT_EQ(queue.depth(), 1u);
  EXPECT_EQ(queue.commands(), 12u);
  EXPECT_DOUBLE_EQ(queue.mean_batch(), 2.4);
  EXPECT_EQ(queue.bytes(), 4096u);
  EXPECT_EQ(queue.completed(), 11u);
  EXPECT_EQ(queue.credit_stalls(), 3u);
  EXPECT_EQ(queue.commit_to_post().count(), 1u);
}

}  // namespace
}  // namespace mk::daemon
