#include "daemon/service/admin_convert.h"

#include <algorithm>
#include <array>

#include "daemon/config/secrets.h"

namespace mk::daemon {
namespace {

using Counts = std::array<std::uint64_t, LatencyHistogram::kBuckets>;

std::uint64_t upper_bound_ns(std::uint32_t bucket) {
  return LatencyHistogram::lower_bound_ns(bucket + 1);
}

/// The upper bound of the bucket that holds the value which `percent` of all do not exceed.
std::uint64_t percentile_ns(const Counts& counts, std::uint64_t total, std::uint64_t percent) {
  if (total == 0) return 0;
  const std::uint64_t rank = (total * percent + 99) / 100;  // counted from 1
  std::uint64_t seen = 0;
  for (std::uint32_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
    seen += counts[bucket];
    if (seen >= rank) return upper_bound_ns(bucket);
  }
  return upper_bound_ns(LatencyHistogram::kBuckets - 1);
}

}  // namespace

void to_proto(const LatencyHistogram& from, bool buckets, v1::LatencyHistogram& to) {
  Counts counts;  // one reading, so that the percentiles fit the count
  std::uint64_t total = 0;
  for (std::uint32_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
    counts[bucket] = from.count(bucket);
    total += counts[bucket];
    if (!buckets || counts[bucket] == 0) continue;
    v1::LatencyHistogram::Bucket& one = *to.add_buckets();
    one.set_lower_bound_ns(LatencyHistogram::lower_bound_ns(bucket));
    one.set_upper_bound_ns(upper_bound_ns(bucket));
    one.set_count(counts[bucket]);
  }
  to.set_count(total);
  to.set_p50_ns(percentile_ns(counts, total, 50));
  to.set_p99_ns(percentile_ns(counts, total, 99));
}

void to_proto(const TlsRefusal& from, v1::TlsRefusal& to) {
  to.set_remote(from.remote);
  to.set_cause(from.cause);
  to.set_count(from.count);
  to.set_ago_ns(from.ago_ns);
}

void to_proto(const RankProgress& from, v1::Progress& to) {
  to.set_op(from.op);
  to.set_epoch(from.epoch);
  to.set_tag(from.tag);
  to.set_m(from.m);
  to.mutable_sizes()->Add(from.sizes.begin(), from.sizes.end());
  to.set_tiles(from.tiles);
  to.set_tiles_done(from.tiles_done);
  to.set_chunks(from.chunks);
  to.set_chunks_done(from.chunks_done);
  to.set_phase(from.phase);
  to.set_waits_for(from.waits_for);
  to.set_waits_for_rank(from.waits_for_rank);
  to.set_phase_for_ns(from.phase_for_ns);
  to.set_still_for_ns(from.still_for_ns);
  to.set_looks(from.looks);
  to.set_looks_in_launch(from.looks_in_launch);
  to.set_looks_waiting(from.looks_waiting);
}

void to_proto(const EndedJob& from, v1::EndedJob& to) {
  to.set_job(from.name);
  to.set_uid(from.uid);
  to.set_ranks(from.ranks);
  to.set_ran_for_ns(from.ran_ns);
  to.set_ended_for_ns(from.ended_for_ns);
  to.set_failed(from.failed);
  to.set_launches(from.launches);
  to.set_commands(from.totals.commands);
  to.set_bytes(from.totals.bytes);
}

void to_proto(const SessionInfo& from, v1::Session& to) {
  to.set_session_id(from.session_id);
  to.set_slot(from.slot);
  to.set_job(from.job);
  to.set_rank(from.rank);
  to.set_world(from.world);
  to.set_node_rank(from.node_rank);
  to.set_nodes(from.nodes);
  to.set_local_rank(from.local_rank);
  to.set_local_size(from.local_size);
  to.set_pid(from.pid);
  to.set_uid(from.uid);
  to.set_state(from.state);
  to.set_reason(from.reason);
  to.set_buffers(from.buffers);
  to.set_registered_bytes(from.registered_bytes);
  to.set_attached_for_ns(from.attached_for_ns);
  to.set_launches(from.launches);
  to.set_launches_for_ns(from.launches_for_ns);
  to.set_rail(from.rail);
  to.set_gpu(from.gpu);
  to.set_cpus(from.cpus);
  to.set_rail_why(from.rail_why);
  to.set_failed_for_ns(from.failed_for_ns);
  if (!from.progress.op.empty()) to_proto(from.progress, *to.mutable_progress());
}

void to_proto(const QueueInfo& from, bool buckets, v1::Queue& to) {
  to.set_session_id(from.session_id);
  to.set_lane(from.lane);
  to.set_job(from.job);
  to.set_rank(from.rank);
  to.set_depth(from.depth);
  if (!from.stats || from.lane >= from.stats->lanes.size()) return;
  const LaneStats& stats = from.stats->lanes[from.lane];
  const std::uint64_t commands = stats.commands.value(), batches = stats.batches.value();
  to.set_commands(commands);
  to.set_bytes(stats.bytes.value());
  to.set_batches(batches);
  if (batches > 0) to.set_mean_batch(static_cast<double>(commands) / static_cast<double>(batches));
  to.set_completed(stats.completed.value());
  to.set_credit_stalls(stats.credit_stalls.value());
  to_proto(stats.commit_to_post, buckets, *to.mutable_commit_to_post());
  to_proto(stats.post_to_completion, buckets, *to.mutable_post_to_completion());
}

void to_proto(const LinkInfo& from, v1::Link& to) {
  to.set_rail(from.rail);
  to.set_peer(from.peer);
  to.set_peer_rail(from.peer_rail);
  to.set_peer_name(from.peer_name);
  to.set_fabric(from.fabric);
  to.set_state(from.state);
  to.set_reason(from.reason);
  to.set_state_for_ns(from.state_for_ns);
  to.set_stalled_for_ns(from.stalled_for_ns);
  if (!from.stats) return;
  to.set_connects(from.stats->connects.value());
  to.set_connect_failures(from.stats->connect_failures.value());
  to.set_post_retries(from.stats->post_retries.value());
  for (const Counter& count : from.stats->batch_commands) to.add_batch_commands(count.value());
  to.set_messages(from.stats->messages.value());
  to.set_bytes(from.stats->bytes.value());
  to.set_batches(from.stats->batches.value());
  to.set_completed(from.stats->completed.value());
  to.set_errors(from.stats->errors.value());
  to.set_outstanding(from.stats->outstanding.value());
}

void to_proto(const JobInfo& from, const ControlSnapshot& all, v1::Job& to) {
  to.set_job(from.name);
  to.set_state(from.state);
  to.set_waits_for(from.waits_for);
  to.set_held_up(from.held_up);
  to.set_age_ns(from.age_ns);
  to.set_world(from.nodes * from.local_size);
  to.set_nodes(from.nodes);
  to.set_local_size(from.local_size);
  to.set_node_rank(from.node_rank);
  for (const std::uint32_t rank : from.missing_ranks) to.add_missing_ranks(rank);
  to.set_sessions(static_cast<std::uint32_t>(from.session_ids.size()));
  to.set_weight(from.weight);
  const auto ours = [&from](std::uint32_t session) {
    return std::ranges::find(from.session_ids, session) != from.session_ids.end();
  };
  for (const SessionInfo& session : all.sessions) {
    if (ours(session.session_id)) {
      to.set_registered_bytes(to.registered_bytes() + session.registered_bytes);
    }
  }
  for (const QueueInfo& queue : all.queues) {
    if (!ours(queue.session_id)) continue;
    const LaneStats& lane = queue.stats->lanes[queue.lane];
    to.set_depth(to.depth() + queue.depth);
    to.set_commands(to.commands() + lane.commands.value());
    to.set_bytes(to.bytes() + lane.bytes.value());
    to.set_completed(to.completed() + lane.completed.value());
    to.set_credit_stalls(to.credit_stalls() + lane.credit_stalls.value());
  }
}

void to_proto(std::uint32_t rail, const ProxyStats& from, bool buckets, v1::RailStatus& to) {
  to.set_rail(rail);
  to.set_passes(from.passes.value());
  to.set_busy_passes(from.busy_passes.value());
  to.set_sleeps(from.sleeps.value());
  to.set_arrivals(from.arrivals.value());
  to.set_bad_arrivals(from.bad_arrivals.value());
  to.set_bad_completions(from.bad_completions.value());
  to_proto(from.arrival_to_flag, buckets, *to.mutable_arrival_to_flag());
}

void to_proto(const prometheus::MetricFamily& from, v1::MetricFamily& to) {
  using prometheus::MetricType;
  to.set_name(from.name);
  to.set_help(from.help);
  to.set_type(from.type == MetricType::Counter     ? v1::MetricFamily::TYPE_COUNTER
              : from.type == MetricType::Histogram ? v1::MetricFamily::TYPE_HISTOGRAM
                                                   : v1::MetricFamily::TYPE_GAUGE);
  for (const prometheus::ClientMetric& metric : from.metric) {
    v1::Metric& one = *to.add_metrics();
    for (const auto& label : metric.label) {
      v1::Metric::Label& added = *one.add_labels();
      added.set_name(label.name);
      added.set_value(label.value);
    }
    if (from.type != MetricType::Histogram) {
      one.set_value(from.type == MetricType::Counter ? metric.counter.value : metric.gauge.value);
      continue;
    }
    one.set_sample_count(metric.histogram.sample_count);
    one.set_sample_sum(metric.histogram.sample_sum);
    for (const auto& bucket : metric.histogram.bucket) {
      v1::Metric::Bucket& added = *one.add_buckets();
      added.set_upper_bound(bucket.upper_bound);
      added.set_cumulative_count(bucket.cumulative_count);
    }
  }
}

void to_proto(const ConfigChange& from, v1::ConfigChange& to) {
  to.set_key(from.key);
  // As in the file, so that the name says whether the value is a secret.
  const std::string name = from.key.substr(from.key.rfind('.') + 1) + " = ";
  const auto shown = [&name](const std::string& value) {
    return value.empty() ? value : without_secrets(name + value).substr(name.size());
  };
  to.set_before(shown(from.before));
  to.set_after(shown(from.after));
  to.set_live(from.live);
}

void to_proto(const PeerInfo& from, v1::PeerStatus& to) {
  to.set_node(from.node);
  to.set_address(from.address);
  switch (from.state) {
    case PeerState::kConnecting:
      to.set_state(v1::PeerStatus::STATE_CONNECTING);
      break;
    case PeerState::kWaiting:
      to.set_state(v1::PeerStatus::STATE_WAITING);
      break;
    case PeerState::kUp:
      to.set_state(v1::PeerStatus::STATE_UP);
      break;
  }
  to.set_reason(from.reason);
  to.set_version(from.version);
  to.set_up_for_ns(from.up_for_ns);
  to.set_state_for_ns(from.state_for_ns);
  to.set_messages_sent(from.messages_sent);
  to.set_messages_received(from.messages_received);
  to.set_breaks(from.breaks);
}

JobChange from_proto(const v1::SetJobRequest& request) {
  JobChange change;
  change.job = request.job();
  change.reset = request.reset();
  if (request.has_weight()) change.weight = request.weight();
  if (request.has_bytes_per_second()) change.bytes_per_second = request.bytes_per_second();
  if (request.has_commands_per_second()) {
    change.commands_per_second = request.commands_per_second();
  }
  return change;
}

}  // namespace mk::daemon
