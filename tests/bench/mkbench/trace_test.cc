// Traces of launches that never were: what the files must show of them.

#include "tests/bench/mkbench/trace.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/bench/mkbench/chrome_trace.h"
#include "tests/bench/mkbench/trace_picture.h"

namespace mk::bench {
namespace {

Span span(std::uint32_t rank, const char* role, const char* kind, std::uint64_t begin_ns,
          std::uint64_t end_ns, std::uint32_t index0 = 0, std::uint32_t index1 = 0,
          std::uint32_t other = 0) {
  return {rank, role, 0, kind, {index0, index1}, other, begin_ns, end_ns};
}

/// Two nodes of one rank: rank 0 computes for 10 µs and sends two chunks to rank 1 meanwhile.
LaunchTrace two_ranks() {
  return {"fused",
          2,
          1,
          {span(0, "compute", "tile", 1000, 11'000), span(0, "send", "send", 3000, 3000, 0, 0, 1),
           span(0, "send", "send", 4000, 4000, 1, 0, 1), span(1, "compute", "wait", 1000, 2000),
           span(1, "receive", "arrival", 6000, 6000, 0, 0, 0),
           span(1, "receive", "arrival", 9000, 9000, 1, 0, 0),
           span(1, "receive", "sum", 9000, 12'000, 1, 2, 1)}};
}

TEST(LaunchTrace, GoesFromItsFirstSpanToItsLast) {
  EXPECT_EQ(1000u, two_ranks().begin_ns());
  EXPECT_EQ(12'000u, two_ranks().end_ns());
}

TEST(LaunchTrace, MatchesASendWithTheArrivalAtItsReceiver) {
  LaunchTrace trace = two_ranks();
  // The same chunk number from another node, to another rank, or never arrived: no match.
  trace.spans.push_back(span(0, "receive", "arrival", 7000, 7000, 0, 1, 1));
  trace.spans.push_back(span(0, "send", "send", 5000, 5000, 7, 0, 1));
  const auto transfers = trace.transfers();
  ASSERT_EQ(2u, transfers.size());
  for (std::uint32_t chunk = 0; chunk < 2; ++chunk) {
    EXPECT_EQ(0u, transfers[chunk].from);
    EXPECT_EQ(1u, transfers[chunk].to);
    EXPECT_EQ(chunk, transfers[chunk].chunk);
    EXPECT_EQ(3000u + chunk * 1000, transfers[chunk].committed_ns);
    EXPECT_EQ(6000u + chunk * 3000, transfers[chunk].arrived_ns);
  }
}

TEST(LaunchTrace, AnArrivalIsNeverBeforeItsCommit) {
  LaunchTrace trace{"fused", 2, 1, {}};
  trace.spans = {span(0, "send", "send", 5000, 5000, 0, 0, 1),
                 span(1, "receive", "arrival", 4900, 4900, 0, 0, 0)};
  const auto transfers = trace.transfers();
  ASSERT_EQ(1u, transfers.size());
  EXPECT_EQ(4900u, transfers[0].committed_ns);
}

TEST(LaunchTrace, SpansComeThroughJson) {
  const std::vector<TraceSpan> spans = {{"reduce", 3, "sum", {5, 6}, 7, 1'000'000'000'001, 9}};
  LaunchTrace trace{"fused", 1, 8, {}};
  add_spans(4, nlohmann::json::parse(json_of_spans(spans).dump()), trace);
  ASSERT_EQ(1u, trace.spans.size());
  const Span& back = trace.spans.front();
  EXPECT_EQ(4u, back.rank);
  EXPECT_EQ("reduce", back.role);
  EXPECT_EQ(3u, back.block);
  EXPECT_EQ("sum", back.kind);
  EXPECT_EQ(5u, back.index[0]);
  EXPECT_EQ(6u, back.index[1]);
  EXPECT_EQ(7u, back.other);
  EXPECT_EQ(1'000'000'000'001u, back.begin_ns);
  EXPECT_EQ(9u, back.end_ns);
}

/// The events of a trace by "process/thread: name".
std::map<std::string, std::vector<nlohmann::json>> by_track(const nlohmann::json& trace) {
  std::map<int, std::string> processes;
  std::map<std::pair<int, int>, std::string> threads;
  std::map<std::string, std::vector<nlohmann::json>> events;
  for (const auto& event : trace.at("traceEvents")) {
    const int process = event.at("pid").get<int>();
    const std::pair<int, int> thread{process, event.at("tid").get<int>()};
    if (event.at("ph") == "M") {
      const auto name = event.at("args").at("name").get<std::string>();
      (event.at("name") == "process_name" ? processes[process] : threads[thread]) = name;
    } else {
      events[processes.at(process) + "/" + threads.at(thread) + ": " +
             event.at("name").get<std::string>()]
          .push_back(event);
    }
  }
  return events;
}

TEST(ChromeTrace, HasAProcessPerRankAThreadPerBlockAndALinkPerPair) {
  const std::vector<LaunchTrace> launches = {two_ranks()};
  const auto events = by_track(chrome_trace(launches));
  const auto& tile = events.at("rank 0 (node 0)/compute 0: tile").at(0);
  EXPECT_EQ("X", tile.at("ph"));
  EXPECT_EQ(0.0, tile.at("ts").get<double>());  // microseconds from the launch's begin
  EXPECT_EQ(10.0, tile.at("dur").get<double>());
  EXPECT_EQ("i", events.at("rank 0 (node 0)/send 0: send").at(0).at("ph"));
  EXPECT_EQ(2u, events.at("rank 1 (node 1)/receive 0: arrival").size());
  // Both chunks are on their way at once from 4 to 6 µs: two lines.
  const auto& first = events.at("links/rank 0 -> rank 1, line 00: chunk 0").at(0);
  EXPECT_EQ(2.0, first.at("ts").get<double>());
  EXPECT_EQ(3.0, first.at("dur").get<double>());
  const auto& second = events.at("links/rank 0 -> rank 1, line 01: chunk 1").at(0);
  EXPECT_EQ(3.0, second.at("ts").get<double>());
  EXPECT_EQ(5.0, second.at("dur").get<double>());
}

TEST(ChromeTrace, EachSpanSaysOfWhichOperatorAndLaunch) {
  std::vector<LaunchTrace> launches = {two_ranks()};
  launches[0].about = {{"operator", "gemm-ar"}, {"launch", 3}};
  const auto events = by_track(chrome_trace(launches));
  for (const char* const span : {"rank 0 (node 0)/compute 0: tile", "launches/launches: fused"}) {
    const auto& what = events.at(span).at(0).at("args");
    EXPECT_EQ("gemm-ar", what.at("operator")) << span;
    EXPECT_EQ(3, what.at("launch")) << span;
  }
}

TEST(ChromeTrace, LaunchesFollowEachOther) {
  LaunchTrace later = two_ranks();
  later.title = "unfused";
  for (Span& span : later.spans) {
    span.begin_ns += 60'000'000'000;
    span.end_ns += 60'000'000'000;
  }
  const std::vector<LaunchTrace> launches = {two_ranks(), later};
  const auto events = by_track(chrome_trace(launches));
  EXPECT_EQ(0.0, events.at("launches/launches: fused").at(0).at("ts").get<double>());
  EXPECT_EQ(11.0, events.at("launches/launches: fused").at(0).at("dur").get<double>());
  const double begin = events.at("launches/launches: unfused").at(0).at("ts").get<double>();
  EXPECT_GT(begin, 11.0);
  EXPECT_LT(begin, 13.0);
  EXPECT_EQ(begin, events.at("rank 0 (node 0)/compute 0: tile").at(1).at("ts").get<double>());
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(TracePicture, HasLanesForComputeNodeAndNetwork) {
  LaunchTrace slower = two_ranks();
  slower.title = "unfused";
  for (Span& span : slower.spans) {
    span.begin_ns *= 2;
    span.end_ns *= 2;
  }
  const std::vector<LaunchTrace> launches = {two_ranks(), slower};
  const std::string picture = trace_picture(launches, "a title");
  EXPECT_EQ(1u, count(picture, "<svg"));
  EXPECT_EQ(1u, count(picture, "</svg>"));
  EXPECT_EQ(1u, count(picture, ">a title<"));
  EXPECT_EQ(1u, count(picture, ">fused: "));
  EXPECT_EQ(1u, count(picture, ">unfused: "));
  for (const char* lane : {"rank 0 compute", "rank 0 network", "rank 1 compute", "rank 1 node"})
    EXPECT_EQ(2u, count(picture, std::string(">") + lane + "<")) << lane;
  // One scale: the same tile is twice as wide in the slower launch, which fills the plot: 20 of
  // 22 µs of 780.
  EXPECT_EQ(1u, count(picture, R"(width="709.1")"));
  EXPECT_EQ(1u, count(picture, R"(width="354.5")"));
  // The first chunk is on the link for 3 µs of 22, then the second one.
  EXPECT_EQ(1u, count(picture, R"(width="106.4" height="10" fill="#d9822b")"));
  EXPECT_EQ(1u, count(picture, R"(width="106.4" height="10" fill="#eeb069")"));
}

}  // namespace
}  // namespace mk::bench
