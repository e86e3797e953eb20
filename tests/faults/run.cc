#include "tests/faults/run.h"

#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace mk::faults {

using namespace std::chrono_literals;
using Milliseconds = std::chrono::duration<double, std::milli>;

int Run::all() {
  const auto& kinds = local_kinds();
  if (!flags_.only.empty() && flags_.only != "cut-network" && flags_.only != "disk-full" &&
      std::none_of(kinds.begin(), kinds.end(), [&](const auto& one) { return wanted(one.name); })) {
    fmt::print("there is no fault '{}'\n", flags_.only);
    return 2;
  }
  local_faults();
  if (failures_.empty()) cut_network();
  if (failures_.empty()) disk_full();
  if (!failures_.empty() && cluster_) fmt::print("{}", cluster_->logs());
  neighbour_.reset();
  cluster_.reset();
  std::error_code ignored;
  if (failures_.empty()) std::filesystem::remove_all(folder(), ignored);
  const bool any = report();
  if (failures_.empty() && !any) return 77;  // left out, with the reason said above
  return failures_.empty() ? 0 : 1;
}

void Run::failed(const std::string& what) {
  failures_.push_back(fmt::format("{} (seed {}, repetition {}): {}", fault_, flags_.seed,
                                  tallies_[fault_].repetitions + 1, what));
  fmt::print("FAILED  {}\n", failures_.back());
  std::fflush(stdout);
}

std::string Run::folder() {
  const char* const temporary = std::getenv("TMPDIR");
  return fmt::format("{}/mkfaults-{}", temporary != nullptr ? temporary : "/tmp", ::getpid());
}

std::string Run::begin_folder(bool small_disk) {
  const std::string folder = Run::folder();
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  if (small_disk && ::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=1m") != 0) return "";
  return folder;
}

void Run::begin_cluster(const std::string& folder, std::uint32_t nodes, bool namespaces) {
  cluster_ = std::make_unique<Cluster>(flags_.programs, folder, nodes, namespaces);
  for (std::uint32_t node = 0; node < nodes; ++node) {
    const Status started = cluster_->start(node);
    if (!expect(static_cast<bool>(started), "{}", started ? "" : started.error().message)) return;
  }
  expect(eventually([&] { return cluster_->connected(); }), "the daemons did not meet");
  next_job_works();  // what gRPC and the first job make once and keep is no leak
}

// -- what faults are made of ----------------------------------------------------------------------

std::unique_ptr<Job> Run::start_job(const std::string& name) {
  return std::make_unique<Job>(flags_.programs.rank,
                               std::vector{cluster_->socket(0), cluster_->socket(1)}, name, kLocal);
}

double Run::rate(const Launched& from, const Launched& to) {
  return static_cast<double>(to.launches - from.launches) /
         std::chrono::duration<double>(to.at - from.at).count();
}

std::unique_ptr<Job> Run::running_job() {
  auto job = start_job(next_name());
  expect(job->advance(2), "a new job did not launch: {}", job->errors());
  if (neighbour_) {
    const Launched before = neighbour_now();
    std::this_thread::sleep_for(quick() ? 300ms : 1000ms);
    rate_before_ = rate(before, neighbour_now());
  }
  pause(60);
  return job;
}

void Run::next_job_works() {
  auto job = start_job(next_name());
  expect(job->advance(2), "the next job did not launch: {}", job->errors());
}

Clock::time_point Run::strike() {
  if (neighbour_) struck_ = neighbour_now();
  return Clock::now();
}

void Run::expect_errors(Job& job, const std::vector<std::uint32_t>& dead, Clock::time_point at,
                        const std::vector<std::string>& codes, const std::string& name,
                        std::uint32_t unseen_ms) {
  for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
    if (std::find(dead.begin(), dead.end(), rank) != dead.end()) continue;
    Rank& survivor = job.rank(rank);
    if (!expect(eventually([&] { return survivor.ended(); }), "rank {} was told nothing", rank)) {
      continue;
    }
    Tally& tally = tallies_[fault_];
    const double ms = std::max(0.0, Milliseconds(survivor.error_at() - at).count());
    tally.error_ms.push_back(ms);
    const std::uint32_t allowed_ms = unseen_ms + flags_.deadline_ms;
    expect(ms <= allowed_ms, "rank {} was told after {:.0f} ms; {} are allowed", rank, ms,
           allowed_ms);
    const auto seen = cluster_->logged(rank / kLocal, "lost node", at);
    if (unseen_ms != 0 && seen) {
      const double after = Milliseconds(survivor.error_at() - *seen).count();
      tally.detection_ms.push_back(std::max(after, 0.0));
      expect(after <= flags_.deadline_ms, "rank {} was told {:.0f} ms after its daemon knew", rank,
             after);
    }
    const std::string error = survivor.error();
    expect(std::any_of(codes.begin(), codes.end(),
                       [&](const auto& code) { return error.starts_with("error " + code); }),
           "rank {}: {}", rank, error);
    expect(error.find(name) != std::string::npos, "rank {} was not told of {}: {}", rank, name,
           error);
  }
}

// -- repetitions ----------------------------------------------------------------------------------

void Run::settle() {
  if (new_daemon_) {
    // A new process: what it makes once and keeps is its baseline. The others' holds on.
    next_job_works();
    expect(eventually([&] { return cluster_->sessions(*new_daemon_) == 0; }), "sessions are left");
    cluster_->take_baseline(*new_daemon_);
    new_daemon_.reset();
  }
  const std::string leaked = cluster_->compare_with_baselines();
  expect(leaked.empty(), "left behind: {}", leaked);
  if (neighbour_) expect(neighbour_->advance(1), "the neighbour stopped: {}", neighbour_->errors());
}

void Run::repeat(const Named& one) {
  fault_ = one.name;
  const auto began = Clock::now();
  Tally& tally = tallies_[fault_];
  struck_.reset();
  rate_before_ = 0;
  (this->*one.fault)();
  if (struck_ && rate_before_ > 0) {
    // During the fault, and for as long as the rate before it was taken.
    const auto until = struck_->at + (quick() ? 300ms : 1000ms);
    std::this_thread::sleep_until(until);
    tally.neighbour.push_back(rate(*struck_, neighbour_now()) / rate_before_);
  }
  settle();
  ++tally.repetitions;
  fmt::print("{} {}: {:.1f} s\n", one.name, tally.repetitions,
             std::chrono::duration<double>(Clock::now() - began).count());
  std::fflush(stdout);
}

void Run::local_faults() {
  std::vector<Named> frequent, rare;
  for (const Named& one : local_kinds()) {
    if (wanted(one.name)) (one.slow && flags_.only.empty() ? rare : frequent).push_back(one);
  }
  if (frequent.empty()) return;
  fault_ = "start";
  begin_cluster(begin_folder(), 3, false);
  if (!failures_.empty()) return;
  // A job that no fault concerns, although it shares node 0's daemon with the one that they do.
  neighbour_ = std::make_unique<Job>(
      flags_.programs.rank, std::vector{cluster_->socket(0), cluster_->socket(2)}, "neighbour", 1);
  expect(neighbour_->advance(2), "the neighbour did not launch: {}", neighbour_->errors());
  cluster_->take_baselines();
  const std::size_t repetitions = flags_.repetitions != 0 ? flags_.repetitions : frequent.size();
  const auto goes_on = [&] { return failures_.empty() && !out_of_time(); };
  for (std::size_t i = 0; i < repetitions && goes_on(); ++i) repeat(frequent[i % frequent.size()]);
  if (!quick()) {
    for (const Named& one : rare) {
      for (std::uint32_t i = 0; i < seldom() && goes_on(); ++i) repeat(one);
    }
  }
  if (!failures_.empty()) return;  // the daemons' logs are still to be shown
  neighbour_.reset();
  cluster_.reset();
}

bool Run::report() {
  nlohmann::json out;
  out["seed"] = flags_.seed;
  out["load_average"] = nlohmann::json::array();
  double loads[3] = {0, 0, 0};
  for (int i = 0, count = ::getloadavg(loads, 3); i < count; ++i) {
    out["load_average"].push_back(loads[i]);
  }
  out["cpus"] = std::thread::hardware_concurrency();
  out["deadline_ms"] = flags_.deadline_ms;
  out["seconds"] = std::chrono::duration<double>(Clock::now() - began_).count();
  out["clients_killed"] = clients_killed_;
  out["daemons_restarted"] = daemons_restarted_;
  out["networks_cut"] = cuts_;
  out["failures"] = failures_;
  std::uint32_t repetitions = 0;
  std::vector<double> neighbour;
  for (const auto& [name, tally] : tallies_) {
    if (tally.repetitions == 0) continue;
    out["faults"][name] = tally.to_json();
    repetitions += tally.repetitions;
    neighbour.insert(neighbour.end(), tally.neighbour.begin(), tally.neighbour.end());
  }
  out["repetitions"] = repetitions;
  if (!neighbour.empty()) out["neighbour_throughput_median"] = median(neighbour);
  fmt::print("{}\n", out.dump(2));
  if (!flags_.json.empty()) std::ofstream(flags_.json) << out.dump(2) << "\n";
  fmt::print("{}\n",
             failures_.empty() ? "all is as it was before" : "something is not as it should be");
  for (const std::string& failure : failures_) fmt::print("FAILED  {}\n", failure);
  return repetitions != 0;
}

}  // namespace mk::faults
