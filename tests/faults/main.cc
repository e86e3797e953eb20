// fault_run: faults drawn from a seed against real daemons and real ranks; see README.md.
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/faults/cluster.h"
#include "tests/faults/job.h"

namespace mk::faults {
namespace {

using namespace std::chrono_literals;
using Milliseconds = std::chrono::duration<double, std::milli>;

constexpr std::uint32_t kLocal = 2;  ///< ranks per node of the job that faults hit

struct Flags {
  Programs programs{MK_TEST_MKERNELD, MK_TEST_MKCTL, MK_TEST_RANK};
  std::uint32_t repetitions = 7;  ///< of the faults within one machine, one after the other
  std::uint64_t seed = 1;
  std::uint32_t deadline_ms = 1000;
  std::uint32_t seconds = 0;  ///< no new fault after so long; 0: no end
  std::string only, json;
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// What one kind of fault has shown over all its repetitions.
struct Tally {
  std::uint32_t repetitions = 0;
  std::vector<double> error_ms;   ///< from a death to the error at each survivor
  std::vector<double> neighbour;  ///< its launches in the second after over those in the one before
};

class Run {
 public:
  explicit Run(const Flags& flags) : flags_(flags), random_(flags.seed) {}

  int all() {
    local_faults();
    if (failures_.empty()) cut_network();
    if (failures_.empty()) disk_full();
    neighbour_.reset();
    cluster_.reset();
    std::error_code ignored;
    if (failures_.empty()) std::filesystem::remove_all(folder(), ignored);
    report();
    return failures_.empty() ? 0 : 1;
  }

 private:
  using Fault = void (Run::*)();
  struct Named {
    const char* name;
    Fault fault;
  };

  /// Once each of the faults that take seconds.
  bool quick() const { return flags_.only.empty() && flags_.repetitions <= Flags().repetitions; }
  bool out_of_time() const {
    return flags_.seconds != 0 && Clock::now() - began_ > std::chrono::seconds(flags_.seconds);
  }
  bool wanted(const std::string& name) const { return flags_.only.empty() || flags_.only == name; }
  std::uint32_t draw(std::uint32_t below) {
    return std::uniform_int_distribution<std::uint32_t>(0, below - 1)(random_);
  }
  void pause(std::uint32_t ms_below) {
    std::this_thread::sleep_for(std::chrono::microseconds(draw(ms_below * 1000)));
  }
  template <class... Args>
  void expect(bool holds, fmt::format_string<Args...> format, Args&&... args) {
    if (holds) return;
    failures_.push_back(fmt::format("{} (seed {}, repetition {}): {}", fault_, flags_.seed,
                                    tallies_[fault_].repetitions,
                                    fmt::format(format, std::forward<Args>(args)...)));
    fmt::print("FAILED  {}\n", failures_.back());
  }

  std::string next_name() { return fmt::format("job{}", jobs_++); }
  std::unique_ptr<Job> start_job(const std::string& name) {
    return std::make_unique<Job>(
        flags_.programs.rank, std::vector{cluster_->socket(0), cluster_->socket(1)}, name, kLocal);
  }
  /// A job in the middle of its launches.
  std::unique_ptr<Job> running_job() {
    auto job = start_job(next_name());
    expect(job->advance(2), "a new job did not launch: {}", job->errors());
    pause(60);
    return job;
  }
  void next_job_works() {
    auto job = start_job(next_name());
    expect(job->advance(2), "the next job did not launch: {}", job->errors());
  }

  /// Every rank but `dead` gets an error in time whose text has one of `codes` and `name`.
  void expect_errors(Job& job, const std::vector<std::uint32_t>& dead, Clock::time_point at,
                     const std::vector<std::string>& codes, const std::string& name,
                     std::uint32_t deadline_ms) {
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      if (std::find(dead.begin(), dead.end(), rank) != dead.end()) continue;
      Rank& survivor = job.rank(rank);
      const bool told = eventually([&] { return survivor.ended(); });
      expect(told, "rank {} was told nothing", rank);
      if (!told) continue;
      const double ms = Milliseconds(survivor.error_at() - at).count();
      tallies_[fault_].error_ms.push_back(ms);
      expect(ms <= deadline_ms, "rank {} was told after {:.0f} ms; {} are allowed", rank, ms,
             deadline_ms);
      const std::string error = survivor.error();
      expect(std::any_of(codes.begin(), codes.end(),
                         [&](const auto& code) { return error.starts_with("error " + code); }),
             "rank {}: {}", rank, error);
      expect(error.find(name) != std::string::npos, "rank {} was not told of {}: {}", rank, name,
             error);
    }
  }

  // -- faults ---------------------------------------------------------------------------------

  void kill_rank() {
    auto job = running_job();
    const std::uint32_t victim = draw(job->size());
    const auto at = Clock::now();
    job->rank(victim).signal(SIGKILL);
    ++clients_killed_;
    expect_errors(*job, {victim}, at, {"peer-lost"}, fmt::format("rank {}", victim),
                  flags_.deadline_ms);
  }

  void stop_rank() {
    auto job = running_job();
    const std::uint32_t victim = draw(job->size());
    job->rank(victim).signal(SIGSTOP);
    pause(400);
    job->rank(victim).signal(SIGCONT);
    expect(job->advance(2), "stopped and continued, it did not go on: {}", job->errors());
  }

  void stop_and_kill_rank() {
    auto job = running_job();
    const std::uint32_t victim = draw(job->size());
    job->rank(victim).signal(SIGSTOP);
    pause(200);
    const auto at = Clock::now();
    job->rank(victim).signal(SIGKILL);
    ++clients_killed_;
    expect_errors(*job, {victim}, at, {"peer-lost"}, fmt::format("rank {}", victim),
                  flags_.deadline_ms);
  }

  void kill_all_ranks() {
    auto job = running_job();
    for (std::uint32_t rank = 0; rank < job->size(); ++rank) job->rank(rank).signal(SIGKILL);
    clients_killed_ += job->size();
  }

  void restart(std::uint32_t node) {
    const Status started = cluster_->start(node);
    expect(static_cast<bool>(started), "{}", started ? "" : started.error().message);
    ++daemons_restarted_;
    expect(eventually([&] { return cluster_->connected(); }), "the daemons did not meet again");
  }

  void kill_daemon() {
    auto job = running_job();
    const auto at = Clock::now();
    cluster_->signal(1, SIGKILL);
    expect_errors(*job, {2, 3}, at, {"peer-lost", "link-down", "unavailable"}, "node 1",
                  flags_.deadline_ms);
    expect_errors(*job, {0, 1}, at, {"daemon-lost"}, "", flags_.deadline_ms);
    expect(cluster_->gone(1), "SIGKILL did not end it");
    restart(1);
    fresh_ = true;
  }

  void restart_daemon() {
    auto job = running_job();
    cluster_->signal(1, SIGTERM);
    // Every rank of the job begins anew at once, and again until it gets through.
    std::vector<std::unique_ptr<Rank>> again(job->size());
    const std::string name = next_name();
    const auto attach = [&](std::uint32_t rank) {
      again[rank] = std::make_unique<Rank>(flags_.programs.rank, cluster_->socket(rank / kLocal),
                                           name, 2, kLocal, rank);
    };
    expect(eventually([&] { return job->rank(2).ended() && job->rank(3).ended(); }),
           "its ranks were told nothing: {}", job->errors());
    for (std::uint32_t rank = 0; rank < job->size(); ++rank) attach(rank);
    expect(cluster_->gone(1), "SIGTERM did not end it");
    restart(1);
    fresh_ = true;
    std::uint32_t tries = 0;
    const bool through = eventually(
        [&] {
          bool all = true;
          for (std::uint32_t rank = 0; rank < again.size(); ++rank) {
            if (again[rank]->ended() && ++tries < 400) {
              std::this_thread::sleep_for(20ms);
              attach(rank);
            }
            all = all && again[rank]->launches() >= 2;
          }
          return all;
        },
        120s);
    expect(through, "ranks that attached again, {} times, did not get their job: {}", tries,
           again[0]->error());
  }

  void fd_limit() {
    const auto held = static_cast<rlim_t>(cluster_->holdings(1).descriptors);
    rlimit before{};
    ::prlimit(cluster_->pid(1), RLIMIT_NOFILE, nullptr, &before);
    rlimit little = before;
    little.rlim_cur = held + draw(10);
    expect(::prlimit(cluster_->pid(1), RLIMIT_NOFILE, &little, nullptr) == 0, "prlimit failed");
    auto job = start_job(next_name());
    std::this_thread::sleep_for(1s + std::chrono::milliseconds(draw(500)));
    expect(cluster_->running(1), "the daemon has ended: {}", cluster_->log(1));
    ::prlimit(cluster_->pid(1), RLIMIT_NOFILE, &before, nullptr);
    // Either it was refused with a reason, or it goes on now.
    expect(eventually([&] {
             return job->any_ended() ||
                    (job->rank(0).launches() > 1 && job->rank(2).launches() > 1);
           }),
           "neither refused nor served");
    for (std::uint32_t rank = 0; rank < job->size(); ++rank) {
      if (!job->rank(rank).ended()) continue;
      expect(job->rank(rank).error().size() > 20, "rank {} was told: '{}'", rank,
             job->rank(rank).error());
    }
    job.reset();
    expect(eventually([&] { return cluster_->holdings(1).sessions == 0; }, 90s),
           "sessions are left");
    next_job_works();
  }

  // -- repetitions ----------------------------------------------------------------------------

  static std::string folder() { return "/tmp/mkfaults-" + std::to_string(::getpid()); }
  std::string begin_folder(bool small_disk = false) {
    const std::string folder = Run::folder();
    std::filesystem::remove_all(folder);
    std::filesystem::create_directory(folder);
    if (small_disk && ::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=1m") != 0) return "";
    return folder;
  }

  void begin_cluster(const std::string& folder, std::uint32_t nodes, bool namespaces) {
    cluster_ = std::make_unique<Cluster>(flags_.programs, folder, nodes, namespaces);
    for (std::uint32_t node = 0; node < nodes; ++node) {
      const Status started = cluster_->start(node);
      expect(static_cast<bool>(started), "{}", started ? "" : started.error().message);
      if (!started) return;
    }
    expect(eventually([&] { return cluster_->connected(); }), "the daemons did not meet");
    next_job_works();  // what gRPC and the first job make once and keep is no leak
  }

  /// Launches of the neighbour over the last second.
  double neighbour_rate(std::chrono::milliseconds over) {
    const std::uint64_t before = neighbour_->launches();
    const auto began = Clock::now();
    std::this_thread::sleep_for(over);
    return static_cast<double>(neighbour_->launches() - before) /
           std::chrono::duration<double>(Clock::now() - began).count();
  }

  void settle() {
    if (fresh_) {
      // A new daemon: what it makes once and keeps is its new baseline.
      next_job_works();
      expect(eventually([&] { return cluster_->holdings(1).sessions == 0; }), "sessions are left");
      std::this_thread::sleep_for(300ms);
      cluster_->take_baseline();
      fresh_ = false;
    }
    const std::string leaked = cluster_->compare_with_baseline();
    expect(leaked.empty(), "left behind: {}", leaked);
    if (neighbour_)
      expect(neighbour_->advance(1), "the neighbour stopped: {}", neighbour_->errors());
  }

  void local_faults() {
    constexpr Named kFaults[] = {{"kill-rank", &Run::kill_rank},
                                 {"stop-rank", &Run::stop_rank},
                                 {"stop-kill-rank", &Run::stop_and_kill_rank},
                                 {"kill-all-ranks", &Run::kill_all_ranks},
                                 {"kill-daemon", &Run::kill_daemon},
                                 {"restart-daemon", &Run::restart_daemon},
                                 {"fd-limit", &Run::fd_limit}};
    if (std::none_of(std::begin(kFaults), std::end(kFaults),
                     [&](const Named& one) { return wanted(one.name); })) {
      return;
    }
    fault_ = "start";
    begin_cluster(begin_folder(), 3, false);
    if (!failures_.empty()) return;
    // A job that no fault concerns, although it shares node 0's daemon with the one that they do.
    neighbour_ = std::make_unique<Job>(flags_.programs.rank,
                                       std::vector{cluster_->socket(0), cluster_->socket(2)},
                                       "neighbour", 1);
    expect(neighbour_->advance(2), "the neighbour did not launch: {}", neighbour_->errors());
    cluster_->take_baseline();
    const auto window = flags_.repetitions > 50 ? 1000ms : 300ms;
    for (std::uint32_t repetition = 0;
         repetition < flags_.repetitions && failures_.empty() && !out_of_time();) {
      for (const Named& one : kFaults) {
        if (!wanted(one.name)) continue;
        if (!failures_.empty() || out_of_time() || repetition++ >= flags_.repetitions) break;
        fault_ = one.name;
        const auto began = Clock::now();
        const double rate_before = neighbour_rate(window);
        (this->*one.fault)();
        const double rate_after = neighbour_rate(window);
        ++tallies_[fault_].repetitions;
        if (rate_before > 0) tallies_[fault_].neighbour.push_back(rate_after / rate_before);
        settle();
        fmt::print("{} {}: {:.1f} s\n", repetition, one.name,
                   std::chrono::duration<double>(Clock::now() - began).count());
        std::fflush(stdout);
      }
    }
    neighbour_.reset();
    cluster_.reset();
  }

  void cut_network() {
    if (!wanted("cut-network") || quick()) return;
    fault_ = "cut-network";
    if (shell("ip netns add mkfprobe && ip netns del mkfprobe") != 0) {
      fmt::print("cut-network: left out, no network namespaces here\n");
      return;
    }
    begin_cluster(begin_folder(), 2, true);
    if (!failures_.empty()) return;
    cluster_->take_baseline();
    const std::uint32_t repetitions = std::max(1u, flags_.repetitions / 25);
    for (std::uint32_t repetition = 0; repetition < repetitions && failures_.empty();
         ++repetition) {
      auto job = running_job();
      const auto at = Clock::now();
      cluster_->cut(true);
      // Nobody says anything: keepalive finds out within 5 s, and the error follows.
      expect_errors(*job, {2, 3}, at, {"peer-lost", "link-down", "unavailable"}, "node 1",
                    6000 + flags_.deadline_ms);
      expect_errors(*job, {0, 1}, at, {"peer-lost", "link-down", "unavailable"}, "node 0",
                    6000 + flags_.deadline_ms);
      job.reset();
      pause(500);
      cluster_->cut(false);
      ++cuts_;
      expect(eventually([&] { return cluster_->connected(); }), "healed, they did not meet again");
      next_job_works();
      ++tallies_[fault_].repetitions;
      // Links that were made anew hold what the old ones held.
      settle();
      fmt::print("cut-network {}: {:.1f} s\n", repetition,
                 std::chrono::duration<double>(Clock::now() - at).count());
      std::fflush(stdout);
    }
    cluster_.reset();
  }

  void disk_full() {
    if (!wanted("disk-full") || quick()) return;
    fault_ = "disk-full";
    const std::string folder = begin_folder(true);
    if (folder.empty()) {
      fmt::print("disk-full: left out, no tmpfs of its own here\n");
      return;
    }
    begin_cluster(folder, 2, false);
    if (failures_.empty()) {
      cluster_->take_baseline();
      for (std::uint32_t repetition = 0; repetition < std::max(1u, flags_.repetitions / 25);
           ++repetition) {
        shell("dd if=/dev/zero of=" + folder + "/filler bs=4k count=1000");
        const bool full = shell("dd if=/dev/zero of=" + folder + "/more bs=4k count=1") != 0;
        expect(full, "the disk is not full");
        auto job = running_job();
        job->rank(0).signal(SIGKILL);
        ++clients_killed_;
        expect_errors(*job, {0}, Clock::now(), {"peer-lost"}, "rank 0", flags_.deadline_ms);
        job.reset();
        next_job_works();
        shell("rm -f " + folder + "/filler " + folder + "/more");
        ++tallies_[fault_].repetitions;
        settle();
      }
    }
    cluster_.reset();
    ::umount(folder.c_str());
  }

  void report() {
    nlohmann::json out;
    out["seed"] = flags_.seed;
    out["load_average"] = nlohmann::json::array();
    double loads[3] = {0, 0, 0};
    for (int i = 0, count = ::getloadavg(loads, 3); i < count; ++i) {
      out["load_average"].push_back(loads[i]);
    }
    out["cpus"] = std::thread::hardware_concurrency();
    out["deadline_ms"] = flags_.deadline_ms;
    out["clients_killed"] = clients_killed_;
    out["daemons_restarted"] = daemons_restarted_;
    out["networks_cut"] = cuts_;
    out["failures"] = failures_;
    std::vector<double> all;
    for (const auto& [name, tally] : tallies_) {
      if (tally.repetitions == 0) continue;
      auto& one = out["faults"][name];
      one["repetitions"] = tally.repetitions;
      if (!tally.error_ms.empty()) {
        one["errors"] = tally.error_ms.size();
        one["death_to_error_ms_median"] = median(tally.error_ms);
        one["death_to_error_ms_max"] =
            *std::max_element(tally.error_ms.begin(), tally.error_ms.end());
      }
      if (!tally.neighbour.empty()) {
        one["neighbour_throughput_median"] = median(tally.neighbour);
        all.insert(all.end(), tally.neighbour.begin(), tally.neighbour.end());
      }
    }
    if (!all.empty()) out["neighbour_throughput_median"] = median(all);
    fmt::print("{}\n", out.dump(2));
    if (!flags_.json.empty()) std::ofstream(flags_.json) << out.dump(2) << "\n";
    fmt::print("{}\n",
               failures_.empty() ? "all is as it was before" : "something is not as it should be");
  }

  const Flags& flags_;
  std::mt19937_64 random_;
  const Clock::time_point began_ = Clock::now();
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Job> neighbour_;
  std::string fault_;
  bool fresh_ = false;  ///< daemon 1 is a new process
  std::uint32_t jobs_ = 0, clients_killed_ = 0, daemons_restarted_ = 0, cuts_ = 0;
  std::map<std::string, Tally> tallies_;
  std::vector<std::string> failures_;
};

}  // namespace
}  // namespace mk::faults

int main(int argc, char** argv) {
  mk::faults::Flags flags;
  CLI::App app("Faults against real daemons and ranks");
  app.add_option("--repetitions", flags.repetitions, "Faults, one kind after the other");
  app.add_option("--seed", flags.seed, "Of victims and moments");
  app.add_option("--deadline-ms", flags.deadline_ms, "From a death to each survivor's error");
  app.add_option("--seconds", flags.seconds, "No new fault after so long; 0: no end");
  app.add_option("--only", flags.only, "One fault");
  app.add_option("--json", flags.json, "Where the figures go");
  CLI11_PARSE(app, argc, argv);
  mk::tools::unwind_on_interrupt();
  return mk::faults::Run(flags).all();
}
