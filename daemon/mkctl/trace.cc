#include "daemon/mkctl/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "shm/host/progress_sizes.h"

namespace mk::mkctl {
namespace {

/// Tracks of a daemon: even numbers of a link's submissions, the next of its writes.
constexpr int kTracksPerLink = 2;
/// Launches of a rank among which a write's is looked for.
constexpr std::size_t kLaunchesKept = 64;

class Writer {
 public:
  Writer(const Recording& recording, std::uint32_t process, std::int64_t first_ns, Json& events,
         TraceSummary& summary)
      : recording_(recording),
        process_(process),
        first_ns_(first_ns),
        events_(events),
        summary_(summary) {}

  void write() {
    const v1::TraceChunk& last = recording_.chunks.back();
    offset_ns_ = last.unix_minus_monotonic_ns();
    summary_.dropped += last.dropped();
    for (const v1::Session& session : last.sessions()) sessions_[session.slot()] = &session;
    for (const v1::TraceLink& link : last.links()) peers_[{link.rail(), link.link()}] = link.peer();
    name("process_name", 0,
         recording_.host.empty() ? fmt::format("node {}", last.node())
                                 : fmt::format("node {} ({})", last.node(), recording_.host));
    for (const v1::TraceChunk& chunk : recording_.chunks) {
      for (const v1::TraceEvent& event : chunk.events()) on(event);
    }
    for (auto& [number, batch] : batches_) end(batch);
    summary_.unfinished += writes_.size();
  }

 private:
  using LinkKey = std::pair<std::uint32_t, std::uint32_t>;  ///< rail, link
  struct Batch {
    LinkKey link;
    std::uint64_t time_ns = 0, bytes = 0, writes = 0;
  };

  void on(const v1::TraceEvent& event) {
    switch (event.kind()) {
      case v1::TraceEvent::KIND_POSTED:
        posted(event);
        break;
      case v1::TraceEvent::KIND_COMPLETED:
      case v1::TraceEvent::KIND_FAILED:
        ended(event);
        break;
      case v1::TraceEvent::KIND_ARRIVED:
        arrived(event);
        break;
      case v1::TraceEvent::KIND_LAUNCH:
        launched(event);
        break;
      default:
        break;
    }
  }

  void posted(const v1::TraceEvent& event) {
    const LinkKey link{event.rail(), event.link()};
    Batch& batch = batches_[event.rail()];
    if (batch.writes > 0 && (batch.time_ns != event.time_ns() || batch.link != link)) end(batch);
    batch.link = link;
    batch.time_ns = event.time_ns();
    batch.bytes += event.bytes();
    ++batch.writes;
    writes_[{event.rail(), event.write()}] = {event, launch_of(event)};
    count(link, event.time_ns(), 1);
  }

  void launched(const v1::TraceEvent& event) {
    if (event.op().empty()) return;
    auto& recent = launches_[event.slot()];
    recent.push_front(&event);
    if (recent.size() > kLaunchesKept) recent.pop_back();
  }
  /// The newest of its rank's launches that has the write's epoch; null: not known.
  const v1::TraceEvent* launch_of(const v1::TraceEvent& post) const {
    const auto found = launches_.find(post.slot());
    if (found == launches_.end()) return nullptr;
    const auto launch = std::ranges::find_if(
        found->second, [&](const v1::TraceEvent* one) { return one->epoch() == post.epoch(); });
    return launch == found->second.end() ? nullptr : *launch;
  }

  /// A submission is complete when the next one of its rail begins.
  void end(Batch& batch) {
    if (batch.writes == 0) return;
    ++summary_.submissions;
    Json event = start("i", fmt::format("{} writes", batch.writes), batch.time_ns);
    event["tid"] = track(batch.link);
    event["s"] = "t";
    event["args"] = {{"writes", batch.writes}, {"bytes", batch.bytes}};
    events_.push_back(std::move(event));
    batch = Batch{};
  }

  void ended(const v1::TraceEvent& event) {
    const bool failed = event.kind() == v1::TraceEvent::KIND_FAILED;
    const auto found = writes_.find({event.rail(), event.write()});
    if (found == writes_.end()) return;  // posted before the recording began
    const auto [post, known] = found->second;
    // Where the write was quicker than the words of its launch, they have come by now.
    const v1::TraceEvent* const launch = known != nullptr ? known : launch_of(post);
    writes_.erase(found);
    ++summary_.writes;
    summary_.failed += failed ? 1 : 0;
    const LinkKey link{post.rail(), post.link()};
    // Asynchronous slices: writes of one link overlap. The id is unique in the file.
    const std::string id = fmt::format("{}.{}", process_, next_id_++);
    const std::string title =
        rank_text(post.slot()) + (launch != nullptr ? ": " + launch->op() : "");
    for (const bool begin : {true, false}) {
      Json slice = start(begin ? "b" : "e", title, begin ? post.time_ns() : event.time_ns());
      slice["tid"] = track(link) + 1;
      slice["cat"] = failed ? "failed" : "write";
      slice["id"] = id;
      if (begin) {
        slice["args"] = {{"bytes", post.bytes()},         {"lane", post.lane()},
                         {"command", post.sequence()},    {"batch", post.batch()},
                         {"waited_ns", post.waited_ns()}, {"failed", failed},
                         {"epoch", post.epoch()}};
        if (launch != nullptr) {
          slice["args"]["operator"] = launch->op();
          slice["args"]["m"] = launch->m();
          shm::for_each_size(launch->op(), launch->sizes(), [&](auto name, auto size) {
            slice["args"][std::string(name)] = size;
          });
          slice["args"]["tag"] = launch->tag();
        }
      }
      events_.push_back(std::move(slice));
    }
    count(link, event.time_ns(), -1);
  }

  void arrived(const v1::TraceEvent& event) {
    ++summary_.arrivals;
    const int tid = 1'000'000 + static_cast<int>(event.rail());
    if (named_.insert(tid).second) {
      name("thread_name", tid, fmt::format("rail {}: arrivals", event.rail()));
    }
    Json instant = start("i", rank_text(event.slot()), event.time_ns());
    instant["tid"] = tid;
    instant["s"] = "t";
    instant["args"] = {{"flag", event.flag()}};
    events_.push_back(std::move(instant));
  }

  void count(const LinkKey& link, std::uint64_t time_ns, int change) {
    const int value = outstanding_[link] += change;
    Json counter = start("C", "outstanding, " + link_text(link), time_ns);
    counter["args"] = {{"writes", value}};
    events_.push_back(std::move(counter));
  }

  Json start(const char* phase, const std::string& title, std::uint64_t time_ns) const {
    const std::int64_t since_ns = static_cast<std::int64_t>(time_ns) + offset_ns_ - first_ns_;
    return {{"ph", phase},
            {"name", title},
            {"pid", process_},
            {"ts", static_cast<double>(since_ns) / 1000}};
  }

  int track(const LinkKey& link) {
    const auto [at, fresh] = tracks_.try_emplace(link, next_track_);
    if (fresh) {
      next_track_ += kTracksPerLink;
      name("thread_name", at->second, link_text(link) + ": submissions");
      name("thread_name", at->second + 1, link_text(link) + ": writes");
    }
    return at->second;
  }

  void name(const char* what, int tid, const std::string& text) {
    events_.push_back(
        {{"ph", "M"}, {"name", what}, {"pid", process_}, {"tid", tid}, {"args", {{"name", text}}}});
  }

  std::string link_text(const LinkKey& link) const {
    const auto peer = peers_.find(link);
    return fmt::format("rail {} to {}", link.first,
                       peer == peers_.end() ? fmt::format("link {}", link.second)
                                            : fmt::format("node {}", peer->second));
  }
  std::string rank_text(std::uint32_t slot) const {
    const auto session = sessions_.find(slot);
    if (session == sessions_.end()) return fmt::format("slot {}", slot);
    return fmt::format("{} rank {}", session->second->job(), session->second->rank());
  }

  const Recording& recording_;
  const std::uint32_t process_;
  const std::int64_t first_ns_;  ///< wall clock
  std::int64_t offset_ns_ = 0;
  Json& events_;
  TraceSummary& summary_;
  std::map<std::uint32_t, const v1::Session*> sessions_;  ///< by slot
  std::map<LinkKey, std::uint32_t> peers_;
  std::map<LinkKey, int> tracks_, outstanding_;
  std::set<int> named_;
  std::map<std::uint32_t, Batch> batches_;  ///< by rail: the one that is being collected
  struct Posted {
    v1::TraceEvent event;
    const v1::TraceEvent* launch = nullptr;  ///< null: not known then
  };
  std::map<std::pair<std::uint32_t, std::uint64_t>, Posted> writes_;  ///< not ended
  /// By slot, the newest first; of the recording.
  std::map<std::uint32_t, std::deque<const v1::TraceEvent*>> launches_;
  int next_track_ = 1;
  std::uint64_t next_id_ = 0;
};

/// The wall clock of the first event of all.
std::int64_t first_event_ns(const std::vector<Recording>& recordings) {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (const Recording& recording : recordings) {
    if (recording.chunks.empty()) continue;
    const std::int64_t offset = recording.chunks.back().unix_minus_monotonic_ns();
    for (const v1::TraceChunk& chunk : recording.chunks) {
      for (const v1::TraceEvent& event : chunk.events()) {
        first = std::min(first, static_cast<std::int64_t>(event.time_ns()) + offset);
      }
    }
  }
  return first;
}

}  // namespace

Json perfetto(const std::vector<Recording>& recordings, TraceSummary& summary) {
  Json events = Json::array();
  const std::int64_t first_ns = first_event_ns(recordings);
  std::uint32_t process = 1;
  for (const Recording& recording : recordings) {
    if (recording.chunks.empty()) continue;
    Writer(recording, process++, first_ns, events, summary).write();
  }
  return {{"tool", kTraceTool}, {"displayTimeUnit", "ns"}, {"traceEvents", std::move(events)}};
}

}  // namespace mk::mkctl
