// What `mkctl trace record` makes of a recording.
#include "daemon/mkctl/trace.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

namespace mk::mkctl {
namespace {

v1::TraceEvent event(v1::TraceEvent::Kind kind, std::uint64_t time_ns, std::uint64_t write) {
  v1::TraceEvent out;
  out.set_kind(kind);
  out.set_time_ns(time_ns);
  out.set_write(write);
  out.set_link(4);
  out.set_slot(1);
  out.set_bytes(100);
  return out;
}

Recording recording(std::int64_t offset_ns = 0) {
  Recording out;
  v1::TraceChunk& chunk = out.chunks.emplace_back();
  *chunk.add_events() = event(v1::TraceEvent::KIND_COMPLETED, 900, 99);  // from before
  *chunk.add_events() = event(v1::TraceEvent::KIND_POSTED, 1000, 1);
  *chunk.add_events() = event(v1::TraceEvent::KIND_POSTED, 1000, 2);
  *chunk.add_events() = event(v1::TraceEvent::KIND_POSTED, 3000, 3);
  *chunk.add_events() = event(v1::TraceEvent::KIND_POSTED, 3500, 4);
  v1::TraceChunk& last = out.chunks.emplace_back();
  *last.add_events() = event(v1::TraceEvent::KIND_COMPLETED, 5000, 2);
  *last.add_events() = event(v1::TraceEvent::KIND_FAILED, 6000, 1);
  *last.add_events() = event(v1::TraceEvent::KIND_COMPLETED, 7000, 3);
  *last.add_events() = event(v1::TraceEvent::KIND_ARRIVED, 7500, 0);
  last.set_dropped(7);
  last.set_unix_minus_monotonic_ns(offset_ns);
  v1::Session& session = *last.add_sessions();
  session.set_slot(1);
  session.set_job("train");
  session.set_rank(6);
  v1::TraceLink& link = *last.add_links();
  link.set_link(4);
  link.set_peer(2);
  return out;
}

TEST(Trace, PairsWritesAndCountsTheRest) {
  TraceSummary summary;
  const Json json = perfetto({recording()}, summary);
  EXPECT_EQ(summary.writes, 3u);
  EXPECT_EQ(summary.failed, 1u);
  EXPECT_EQ(summary.unfinished, 1u);
  EXPECT_EQ(summary.submissions, 3u);
  EXPECT_EQ(summary.arrivals, 1u);
  EXPECT_EQ(summary.dropped, 7u);
  std::map<std::string, double> begins, ends;
  std::string tracks;
  int outstanding = 0, least = 0;
  for (const Json& one : json["traceEvents"]) {
    if (one["ph"] == "b") {
      begins[one["id"]] = one["ts"];
      EXPECT_EQ(one["name"], "train rank 6");
    }
    if (one["ph"] == "e") ends[one["id"]] = one["ts"];
    if (one["ph"] == "M") tracks += one["args"]["name"].get<std::string>() + ";";
    if (one["ph"] != "C") continue;
    outstanding = one["args"]["writes"];
    least = std::min(least, outstanding);
  }
  EXPECT_EQ(begins.size(), 3u);
  ASSERT_EQ(ends.size(), 3u);
  for (const auto& [id, at] : ends) EXPECT_GT(at, begins.at(id));
  EXPECT_EQ(outstanding, 1);
  EXPECT_EQ(least, 0);
  EXPECT_EQ(tracks,
            "node 0;rail 0 to node 2: submissions;rail 0 to node 2: writes;rail 0: arrivals;");
}

// Two operators in turn, whose epochs are the same: a write is of the newer one, also where the
// words of its launch came after it.
TEST(Trace, NamesOperatorEpochAndTagOfEachWrite) {
  Recording all = recording();
  v1::TraceChunk& chunk = all.chunks.back();
  std::uint64_t write = 10;
  const auto launch = [&](const char* op, std::uint64_t tag, std::uint32_t epoch) {
    v1::TraceEvent told = event(v1::TraceEvent::KIND_LAUNCH, 8000, 0);
    told.set_op(op);
    told.set_tag(tag);
    told.set_epoch(epoch);
    told.set_m(4096);
    told.add_sizes(14'336);
    told.add_sizes(8192);
    *chunk.add_events() = told;
  };
  const auto begin = [&](std::uint32_t epoch) {
    v1::TraceEvent posted = event(v1::TraceEvent::KIND_POSTED, 8000, ++write);
    posted.set_epoch(epoch);
    *chunk.add_events() = posted;
  };
  const auto end = [&] {
    *chunk.add_events() = event(v1::TraceEvent::KIND_COMPLETED, 9000, write);
  };
  launch("ag_gemm", 7, 3), begin(3), end();
  launch("gemm_rs", 8, 3), begin(3), end();
  begin(4), launch("ag_gemm", 9, 4), end();
  begin(5), end();
  TraceSummary summary;
  std::vector<std::string> said;
  const Json json = perfetto({all}, summary);
  for (const Json& one : json["traceEvents"]) {
    if (one["ph"] != "b" || one["args"]["epoch"] == 0) continue;
    const Json& args = one["args"];
    said.push_back(one["name"].get<std::string>());
    if (args.contains("tag"))
      said.back() += fmt::format(" {} {}x{}x{}", args["tag"].dump(), args["m"].dump(),
                                 args["n"].dump(), args["k"].dump());
  }
  EXPECT_EQ(said,
            (std::vector<std::string>{"train rank 6: ag_gemm 7 4096x14336x8192",
                                      "train rank 6: gemm_rs 8 4096x14336x8192",
                                      "train rank 6: ag_gemm 9 4096x14336x8192", "train rank 6"}));
}

TEST(Trace, SeveralDaemonsShareOneClock) {
  Recording first = recording(1'000'000), second = recording(2'000'000);
  first.host = "a";
  second.host = "b";
  TraceSummary summary;
  const Json json = perfetto({first, second}, summary);
  std::map<int, double> earliest;
  for (const Json& one : json["traceEvents"]) {
    if (!one.contains("ts")) continue;
    const int process = one["pid"];
    const double at = one["ts"];
    if (!earliest.contains(process)) earliest[process] = at;
    earliest[process] = std::min(earliest[process], at);
  }
  ASSERT_EQ(earliest.size(), 2u);
  EXPECT_NEAR(earliest[2] - earliest[1], 1000, 1e-6);  // microseconds
  EXPECT_EQ(summary.writes, 6u);
}

TEST(Trace, OfNothingIsEmpty) {
  TraceSummary summary;
  EXPECT_TRUE(perfetto({}, summary)["traceEvents"].empty());
}

}  // namespace
}  // namespace mk::mkctl
