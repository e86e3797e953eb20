#include "daemon/mkctl/render.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "daemon/control/held_up.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

std::string number(std::uint64_t value) { return std::to_string(value); }

/// Percentiles as `1.2 us / 5.0 us`, "-" when nothing was recorded.
std::string percentiles(const v1::LatencyHistogram& histogram) {
  if (histogram.count() == 0) return "-";
  return human_duration(histogram.p50_ns()) + " / " + human_duration(histogram.p99_ns());
}

std::string_view name_of(v1::GetStatusResponse::Health health) {
  switch (health) {
    case v1::GetStatusResponse::HEALTH_OK:
      return "ok";
    case v1::GetStatusResponse::HEALTH_DEGRADED:
      return "degraded";
    case v1::GetStatusResponse::HEALTH_DRAINING:
      return "draining";
    case v1::GetStatusResponse::HEALTH_NOT_READY:
      return "not ready";
    default:
      return "unknown";
  }
}

std::string_view name_of(v1::PeerStatus::State state) {
  switch (state) {
    case v1::PeerStatus::STATE_CONNECTING:
      return "connecting";
    case v1::PeerStatus::STATE_WAITING:
      return "waiting";
    case v1::PeerStatus::STATE_UP:
      return "up";
    default:
      return "unknown";
  }
}

/// Its GPU, or else its CPUs.
std::string place_of(const v1::Session& rank) {
  if (!rank.gpu().empty()) return rank.gpu();
  return rank.cpus().empty() ? "-" : "cpus " + rank.cpus();
}

/// What is wrong with a rank, or else what it does in its launch.
std::string doing(const v1::Session& rank) {
  if (rank.state() == "failed" || rank.failed_for_ns() != 0)
    return fmt::format("failed {} ago: {}", human_age(rank.failed_for_ns()), rank.reason());
  if (!rank.reason().empty()) return rank.reason();
  const bool in_launch = rank.launches() % 2 == 1;
  if (rank.state() != "up" || !rank.has_progress()) return in_launch ? "in a launch" : "";
  const v1::Progress& its = rank.progress();
  if (!in_launch && its.waits_for().empty()) {
    return its.op().empty() ? std::string("in no launch yet")
                            : fmt::format("in no launch since {} {}", its.op(), its.epoch());
  }
  return fmt::format("{}; for {}", daemon::control::describe(progress_of(its)),
                     human_duration(its.phase_for_ns()));
}

}  // namespace

daemon::RankProgress progress_of(const v1::Progress& from) {
  daemon::RankProgress to;
  to.op = from.op();
  to.epoch = from.epoch();
  to.tag = from.tag();
  to.m = from.m();
  for (int i = 0; i < std::min(from.sizes_size(), static_cast<int>(to.sizes.size())); ++i)
    to.sizes[static_cast<std::size_t>(i)] = from.sizes(i);
  to.tiles = from.tiles();
  to.tiles_done = from.tiles_done();
  to.chunks = from.chunks();
  to.chunks_done = from.chunks_done();
  to.phase = from.phase();
  to.waits_for = from.waits_for();
  to.waits_for_rank = from.waits_for_rank();
  to.phase_for_ns = from.phase_for_ns();
  to.still_for_ns = from.still_for_ns();
  to.looks = from.looks();
  to.looks_in_launch = from.looks_in_launch();
  to.looks_waiting = from.looks_waiting();
  return to;
}

std::string render(const v1::GetVersionResponse& version, const std::string& own_version) {
  return fmt::format("mkerneld {} (ABI {}.{}; {}; fabrics: {})\nmkctl {}\n",
                     printable(version.version()), version.abi_major(), version.abi_minor(),
                     printable(version.build()), fmt::join(version.fabrics(), ", "), own_version);
}

std::string render(const v1::GetStatusResponse& status) {
  std::string out = fmt::format("node {}: {}\n", status.node(), name_of(status.health()));
  out += fmt::format("  daemon   mkerneld {}, pid {}, up {}\n", printable(status.version()),
                     status.pid(), human_age(status.uptime_ns()));
  out += fmt::format("  clients  {}, {} of {} sessions\n", printable(status.socket()),
                     status.sessions(), status.sessions_max());
  out += fmt::format("  service  {}\n", printable(status.listen()));
  out += fmt::format("  fabric   {}, {} rail{}, {} of {} links up\n", printable(status.fabric()),
                     status.rails_size(), status.rails_size() == 1 ? "" : "s", status.links_up(),
                     status.links());
  if (status.peers_size() > 0) {
    Table table({"PEER", "ADDRESS", "STATE", "UP FOR", "SENT", "RECEIVED", "BREAKS", "REASON"});
    for (const v1::PeerStatus& peer : status.peers()) {
      table.add({number(peer.node()), peer.address(), std::string(name_of(peer.state())),
                 peer.up_for_ns() ? human_age(peer.up_for_ns()) : "-", number(peer.messages_sent()),
                 number(peer.messages_received()), number(peer.breaks()), peer.reason()});
    }
    out += "\n" + table.text();
  }
  if (status.problems_size() > 0) {
    out += "\nproblems:\n";
    for (const std::string& problem : status.problems()) out += "  " + printable(problem) + "\n";
  }
  if (status.tls_refusals_size() > 0) {
    out += "\nTLS handshakes that failed:\n";
    for (const v1::TlsRefusal& one : status.tls_refusals()) {
      out += fmt::format("  {}: {}; {} from there, the last {} ago\n", printable(one.remote()),
                         printable(one.cause()), one.count(), human_age(one.ago_ns()));
    }
  }
  return out;
}

std::string render(const v1::DrainResponse& left) {
  if (left.sessions() == 0) return "drained: no job is left, new ones are refused\n";
  std::string jobs;
  for (const std::string& job : left.jobs()) jobs += (jobs.empty() ? "" : ", ") + printable(job);
  return fmt::format("draining: new jobs are refused, {} sessions are left, of: {}\n",
                     left.sessions(), jobs);
}

std::string sessions_table(const google::protobuf::RepeatedPtrField<v1::Session>& sessions) {
  Table table({"SESSION", "JOB", "RANK", "NODE", "LOCAL", "PID", "UID", "RAIL", "PLACE", "STATE",
               "BUFFERS", "REGISTERED", "ATTACHED", "DOES"});
  for (const v1::Session& one : sessions) {
    table.add({number(one.session_id()), one.job(), fmt::format("{}/{}", one.rank(), one.world()),
               fmt::format("{}/{}", one.node_rank(), one.nodes()),
               fmt::format("{}/{}", one.local_rank(), one.local_size()), std::to_string(one.pid()),
               number(one.uid()), number(one.rail()), place_of(one), one.state(),
               number(one.buffers()), human_bytes(static_cast<double>(one.registered_bytes())),
               human_age(one.attached_for_ns()), doing(one)});
  }
  return table.text();
}

std::string render(const v1::ListSessionsResponse& sessions) {
  std::string out =
      sessions.sessions_size() > 0 ? sessions_table(sessions.sessions()) : "no rank is attached\n";
  if (sessions.recent_failures_size() > 0) {
    out += "\nended with an error:\n" + sessions_table(sessions.recent_failures());
  }
  return out;
}

std::string render(const v1::ListQueuesResponse& queues) {
  if (queues.queues_size() == 0) return "no rank is attached, so there are no queues\n";
  return queues_table(queues.queues());
}

std::string queues_table(const google::protobuf::RepeatedPtrField<v1::Queue>& queues) {
  Table table({"SESSION", "LANE", "JOB", "RANK", "DEPTH", "COMMANDS", "BYTES", "BATCHES",
               "MEAN BATCH", "STALLS", "COMMIT-POST p50/p99", "POST-DONE p50/p99"});
  for (const v1::Queue& one : queues) {
    table.add({number(one.session_id()), number(one.lane()), one.job(), number(one.rank()),
               number(one.depth()), number(one.commands()),
               human_bytes(static_cast<double>(one.bytes())), number(one.batches()),
               fmt::format("{:.2f}", one.mean_batch()), number(one.credit_stalls()),
               percentiles(one.commit_to_post()), percentiles(one.post_to_completion())});
  }
  return table.text();
}

std::string rails_of(const v1::Link& link) {
  if (link.peer_rail() == link.rail()) return number(link.rail());
  return fmt::format("{} > {}", link.rail(), link.peer_rail());
}

std::string render(const v1::ListLinksResponse& links) {
  if (links.links_size() == 0)
    return "no links: no job spans several nodes, or there are no peers\n";
  Table table({"RAIL", "PEER", "FABRIC", "STATE", "SINCE", "BYTES", "MESSAGES", "BATCHES",
               "OUTSTANDING", "ERRORS", "REASON"});
  for (const v1::Link& one : links.links()) {
    table.add({rails_of(one), one.peer_name(), one.fabric(), one.state(),
               human_age(one.state_for_ns()), human_bytes(static_cast<double>(one.bytes())),
               number(one.messages()), number(one.batches()), number(one.outstanding()),
               number(one.errors()), one.reason()});
  }
  return table.text();
}

std::string stats_header() {
  return fmt::format("{:<12}  {:>8}  {:>10}  {:>12}  {:>7}  {:>11}  {:>15}  {:>14}\n", "TIME",
                     "SESSIONS", "COMMANDS/s", "BYTES/s", "DEPTH", "OUTSTANDING", "COMMIT-POST p99",
                     "POST-DONE p99");
}

std::string render(const v1::StatsSample& sample) {
  std::uint64_t depth = 0, outstanding = 0, post_ns = 0, done_ns = 0;
  for (const v1::Queue& queue : sample.queues()) {
    depth += queue.depth();
    post_ns = std::max(post_ns, queue.commit_to_post().p99_ns());
    done_ns = std::max(done_ns, queue.post_to_completion().p99_ns());
  }
  for (const v1::Link& link : sample.links()) outstanding += link.outstanding();
  const auto seconds = static_cast<std::time_t>(sample.unix_time_ns() / 1'000'000'000);
  const bool first = sample.elapsed_ns() == 0;
  return fmt::format("{:%H:%M:%S}.{:03}  {:>8}  {:>10}  {:>12}  {:>7}  {:>11}  {:>15}  {:>14}\n",
                     fmt::localtime(seconds), sample.unix_time_ns() / 1'000'000 % 1000,
                     sample.sessions(), first ? "-" : human_count(sample.commands_per_second()),
                     first ? "-" : human_bytes(sample.bytes_per_second()), depth, outstanding,
                     post_ns ? human_duration(post_ns) : "-",
                     done_ns ? human_duration(done_ns) : "-");
}

}  // namespace mk::mkctl
