// What mkctl prints: quantities, tables, JSON.
#include "daemon/mkctl/render.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "daemon/mkctl/json.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

using testing::HasSubstr;

TEST(Human, Quantities) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1000), "1.00 KB");
  EXPECT_EQ(human_bytes(262'144), "262 KB");
  EXPECT_EQ(human_bytes(12'345'678), "12.3 MB");
  EXPECT_EQ(human_bytes(9.9996e8), "1.00 GB");
  EXPECT_EQ(human_bytes(2e21), "2000000 PB");
  EXPECT_EQ(human_count(1234567), "1.23 M");
  EXPECT_EQ(human_duration(850), "850 ns");
  EXPECT_EQ(human_duration(12'300), "12.3 us");
  EXPECT_EQ(human_duration(4'050'000'000), "4.05 s");
  EXPECT_EQ(human_age(59'000'000'000), "59s");
  EXPECT_EQ(human_age(3'599'000'000'000), "59m 59s");
  EXPECT_EQ(human_age(90'000'000'000'000), "1d 1h");
}

TEST(TableText, AlignsNumbersRightAndLeavesEmptyColumnsOut) {
  Table table({"JOB", "RANK", "REASON", "X"});
  table.add({"a", "7", "", "-"});
  table.add({"long\nname", "128", "", "5"});
  EXPECT_EQ(table.text(),
            "JOB        RANK  X\n"
            "a             7  -\n"
            "long?name   128  5\n");
}

TEST(TableText, CountsCharactersNotBytes) {
  Table table({"A", "B"});
  table.add({"\xc3\xa9\xc3\xa9", "x"});
  table.add({"abc", "y"});
  EXPECT_EQ(table.text(), "A    B\n\xc3\xa9\xc3\xa9   x\nabc  y\n");
}

v1::Queue busy_queue() {
  v1::Queue queue;
  queue.set_session_id(3);
  queue.set_job("train");
  queue.set_rank(1);
  queue.set_commands(18'446'744'073'709'551'615ull);
  queue.set_batches(2);
  queue.set_mean_batch(2.5);
  queue.mutable_commit_to_post()->set_count(4);
  queue.mutable_commit_to_post()->set_p50_ns(320);
  queue.mutable_commit_to_post()->set_p99_ns(1'500);
  return queue;
}

TEST(Render, Queues) {
  v1::ListQueuesResponse queues;
  EXPECT_THAT(render(queues), HasSubstr("no queues"));
  *queues.add_queues() = busy_queue();
  const std::string text = render(queues);
  EXPECT_THAT(text, HasSubstr("2.50"));
  EXPECT_THAT(text, HasSubstr("320 ns / 1.50 us"));
  EXPECT_THAT(text, HasSubstr("18446744073709551615"));
}

TEST(Render, StatusShowsWhatIsWrong) {
  v1::GetStatusResponse status;
  status.set_health(v1::GetStatusResponse::HEALTH_DEGRADED);
  status.add_problems("node 2 \x1b[31mis gone");
  v1::PeerStatus& peer = *status.add_peers();
  peer.set_node(2);
  peer.set_state(v1::PeerStatus::STATE_WAITING);
  peer.set_reason("why");
  const std::string text = render(status);
  EXPECT_THAT(text, HasSubstr("node 0: degraded"));
  EXPECT_THAT(text, HasSubstr("waiting"));
  EXPECT_THAT(text, HasSubstr("why"));
  EXPECT_THAT(text, HasSubstr("node 2 ?[31mis gone"));  // no escape reaches the terminal
}

TEST(Render, SessionsAndFailures) {
  v1::ListSessionsResponse sessions;
  EXPECT_EQ(render(sessions), "no rank is attached\n");
  v1::Session& session = *sessions.add_recent_failures();
  session.set_job("train");
  session.set_rank(3);
  session.set_world(4);
  session.set_reason("a bad command");
  EXPECT_THAT(render(sessions), HasSubstr("ended with an error:"));
  EXPECT_THAT(render(sessions), HasSubstr("3/4"));
  EXPECT_THAT(render(sessions), HasSubstr("a bad command"));
}

TEST(Render, LinksAndSamples) {
  v1::ListLinksResponse links;
  v1::Link& link = *links.add_links();
  link.set_peer_name("node 1 rail 0");
  link.set_state("error");
  link.set_reason("timed out");
  link.set_bytes(5'000'000);
  EXPECT_THAT(render(links), HasSubstr("5.00 MB"));
  EXPECT_THAT(render(links), HasSubstr("timed out"));

  v1::StatsSample sample;
  EXPECT_THAT(render(sample), HasSubstr("-"));
  sample.set_elapsed_ns(1'000'000'000);
  sample.set_commands_per_second(2'000'000);
  sample.set_bytes_per_second(3e9);
  *sample.add_queues() = busy_queue();
  EXPECT_THAT(render(sample), HasSubstr("2.00 M"));
  EXPECT_THAT(render(sample), HasSubstr("3.00 GB"));
  EXPECT_THAT(render(sample), HasSubstr("1.50 us"));
}

TEST(Json, KeepsNamesNumbersAndDefaults) {
  v1::GetStatusResponse status;
  status.set_health(v1::GetStatusResponse::HEALTH_DRAINING);
  status.set_generation(0xabc);
  status.set_uptime_ns(18'446'744'073'709'551'615ull);
  status.add_problems("bad utf8 \xff");
  status.add_peers()->set_state(v1::PeerStatus::STATE_UP);
  const auto json = nlohmann::json::parse(to_json(status, 2));
  EXPECT_EQ(json["health"], "draining");
  EXPECT_EQ(json["generation"], "0000000000000abc");
  EXPECT_EQ(json["uptime_ns"].get<std::uint64_t>(), 18'446'744'073'709'551'615ull);
  EXPECT_EQ(json["peers"][0]["state"], "up");
  EXPECT_EQ(json["peers"][0]["reason"], "");
  EXPECT_EQ(json["problems"][0], "bad utf8 \xef\xbf\xbd");
  EXPECT_EQ(json["rails"].size(), 0u);
  EXPECT_EQ(json["sessions_max"], 0);
  EXPECT_EQ(to_json(status, -1).find('\n'), std::string::npos);
}

TEST(Json, NestsMessages) {
  v1::ListQueuesResponse queues;
  *queues.add_queues() = busy_queue();
  const auto json = nlohmann::json::parse(to_json(queues, -1));
  EXPECT_EQ(json["queues"][0]["commit_to_post"]["p99_ns"], 1500);
  EXPECT_EQ(json["queues"][0]["mean_batch"], 2.5);
  EXPECT_EQ(json["queues"][0]["post_to_completion"]["count"], 0);
}

}  // namespace
}  // namespace mk::mkctl
