/// \file
/// The run of faults: the cluster, the neighbour, what comes before and after every fault (run.cc),
/// the faults within one machine (faults.cc), and those that need root (root_faults.cc).
#pragma once

#include <fmt/format.h>

#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/faults/cluster.h"
#include "tests/faults/job.h"
#include "tests/faults/tally.h"

namespace mk::faults {

struct Flags {
  Programs programs;
  std::uint32_t repetitions =
      0;  ///< faults, one kind after the other; 0: each of the quick ones once
  std::uint64_t seed = 1;
  std::uint32_t deadline_ms = 1000;
  std::uint32_t seconds = 0;  ///< no new fault after so long; 0: no end
  std::string only, json;
};

class Run {
 public:
  explicit Run(const Flags& flags) : flags_(flags), random_(flags.seed) {}
  /// Everything that the flags ask for; the exit status.
  int all();

 private:
  static constexpr std::uint32_t kLocal = 2;  ///< ranks per node of the job that faults hit
  struct Named {
    const char* name;
    void (Run::*fault)();
    bool slow = false;  ///< seldom, and not in the quick form
  };
  static const std::vector<Named>& local_kinds();

  // -- the frame --
  bool quick() const { return flags_.only.empty() && flags_.repetitions == 0; }
  bool wanted(const std::string& name) const { return flags_.only.empty() || flags_.only == name; }
  bool out_of_time() const {
    return flags_.seconds != 0 && Clock::now() - began_ > std::chrono::seconds(flags_.seconds);
  }
  std::uint32_t seldom() const { return std::max(1u, flags_.repetitions / 25); }
  std::uint32_t draw(std::uint32_t below) {
    return std::uniform_int_distribution<std::uint32_t>(0, below - 1)(random_);
  }
  void pause(std::uint32_t ms_below) {
    std::this_thread::sleep_for(std::chrono::microseconds(draw(ms_below * 1000)));
  }
  template <class... Args>
  bool expect(bool holds, fmt::format_string<Args...> format, Args&&... args) {
    if (!holds) failed(fmt::format(format, std::forward<Args>(args)...));
    return holds;
  }
  void failed(const std::string& what);
  static std::string folder();
  /// Empty when there can be no small disk.
  std::string begin_folder(bool small_disk = false);
  void begin_cluster(const std::string& folder, std::uint32_t nodes, bool namespaces);
  void local_faults();
  void repeat(const Named& one);
  /// After every fault: nothing is left behind, and the neighbour goes on.
  void settle();
  /// False when no fault could be tried.
  bool report();

  // -- what faults are made of --
  std::string next_name() { return fmt::format("job{}", jobs_++); }
  std::unique_ptr<Job> start_job(const std::string& name);
  /// A job in the middle of its launches, beside the neighbour whose rate is taken then.
  std::unique_ptr<Job> running_job();
  void next_job_works();
  /// The moment of the fault: from here on the neighbour's rate is the one during it.
  Clock::time_point strike();
  /// Kills it, and waits until the kernel has closed what it had open: when that was. (A process
  /// that is not let run does not die either.)
  Clock::time_point kill(Rank& rank);
  /// Every rank but `dead` gets an error in time whose text has one of `codes` and `name`. A fault
  /// that takes `unseen_ms` to be noticed is noticed by then, and the error follows in time.
  void expect_errors(Job& job, const std::vector<std::uint32_t>& dead, Clock::time_point at,
                     const std::vector<std::string>& codes, const std::string& name,
                     std::uint32_t unseen_ms = 0);
  void begin_again(std::uint32_t node);

  // -- within one machine --
  void kill_rank();
  void stop_rank();
  void stop_and_kill_rank();
  void kill_held_rank();
  void kill_all_ranks();
  void stop_all_ranks();
  void kill_daemon();
  void stop_daemon();
  void hang_daemon();
  void restart_daemon();
  void fd_limit();

  // -- as root --
  void cut_network();
  void disk_full();

  struct Launched {
    std::uint64_t launches;
    Clock::time_point at;
  };
  Launched neighbour_now() const { return {neighbour_->launches(), Clock::now()}; }
  static double rate(const Launched& from, const Launched& to);

  const Flags& flags_;
  std::mt19937_64 random_;
  const Clock::time_point began_ = Clock::now();
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Job> neighbour_;
  std::string fault_;
  std::optional<std::uint32_t> new_daemon_;  ///< a new process since the last baseline
  double rate_before_ = 0;
  std::optional<Launched> struck_;
  std::uint32_t jobs_ = 0, clients_killed_ = 0, daemons_restarted_ = 0, cuts_ = 0;
  std::map<std::string, Tally> tallies_;
  std::vector<std::string> failures_;
};

}  // namespace mk::faults
