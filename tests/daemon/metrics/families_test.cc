// What Prometheus is told: names and units by its rules, totals that never fall, no series twice.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <regex>

#include "daemon/metrics/metrics.h"

namespace mk::daemon {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

std::map<std::string, MetricFamily> families_of(const MetricsSample& sample) {
  std::map<std::string, MetricFamily> by_name;
  for (MetricFamily& family : to_families(sample)) {
    const std::string name = family.name;
    EXPECT_TRUE(by_name.emplace(name, std::move(family)).second) << name << " comes twice";
  }
  return by_name;
}

std::string key_of(const ClientMetric& metric) {
  std::string key;
  for (const auto& label : metric.label) key += label.name + "=" + label.value + ";";
  return key;
}

QueueInfo queue(std::uint32_t session, const std::string& job, std::uint32_t rank,
                std::uint32_t lane) {
  QueueInfo info;
  info.session_id = session;
  info.job = job;
  info.rank = rank;
  info.lane = lane;
  info.stats = std::make_shared<SessionStats>();
  return info;
}

SessionStats& stats_of(const QueueInfo& info) { return const_cast<SessionStats&>(*info.stats); }

/// Something of everything.
MetricsSample busy_sample(const ProxyStats& proxy) {
  MetricsSample sample;
  sample.node = 3;
  sample.rails = {&proxy, &proxy};
  sample.certificates = {.faults = 1, .expires = 1'800'000'000};
  sample.peers = {{.node = 1, .up = true}, {.node = 2, .breaks = 7}};
  ControlSnapshot& control = sample.control.emplace();
  control.sessions.resize(2);
  control.sessions[0].job = control.sessions[1].job = "train";
  control.sessions[0].state = control.sessions[1].state = "up";
  control.sessions[1].registered_bytes = 4096;
  control.queues = {queue(1, "train", 0, 0), queue(1, "train", 0, 1), queue(2, "train", 1, 0)};
  control.ended_jobs.resize(3);
  for (EndedJob& job : control.ended_jobs) {
    job.name = "train";
    job.uid = 1000;
    job.ran_ns = 2'000'000'000;
    job.launches = 5;
    job.totals.bytes = 10;
  }
  control.ended_jobs[1].failed = true;
  control.ended_jobs[2].uid = 1001;
  control.links.resize(1);
  control.links[0].state = "error";
  control.links[0].stats = std::make_shared<LinkStats>();
  return sample;
}

TEST(Metrics, NamesFollowPrometheusRules) {
  const ProxyStats proxy;
  const std::regex name_rule("mkernel_[a-z]+(_[a-z]+)*");
  const std::regex label_rule(
      "node|rail|peer|peer_rail|job_name|uid|operator|tag|rank|lane|state|result|version|build|"
      "fabric");
  for (const auto& [name, family] : families_of(busy_sample(proxy))) {
    EXPECT_TRUE(std::regex_match(name, name_rule)) << name;
    EXPECT_EQ(name.ends_with("_total"), family.type == MetricType::Counter) << name;
    if (family.type == MetricType::Histogram) {
      EXPECT_TRUE(name.ends_with("_seconds") || name.ends_with("_writes")) << name;
    }
    EXPECT_TRUE(family.help.ends_with(".")) << name;
    EXPECT_THAT(name, testing::Not(testing::ContainsRegex("_(ns|ms|us|kb|mb|milliseconds)(_|$)")));
    std::set<std::string> series;
    for (const ClientMetric& metric : family.metric) {
      EXPECT_TRUE(series.insert(key_of(metric)).second) << name << " " << key_of(metric);
      for (const auto& label : metric.label) {
        EXPECT_TRUE(std::regex_match(label.name, label_rule)) << name << " " << label.name;
      }
      EXPECT_EQ(metric.label.back().name, "node");
      EXPECT_EQ(metric.label.back().value, "3");
    }
  }
}

/// A label that Prometheus or its operator sets by itself would be renamed (`exported_job`), or
/// would take the place of theirs, as the scraper is set up.
TEST(Metrics, NoLabelIsOneOfTheScrapers) {
  const ProxyStats proxy;
  const std::regex scrapers(
      "job|instance|namespace|pod|service|container|endpoint|__.*|exported_.*");
  for (const auto& [name, family] : families_of(busy_sample(proxy))) {
    for (const ClientMetric& metric : family.metric) {
      for (const auto& label : metric.label) {
        EXPECT_FALSE(std::regex_match(label.name, scrapers)) << name << " " << label.name;
      }
    }
  }
}

TEST(Metrics, SessionsAreCountedByStateAndJob) {
  const ProxyStats proxy;
  auto families = families_of(busy_sample(proxy));
  double sessions = 0;
  for (const ClientMetric& metric : families["mkernel_sessions"].metric) {
    sessions += metric.gauge.value;
  }
  EXPECT_EQ(sessions, 2);
  EXPECT_EQ(families["mkernel_sessions"].metric.size(), 4);
  EXPECT_EQ(families["mkernel_jobs"].metric[0].gauge.value, 1);
  EXPECT_EQ(families["mkernel_job_sessions"].metric[0].gauge.value, 2);
  EXPECT_EQ(families["mkernel_job_registered_bytes"].metric[0].gauge.value, 4096);
  EXPECT_EQ(families["mkernel_link_up"].metric[0].gauge.value, 0);
  EXPECT_EQ(families["mkernel_peer_up"].metric[0].gauge.value, 1);
  EXPECT_EQ(families["mkernel_peer_breaks_total"].metric[1].counter.value, 7);
}

TEST(Metrics, EndedJobsAreAddedUpByNameAndUser) {
  const ProxyStats proxy;
  auto families = families_of(busy_sample(proxy));
  const auto& runs = families["mkernel_ended_job_runs"].metric;
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(key_of(runs[0]), "job_name=train;uid=1000;node=3;");
  EXPECT_EQ(runs[0].gauge.value, 2);
  EXPECT_EQ(key_of(runs[1]), "job_name=train;uid=1001;node=3;");
  EXPECT_EQ(families["mkernel_ended_job_failures"].metric[0].gauge.value, 1);
  EXPECT_EQ(families["mkernel_ended_job_launches"].metric[0].gauge.value, 10);
  EXPECT_EQ(families["mkernel_ended_job_bytes"].metric[0].gauge.value, 20);
  EXPECT_EQ(families["mkernel_ended_job_run_seconds"].metric[1].gauge.value, 2);
}

TEST(Metrics, LaunchesAreOfOperatorsAndTags) {
  const ProxyStats proxy;
  MetricsSample sample = busy_sample(proxy);
  sample.control->operators = {
      {{"train", "1000", "gemm_ar", "7"}, {5, 3'000'000'000, 1'000'000'000}}};
  auto families = families_of(sample);
  const auto& launches = families["mkernel_operator_launches_total"].metric;
  ASSERT_EQ(launches.size(), 1u);
  EXPECT_EQ(key_of(launches[0]), "job_name=train;uid=1000;operator=gemm_ar;tag=7;node=3;");
  EXPECT_EQ(launches[0].counter.value, 5);
  EXPECT_EQ(families["mkernel_operator_launch_seconds_total"].metric[0].counter.value, 3);
  EXPECT_EQ(families["mkernel_operator_wait_seconds_total"].metric[0].counter.value, 1);
}

TEST(Metrics, TotalsKeepWhatEndedSessionsHadDone) {
  const ProxyStats proxy;
  MetricsSample sample = busy_sample(proxy);
  stats_of(sample.control->queues[0]).lanes[0].commands.add(5);
  stats_of(sample.control->queues[1]).lanes[1].commands.add(7);
  EXPECT_EQ(families_of(sample)["mkernel_commands_total"].metric[0].counter.value, 12);
  // Both rings go: what they had counted is with the released lanes now.
  for (int i = 0; i < 2; ++i) {
    sample.control->released.add(stats_of(sample.control->queues[0]).lanes[i]);
    sample.control->released.add(stats_of(sample.control->queues[1]).lanes[i]);
  }
  sample.control->queues.clear();
  auto families = families_of(sample);
  EXPECT_EQ(families["mkernel_commands_total"].metric[0].counter.value, 12);
  EXPECT_FALSE(families.contains("mkernel_queue_commands_total"));
}

TEST(Metrics, ARestartedJobHidesItsEndingPredecessor) {
  const ProxyStats proxy;
  MetricsSample sample = busy_sample(proxy);
  sample.control->queues = {queue(1, "job", 0, 0), queue(9, "job", 0, 0)};
  stats_of(sample.control->queues[0]).lanes[0].commands.add(100);
  stats_of(sample.control->queues[1]).lanes[0].commands.add(1);
  auto families = families_of(sample);
  ASSERT_EQ(families["mkernel_queue_commands_total"].metric.size(), 1);
  EXPECT_EQ(families["mkernel_queue_commands_total"].metric[0].counter.value, 1);
  EXPECT_EQ(families["mkernel_commands_total"].metric[0].counter.value, 101);
}

TEST(Metrics, JobNamesCannotBreakTheText) {
  const ProxyStats proxy;
  MetricsSample sample = busy_sample(proxy);
  sample.control->sessions[0].job = "a\nb\x01\xff";
  sample.control->sessions[1].job = "a?b??";  // looks the same once it is printable: one series
  auto families = families_of(sample);
  ASSERT_EQ(families["mkernel_job_sessions"].metric.size(), 1);
  EXPECT_EQ(families["mkernel_job_sessions"].metric[0].label[0].value, "a?b??");
  EXPECT_EQ(families["mkernel_job_sessions"].metric[0].gauge.value, 2);
}

TEST(Metrics, WithoutTheControlThreadTheRestIsStillThere) {
  const ProxyStats proxy;
  MetricsSample sample = busy_sample(proxy);
  sample.control.reset();
  auto families = families_of(sample);
  EXPECT_EQ(families["mkernel_control_responsive"].metric[0].gauge.value, 0);
  EXPECT_TRUE(families.contains("mkernel_proxy_passes_total"));
  EXPECT_FALSE(families.contains("mkernel_sessions"));
}

TEST(Metrics, AWaitingDaemonTellsWhatNeedsNoNetwork) {
  MetricsSample sample;
  sample.waiting = true;
  auto families = families_of(sample);
  EXPECT_EQ(families["mkernel_waiting"].metric[0].gauge.value, 1);
  EXPECT_TRUE(families.contains("mkernel_build_info"));
  EXPECT_FALSE(families.contains("mkernel_control_responsive")) << "it is not stuck";
  const ProxyStats proxy;
  EXPECT_EQ(families_of(busy_sample(proxy))["mkernel_waiting"].metric[0].gauge.value, 0);
}

TEST(Metrics, HistogramsCountEveryValueOnceBelowItsBound) {
  const unsigned seed = std::random_device{}();
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> log2_ns(0, 41);
  const ProxyStats proxy;
  MetricsSample sample = busy_sample(proxy);
  LatencyHistogram& recorded = stats_of(sample.control->queues[2]).lanes[0].post_to_completion;
  std::vector<std::uint64_t> values;
  double sum_seconds = 0;
  for (int i = 0; i < 5000; ++i) {
    values.push_back(static_cast<std::uint64_t>(std::exp2(log2_ns(random))));
    sum_seconds += 1e-9 * static_cast<double>(values.back());
    recorded.record(values.back());
  }
  auto families = families_of(sample);
  const auto& histogram = families["mkernel_post_to_completion_seconds"].metric[0].histogram;
  EXPECT_EQ(histogram.sample_count, values.size()) << "seed " << seed;
  for (const ClientMetric::Bucket& bucket : histogram.bucket) {
    const double bound_ns = std::round(bucket.upper_bound * 1e9);
    const auto below = std::count_if(values.begin(), values.end(), [&](std::uint64_t value) {
      return static_cast<double>(value) < bound_ns;
    });
    EXPECT_EQ(bucket.cumulative_count, below) << bound_ns << " ns, seed " << seed;
  }
  // A bucket is at most a quarter of its lower bound wide: its middle is 12.5% off at most.
  EXPECT_NEAR(histogram.sample_sum, sum_seconds, 0.125 * sum_seconds) << "seed " << seed;
  EXPECT_EQ(families["mkernel_commit_to_post_seconds"].metric[0].histogram.sample_count, 0);
}

TEST(Metrics, LinksTellTheirBatchesRetriesAndReconnections) {
  const ProxyStats proxy;
  MetricsSample sample = busy_sample(proxy);
  LinkInfo& link = sample.control->links[0];
  link.stalled_for_ns = 1'500'000'000;
  auto& stats = const_cast<LinkStats&>(*link.stats);
  stats.batch_commands[0].add(3);
  stats.batch_commands[7].add(2);
  stats.post_retries.add(4);
  stats.connect_failures.add(5);
  EXPECT_EQ(families_of(sample)["mkernel_link_reconnections_total"].metric[0].counter.value, 0);
  stats.connects.add(3);
  auto families = families_of(sample);
  EXPECT_EQ(families["mkernel_link_reconnections_total"].metric[0].counter.value, 2);
  EXPECT_EQ(families["mkernel_link_post_retries_total"].metric[0].counter.value, 4);
  EXPECT_EQ(families["mkernel_link_connect_failures_total"].metric[0].counter.value, 5);
  EXPECT_EQ(families["mkernel_link_stalled_seconds"].metric[0].gauge.value, 1.5);
  const auto& histogram = families["mkernel_link_batch_writes"].metric[0].histogram;
  ASSERT_EQ(histogram.bucket.size(), shm::kBatchMax);
  EXPECT_EQ(histogram.bucket[0].cumulative_count, 3);
  EXPECT_EQ(histogram.bucket[6].cumulative_count, 3);
  EXPECT_EQ(histogram.bucket[7].cumulative_count, 5);
  EXPECT_EQ(histogram.sample_count, 5);
  EXPECT_EQ(histogram.sample_sum, 3 * 1 + 2 * 8);
}

TEST(Metrics, ArrivalsAreTimedByRail) {
  ProxyStats first, second;
  MetricsSample sample = busy_sample(first);
  sample.rails = {&first, &second};
  second.arrival_to_flag.record(100, 7);
  auto families = families_of(sample);
  const auto& series = families["mkernel_arrival_to_flag_seconds"].metric;
  ASSERT_EQ(series.size(), 2);
  EXPECT_EQ(series[0].histogram.sample_count, 0);
  EXPECT_EQ(series[1].label[0].value, "1");
  EXPECT_EQ(series[1].histogram.sample_count, 7);
}

}  // namespace
}  // namespace mk::daemon
