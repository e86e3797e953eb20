#include "tests/bench/mkbench/trace.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace mk::bench {

std::uint64_t LaunchTrace::begin_ns() const {
  std::uint64_t begin = spans.empty() ? 0 : spans.front().begin_ns;
  for (const Span& span : spans) begin = std::min(begin, span.begin_ns);
  return begin;
}

std::uint64_t LaunchTrace::end_ns() const {
  std::uint64_t end = 0;
  for (const Span& span : spans) end = std::max(end, span.end_ns);
  return end;
}

std::vector<Transfer> LaunchTrace::transfers() const {
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::uint64_t> arrivals;
  for (const Span& span : spans) {
    if (span.kind == "arrival")
      arrivals.emplace(std::tuple(span.rank, span.index[0], span.index[1]), span.begin_ns);
  }
  std::vector<Transfer> transfers;
  for (const Span& span : spans) {
    if (span.kind != "send") continue;
    const auto arrival = arrivals.find(std::tuple(span.other, span.index[0], span.index[1]));
    if (arrival == arrivals.end()) continue;
    // The sender notes the time after its commit: the other side may have been quicker.
    transfers.push_back({span.rank, span.other, span.index[0], span.index[1],
                         std::min(span.begin_ns, arrival->second), arrival->second});
  }
  std::stable_sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return a.committed_ns < b.committed_ns;
  });
  return transfers;
}

nlohmann::json json_of_spans(const std::vector<TraceSpan>& spans) {
  auto json = nlohmann::json::array();
  for (const TraceSpan& span : spans) {
    json.push_back({span.role, span.block, span.kind, span.index[0], span.index[1], span.rank,
                    span.begin_ns, span.end_ns});
  }
  return json;
}

void add_spans(std::uint32_t rank, const nlohmann::json& spans, LaunchTrace& trace) {
  for (const auto& json : spans) {
    Span span;
    span.rank = rank;
    span.role = json.at(0).get<std::string>();
    json.at(1).get_to(span.block);
    span.kind = json.at(2).get<std::string>();
    json.at(3).get_to(span.index[0]);
    json.at(4).get_to(span.index[1]);
    json.at(5).get_to(span.other);
    json.at(6).get_to(span.begin_ns);
    json.at(7).get_to(span.end_ns);
    trace.spans.push_back(std::move(span));
  }
}

}  // namespace mk::bench
