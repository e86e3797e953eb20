#include "tests/bench/mkbench/chrome_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace mk::bench {
namespace {

/// Between two launches: a twentieth of the first.
constexpr std::uint64_t kGapShare = 20;

class ChromeTrace {
 public:
  void add(const LaunchTrace& launch);
  nlohmann::json take() { return {{"traceEvents", std::move(events_)}, {"displayTimeUnit", "ms"}}; }

 private:
  using Track = std::pair<std::uint32_t, std::uint32_t>;

  /// The thread `name` of process `process`, announced at its first use.
  Track track(std::uint32_t process, const std::string& process_name, const std::string& name) {
    const auto [found, is_new] =
        threads_.try_emplace({process, name}, static_cast<std::uint32_t>(threads_.size()));
    if (is_new) {
      name_event("process_name", process, 0, process_name);
      name_event("thread_name", process, found->second, name);
    }
    return {process, found->second};
  }
  void name_event(const char* what, std::uint32_t process, std::uint32_t thread,
                  const std::string& name) {
    events_.push_back({{"name", what},
                       {"ph", "M"},
                       {"pid", process},
                       {"tid", thread},
                       {"args", {{"name", name}}}});
  }
  void slice(Track track, const std::string& name, std::uint64_t begin_ns, std::uint64_t end_ns,
             nlohmann::json arguments) {
    nlohmann::json event = {{"name", name},
                            {"pid", track.first},
                            {"tid", track.second},
                            {"ts", microseconds(begin_ns)},
                            {"args", std::move(arguments)}};
    if (begin_ns == end_ns) {
      event["ph"] = "i";
      event["s"] = "t";
    } else {
      event["ph"] = "X";
      event["dur"] = static_cast<double>(end_ns - begin_ns) * 1e-3;
    }
    events_.push_back(std::move(event));
  }
  /// The adaptive partition's workers that are to communicate, over time, and those that did.
  void counter(const Span& span) {
    events_.push_back({{"name", "workers that communicate"},
                       {"ph", "C"},
                       {"pid", span.rank},
                       {"ts", microseconds(span.begin_ns)},
                       {"args", {{"target", span.index[0]}, {"at work", span.index[1]}}}});
  }
  double microseconds(std::uint64_t ns) const {
    return static_cast<double>(ns - launch_begin_ns_ + at_ns_) * 1e-3;
  }
  void add_links(const LaunchTrace& launch);

  nlohmann::json events_ = nlohmann::json::array();
  std::map<std::pair<std::uint32_t, std::string>, std::uint32_t> threads_;
  std::uint64_t at_ns_ = 0;  ///< where the launch begins in the file
  std::uint64_t launch_begin_ns_ = 0;
};

void ChromeTrace::add(const LaunchTrace& launch) {
  launch_begin_ns_ = launch.begin_ns();
  const std::uint64_t length_ns = launch.end_ns() - launch_begin_ns_;
  const std::uint32_t ranks = launch.nodes * launch.local;
  slice(track(ranks + 1, "launches", "launches"), launch.title, launch_begin_ns_,
        launch_begin_ns_ + length_ns, launch.about);
  for (const Span& span : launch.spans) {
    if (span.kind == "target") {
      counter(span);
      continue;
    }
    nlohmann::json what = launch.about;
    what.update({{"index", {span.index[0], span.index[1]}}, {"rank", span.other}});
    slice(track(span.rank, fmt::format("rank {} (node {})", span.rank, span.rank / launch.local),
                fmt::format("{} {}", span.role, span.block)),
          span.kind, span.begin_ns, span.end_ns, std::move(what));
  }
  add_links(launch);
  at_ns_ += length_ns + length_ns / kGapShare;
}

void ChromeTrace::add_links(const LaunchTrace& launch) {
  // By link: when each of its lines is free again.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::uint64_t>> lines;
  for (const Transfer& transfer : launch.transfers()) {
    auto& free_at = lines[{transfer.from, transfer.to}];
    const auto line = std::find_if(free_at.begin(), free_at.end(), [&](std::uint64_t free_ns) {
      return free_ns <= transfer.committed_ns;
    });
    const auto number = static_cast<std::size_t>(line - free_at.begin());
    if (line == free_at.end()) free_at.push_back(0);
    free_at[number] = transfer.arrived_ns;
    slice(track(launch.nodes * launch.local, "links",
                fmt::format("rank {} -> rank {}, line {:02}", transfer.from, transfer.to, number)),
          fmt::format("chunk {}", transfer.chunk), transfer.committed_ns, transfer.arrived_ns,
          {{"chunk", transfer.chunk}, {"origin node", transfer.origin_node}});
  }
}

}  // namespace

nlohmann::json chrome_trace(std::span<const LaunchTrace> launches) {
  ChromeTrace trace;
  for (const LaunchTrace& launch : launches) trace.add(launch);
  return trace.take();
}

}  // namespace mk::bench
