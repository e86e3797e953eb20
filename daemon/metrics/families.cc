#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "daemon/metrics/metrics.h"

namespace mk::daemon {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr std::string_view kSessionStates[] = {"waiting", "up", "failed", "draining"};

/// Histogram bounds are powers of two of nanoseconds, from 64 ns to 17 s: every fourth bucket
/// border of LatencyHistogram.
constexpr std::uint32_t kFirstBoundLog2 = 6;
constexpr std::uint32_t kLastBoundLog2 = 34;
constexpr double kSecondsPerNs = 1e-9;

/// Job names are what users choose: whatever is not printable ASCII becomes '?'.
std::string label_text(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return out;
}

/// Collects families in the order of their first use; a series that comes twice (two jobs whose
/// names look alike) is taken once.
class Families {
 public:
  explicit Families(NodeId node) : node_(std::to_string(node)) {}

  void counter(const char* name, const char* help, double value, Labels labels = {}) {
    if (ClientMetric* metric = add(MetricType::Counter, name, help, std::move(labels))) {
      metric->counter.value = value;
    }
  }
  void counter(const char* name, const char* help, const Counter& counter_word, Labels labels) {
    counter(name, help, static_cast<double>(counter_word.value()), std::move(labels));
  }
  void gauge(const char* name, const char* help, double value, Labels labels = {}) {
    if (ClientMetric* metric = add(MetricType::Gauge, name, help, std::move(labels))) {
      metric->gauge.value = value;
    }
  }
  /// Durations.
  void histogram(const char* name, const char* help,
                 const std::array<std::uint64_t, LatencyHistogram::kBuckets>& counts,
                 Labels labels = {}) {
    ClientMetric* metric = add(MetricType::Histogram, name, help, std::move(labels));
    if (!metric) return;
    ClientMetric::Histogram& histogram = metric->histogram;
    std::uint32_t bucket = 0;
    const auto count_up_to = [&](std::uint32_t end) {
      for (; bucket < end; ++bucket) {
        const std::uint64_t low = LatencyHistogram::lower_bound_ns(bucket);
        const std::uint64_t high = LatencyHistogram::lower_bound_ns(bucket + 1);
        histogram.sample_count += counts[bucket];
        // Only buckets are counted: a value is taken as the middle of its own.
        histogram.sample_sum += static_cast<double>(counts[bucket]) *
                                static_cast<double>(low + high) / 2 * kSecondsPerNs;
      }
    };
    for (std::uint32_t log2 = kFirstBoundLog2; log2 <= kLastBoundLog2; ++log2) {
      const std::uint64_t bound_ns = std::uint64_t{1} << log2;
      count_up_to(LatencyHistogram::bucket_of(bound_ns));
      histogram.bucket.push_back(
          {histogram.sample_count, static_cast<double>(bound_ns) * kSecondsPerNs});
    }
    count_up_to(LatencyHistogram::kBuckets);
  }

  /// Small sizes, each counted by itself: `counts[i]` values of i + 1.
  void histogram(const char* name, const char* help,
                 const std::array<Counter, shm::kBatchMax>& counts, Labels labels) {
    ClientMetric* metric = add(MetricType::Histogram, name, help, std::move(labels));
    if (!metric) return;
    ClientMetric::Histogram& histogram = metric->histogram;
    for (std::uint32_t size = 1; size <= shm::kBatchMax; ++size) {
      const std::uint64_t count = counts[size - 1].value();
      histogram.sample_count += count;
      histogram.sample_sum += static_cast<double>(count * size);
      histogram.bucket.push_back({histogram.sample_count, static_cast<double>(size)});
    }
  }

  std::vector<MetricFamily> take() { return std::move(families_); }

 private:
  ClientMetric* add(MetricType type, const char* name, const char* help, Labels labels) {
    std::string key = name;
    for (const auto& label : labels) key += '\0' + label.value;
    if (!seen_.insert(key).second) return nullptr;
    const auto [place, fresh] = places_.try_emplace(name, families_.size());
    if (fresh) {
      MetricFamily& family = families_.emplace_back();
      family.name = name;
      family.help = help;
      family.type = type;
    }
    ClientMetric& metric = families_[place->second].metric.emplace_back();
    metric.label = std::move(labels);
    metric.label.push_back({"node", node_});
    return &metric;
  }

  const std::string node_;
  std::vector<MetricFamily> families_;
  std::map<std::string, std::size_t> places_;
  std::set<std::string> seen_;
};

std::array<std::uint64_t, LatencyHistogram::kBuckets> counts_of(const LatencyHistogram& from) {
  std::array<std::uint64_t, LatencyHistogram::kBuckets> counts;
  for (std::uint32_t bucket = 0; bucket < counts.size(); ++bucket) {
    counts[bucket] = from.count(bucket);
  }
  return counts;
}

void add_daemon(Families& out, const MetricsSample& sample) {
  out.gauge("mkernel_build_info", "Always 1; the labels say what runs.", 1,
            {{"version", label_text(sample.version)},
             {"build", label_text(sample.build)},
             {"fabric", label_text(sample.fabric)}});
  out.gauge("mkernel_start_time_seconds", "When the daemon started, since the epoch.",
            sample.start_time_seconds);
  out.gauge("mkernel_waiting", "1 while the daemon waits for its network, and serves no job.",
            sample.waiting ? 1 : 0);
  if (!sample.waiting) {
    out.gauge("mkernel_control_responsive", "1 when the control thread answered this scrape.",
              sample.control ? 1 : 0);
  }
  const char* reloads = "Reloads of the configuration (SIGHUP), by their result.";
  out.counter("mkernel_config_reloads_total", reloads,
              static_cast<double>(sample.reloads.succeeded), {{"result", "success"}});
  out.counter("mkernel_config_reloads_total", reloads, static_cast<double>(sample.reloads.refused),
              {{"result", "refused"}});
  out.gauge("mkernel_config_last_reload_successful", "0 when the last reload was refused.",
            sample.reloads.last_succeeded ? 1 : 0);
}

void add_certificates(Families& out, const CertificateMetrics& certificates) {
  out.gauge("mkernel_tls_certificate_faults",
            "Faults of the files of [tls]: peers cannot connect while there are any.",
            static_cast<double>(certificates.faults));
  if (!certificates.expires) return;
  out.gauge("mkernel_tls_certificate_expiry_time_seconds",
            "When the daemon's certificate expires, since the epoch.",
            static_cast<double>(*certificates.expires));
}

void add_rails(Families& out, const MetricsSample& sample) {
  for (std::size_t rail = 0; rail < sample.rails.size(); ++rail) {
    const ProxyStats& stats = *sample.rails[rail];
    const Labels labels{{"rail", std::to_string(rail)}};
    out.counter("mkernel_proxy_passes_total", "Passes of a proxy thread over its rings.",
                stats.passes, labels);
    out.counter("mkernel_proxy_busy_passes_total",
                "Passes that found work; over all passes: the proxy's busy share.",
                stats.busy_passes, labels);
    out.counter("mkernel_proxy_sleeps_total", "Sleeping polls of an idle proxy thread.",
                stats.sleeps, labels);
    out.counter("mkernel_proxy_arrivals_total", "Arrival flags published from immediates.",
                stats.arrivals, labels);
    out.counter("mkernel_proxy_bad_arrivals_total", "Immediates that named no session or flag.",
                stats.bad_arrivals, labels);
    out.counter("mkernel_proxy_bad_completions_total", "Completions that named no write in flight.",
                stats.bad_completions, labels);
    out.histogram("mkernel_arrival_to_flag_seconds",
                  "From an arrival's event to its published flag, at most; only on networks that "
                  "do not write flags themselves (the sum is estimated from buckets).",
                  counts_of(stats.arrival_to_flag), labels);
  }
}

void add_peers(Families& out, const MetricsSample& sample) {
  for (const PeerMetrics& peer : sample.peers) {
    const Labels labels{{"peer", std::to_string(peer.node)}};
    out.gauge("mkernel_peer_up", "1 while the stream to another daemon is up.", peer.up ? 1 : 0,
              labels);
    out.counter("mkernel_peer_breaks_total", "Streams to another daemon that were up and broke.",
                static_cast<double>(peer.breaks), labels);
    out.counter("mkernel_peer_messages_sent_total", "Control messages sent to another daemon.",
                static_cast<double>(peer.messages_sent), labels);
    out.counter("mkernel_peer_messages_received_total",
                "Control messages received from another daemon.",
                static_cast<double>(peer.messages_received), labels);
  }
}

void add_sessions(Families& out, const MetricsSample& sample) {
  const ControlSnapshot& control = *sample.control;
  std::map<std::string_view, std::uint64_t> by_state;
  for (const std::string_view state : kSessionStates) by_state[state] = 0;
  struct Job {
    std::uint64_t sessions = 0, registered_bytes = 0;
  };
  std::map<std::string, Job> jobs;
  std::uint64_t registered_bytes = 0;
  for (const SessionInfo& session : control.sessions) {
    if (const auto state = by_state.find(session.state); state != by_state.end()) ++state->second;
    Job& job = jobs[label_text(session.job)];
    ++job.sessions;
    job.registered_bytes += session.registered_bytes;
    registered_bytes += session.registered_bytes;
  }
  for (const auto& [state, count] : by_state) {
    out.gauge("mkernel_sessions", "Attached ranks, by state.", static_cast<double>(count),
              {{"state", std::string(state)}});
  }
  out.gauge("mkernel_sessions_limit", "How many ranks may attach at once.", sample.sessions_max);
  out.counter("mkernel_sessions_attached_total", "Ranks that have attached.",
              static_cast<double>(control.sessions_attached));
  out.counter("mkernel_sessions_failed_total", "Sessions that ended with an error.",
              static_cast<double>(control.sessions_failed));
  out.gauge("mkernel_jobs", "Jobs with a rank on this node.", static_cast<double>(jobs.size()));
  out.gauge("mkernel_registered_bytes", "Memory that sessions have registered.",
            static_cast<double>(registered_bytes));
  out.gauge("mkernel_draining", "1 while new jobs are refused.", control.draining ? 1 : 0);
  for (const auto& [name, job] : jobs) {
    out.gauge("mkernel_job_sessions", "Attached ranks of a job.", static_cast<double>(job.sessions),
              {{"job_name", name}});
    out.gauge("mkernel_job_registered_bytes", "Memory that a job's ranks have registered.",
              static_cast<double>(job.registered_bytes), {{"job_name", name}});
  }
}

/// Runs of one name and user are one series: they come and go, so they are gauges.
void add_ended_jobs(Families& out, const ControlSnapshot& control) {
  struct Sum {
    std::uint64_t runs = 0, failures = 0, launches = 0, commands = 0, bytes = 0, ran_ns = 0;
  };
  std::map<std::pair<std::string, std::uint32_t>, Sum> jobs;
  for (const EndedJob& job : control.ended_jobs) {
    Sum& sum = jobs[{label_text(job.name), job.uid}];
    ++sum.runs;
    sum.failures += job.failed ? 1 : 0;
    sum.launches += job.launches;
    sum.commands += job.totals.commands;
    sum.bytes += job.totals.bytes;
    sum.ran_ns += job.ran_ns;
  }
  for (const auto& [key, sum] : jobs) {
    const Labels labels{{"job_name", key.first}, {"uid", std::to_string(key.second)}};
    const auto gauge = [&](const char* name, const char* help, double value) {
      out.gauge(name, help, value, labels);
    };
    gauge("mkernel_ended_job_runs", "Runs of a job that ended in the last limits.ended_jobs.",
          static_cast<double>(sum.runs));
    gauge("mkernel_ended_job_failures", "Those of them that ended with an error.",
          static_cast<double>(sum.failures));
    gauge("mkernel_ended_job_launches", "Launches of their ranks on this node.",
          static_cast<double>(sum.launches));
    gauge("mkernel_ended_job_commands", "Valid commands taken from their rings.",
          static_cast<double>(sum.commands));
    gauge("mkernel_ended_job_bytes", "Payload of these commands.", static_cast<double>(sum.bytes));
    gauge("mkernel_ended_job_run_seconds", "How long they ran, all together.",
          1e-9 * static_cast<double>(sum.ran_ns));
  }
}

void add_operators(Families& out, const ControlSnapshot& control) {
  for (const OperatorTotal& total : control.operators) {
    const Labels labels{{"job_name", label_text(total.labels.job)},
                        {"uid", total.labels.uid},
                        {"operator", total.labels.op},
                        {"tag", total.labels.tag}};
    const auto counter = [&](const char* name, const char* help, double value) {
      out.counter(name, help, value, labels);
    };
    counter("mkernel_operator_launches_total",
            "Launches of a job's ranks on this node, by operator and the caller's tag, as looks at "
            "the ranks ten times a second tell; what is too much is \"other\".",
            static_cast<double>(total.counts.launches));
    counter("mkernel_operator_launch_seconds_total", "How long these took, over all ranks.",
            kSecondsPerNs * static_cast<double>(total.counts.launch_ns));
    counter("mkernel_operator_wait_seconds_total",
            "How long of that a rank had nothing at work but waits.",
            kSecondsPerNs * static_cast<double>(total.counts.wait_ns));
  }
}

/// The newest session first: of a job that was restarted under its name, the old one may still be
/// there for a moment.
void add_queues(Families& out, const ControlSnapshot& control) {
  LaneTotals totals = control.released;
  for (auto queue = control.queues.rbegin(); queue != control.queues.rend(); ++queue) {
    const LaneStats& lane = queue->stats->lanes[queue->lane];
    totals.add(lane);
    const Labels labels{{"job_name", label_text(queue->job)},
                        {"rank", std::to_string(queue->rank)},
                        {"lane", std::to_string(queue->lane)}};
    out.gauge("mkernel_queue_depth", "Commands committed to a ring but not yet taken.",
              static_cast<double>(queue->depth), labels);
    out.counter("mkernel_queue_commands_total", "Valid commands taken from a ring.", lane.commands,
                labels);
    out.counter("mkernel_queue_bytes_total", "Payload of the commands taken from a ring.",
                lane.bytes, labels);
    out.counter("mkernel_queue_credit_stalls_total",
                "Passes in which commands of a ring waited for credits or for room on a link.",
                lane.credit_stalls, labels);
  }
  const auto total = [&out](const char* name, const char* help, std::uint64_t value) {
    out.counter(name, help, static_cast<double>(value));
  };
  total("mkernel_commands_total", "Valid commands taken, sessions that are gone included.",
        totals.commands);
  total("mkernel_command_bytes_total", "Payload of these commands.", totals.bytes);
  total("mkernel_command_batches_total", "Submissions, counted once per ring that is in them.",
        totals.batches);
  total("mkernel_commands_completed_total", "Commands whose source may be reused.",
        totals.completed);
  total("mkernel_credit_stalls_total",
        "Passes in which commands waited for credits or for room on a link, per ring.",
        totals.credit_stalls);
  out.histogram("mkernel_commit_to_post_seconds",
                "From a command's commit to its submission (the sum is estimated from buckets).",
                totals.commit_to_post);
  out.histogram("mkernel_post_to_completion_seconds",
                "From a submission to its completion (the sum is estimated from buckets).",
                totals.post_to_completion);
}

void add_links(Families& out, const ControlSnapshot& control) {
  for (const LinkInfo& link : control.links) {
    const Labels labels{{"rail", std::to_string(link.rail)},
                        {"peer", std::to_string(link.peer)},
                        {"peer_rail", std::to_string(link.peer_rail)}};
    out.gauge("mkernel_link_up", "1 while a link works.", link.state == "up" ? 1 : 0, labels);
    out.gauge("mkernel_link_stalled_seconds",
              "How long writes have been outstanding on a link without any completing.",
              static_cast<double>(link.stalled_for_ns) * kSecondsPerNs, labels);
    if (!link.stats) continue;
    const LinkStats& stats = *link.stats;
    out.counter("mkernel_link_messages_total", "Writes posted to a link.", stats.messages, labels);
    out.counter("mkernel_link_bytes_total", "Payload posted to a link.", stats.bytes, labels);
    out.counter("mkernel_link_batches_total", "Submissions to a link.", stats.batches, labels);
    out.counter("mkernel_link_completed_total", "Writes that completed.", stats.completed, labels);
    out.counter("mkernel_link_errors_total", "Writes that failed.", stats.errors, labels);
    out.counter("mkernel_link_post_retries_total",
                "Submissions that the network did not take whole, so that the rest came again.",
                stats.post_retries, labels);
    const std::uint64_t connects = stats.connects.value();
    out.counter("mkernel_link_reconnections_total", "Times that a link came up again.",
                connects > 1 ? static_cast<double>(connects - 1) : 0, labels);
    out.counter("mkernel_link_connect_failures_total", "Tries to connect a link that failed.",
                stats.connect_failures, labels);
    out.histogram("mkernel_link_batch_writes", "Writes per submission to a link.",
                  stats.batch_commands, labels);
    out.gauge("mkernel_link_outstanding", "Writes posted, neither completed nor failed.",
              static_cast<double>(stats.outstanding.value()), labels);
  }
}

}  // namespace

std::vector<MetricFamily> to_families(const MetricsSample& sample) {
  Families out(sample.node);
  add_daemon(out, sample);
  if (sample.certificates) add_certificates(out, *sample.certificates);
  add_rails(out, sample);
  add_peers(out, sample);
  if (sample.control) {
    add_sessions(out, sample);
    add_ended_jobs(out, *sample.control);
    add_operators(out, *sample.control);
    add_queues(out, *sample.control);
    add_links(out, *sample.control);
  }
  return out.take();
}

}  // namespace mk::daemon
