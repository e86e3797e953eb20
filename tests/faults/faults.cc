// The faults within one machine. Each leaves a cluster in which the next job works.
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>

#include "shm/host/process_fd.h"
#include "tests/faults/run.h"

namespace mk::faults {

using namespace std::chrono_literals;

const std::vector<Run::Named>& Run::local_kinds() {
  static const std::vector<Named> kinds = {{"kill-rank", &Run::kill_rank},
                                           {"stop-rank", &Run::stop_rank},
                                           {"stop-kill-rank", &Run::stop_and_kill_rank},
                                           {"kill-held-rank", &Run::kill_held_rank},
                                           {"kill-all-ranks", &Run::kill_all_ranks},
                                           {"stop-all-ranks", &Run::stop_all_ranks},
                                           {"kill-daemon", &Run::kill_daemon},
                                           {"stop-daemon", &Run::stop_daemon},
                                           {"restart-daemon", &Run::restart_daemon},
                                           {"fd-limit", &Run::fd_limit},
                                           {"hang-daemon", &Run::hang_daemon, true}};
  return kinds;
}

Clock::time_point Run::kill(Rank& rank) {
  rank.signal(SIGKILL);
  ++clients_killed_;
  expect(eventually([&] { return rank.ended(); }), "SIGKILL did not end it");
  return rank.error_at();
}

void Run::kill_rank() {
  auto job = running_job();
  const std::uint32_t victim = draw(job->size());
  strike();
  const auto at = kill(job->rank(victim));
  expect_errors(*job, {victim}, at, {"peer-lost"}, fmt::format("rank {}", victim));
}

void Run::stop_rank() {
  auto job = running_job();
  const std::uint32_t victim = draw(job->size());
  strike();
  job->rank(victim).signal(SIGSTOP);
  pause(400);
  job->rank(victim).signal(SIGCONT);
  expect(job->advance(2), "stopped and continued, it did not go on: {}", job->errors());
}

void Run::stop_and_kill_rank() {
  auto job = running_job();
  const std::uint32_t victim = draw(job->size());
  job->rank(victim).signal(SIGSTOP);
  pause(200);
  strike();
  const auto at = kill(job->rank(victim));
  expect_errors(*job, {victim}, at, {"peer-lost"}, fmt::format("rank {}", victim));
}

namespace {

/// Copies of all sockets of a process: as a child of it would have them, that it has made without
/// our library's knowledge. None where the system forbids that.
std::vector<UniqueFd> sockets_of(pid_t pid) {
  std::vector<UniqueFd> sockets;
  const auto process = shm::open_process(pid);
  if (!process) return sockets;
  std::error_code error;
  const std::string folder = fmt::format("/proc/{}/fd", pid);
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (!std::filesystem::read_symlink(entry, error).string().starts_with("socket:")) continue;
    const int fd = std::stoi(entry.path().filename());
    UniqueFd copy(static_cast<int>(::syscall(SYS_pidfd_getfd, process->get(), fd, 0)));
    if (copy.valid()) sockets.push_back(std::move(copy));
  }
  return sockets;
}

}  // namespace

void Run::kill_held_rank() {
  auto job = running_job();
  const std::uint32_t victim = draw(job->size());
  const auto held = sockets_of(job->rank(victim).pid());
  if (held.empty()) fmt::print("kill-held-rank: its socket cannot be copied here\n");
  strike();
  const auto at = kill(job->rank(victim));
  expect_errors(*job, {victim}, at, {"peer-lost"}, fmt::format("rank {}", victim));
}

void Run::kill_all_ranks() {
  auto job = running_job();
  strike();
  for (std::uint32_t rank = 0; rank < job->size(); ++rank) job->rank(rank).signal(SIGKILL);
  clients_killed_ += job->size();
}

void Run::stop_all_ranks() {
  auto job = running_job();
  strike();
  for (std::uint32_t rank = 0; rank < job->size(); ++rank) job->rank(rank).signal(SIGSTOP);
  pause(400);
  for (std::uint32_t rank = 0; rank < job->size(); ++rank) job->rank(rank).signal(SIGCONT);
  expect(job->advance(2), "stopped and continued, they did not go on: {}", job->errors());
}

void Run::begin_again(std::uint32_t node) {
  expect(cluster_->gone(node), "the signal did not end it");
  const Status started = cluster_->start(node);
  expect(static_cast<bool>(started), "{}", started ? "" : started.error().message);
  ++daemons_restarted_;
  new_daemon_ = node;
  expect(eventually([&] { return cluster_->connected(); }), "the daemons did not meet again");
}

void Run::kill_daemon() {
  auto job = running_job();
  strike();
  const auto at = cluster_->kill(1);
  expect_errors(*job, {2, 3}, at, {"peer-lost", "link-down", "unavailable"}, "node 1");
  expect_errors(*job, {0, 1}, at, {"daemon-lost"}, "");
  begin_again(1);
}

/// Shorter than anybody's patience: nothing comes of it.
void Run::stop_daemon() {
  auto job = running_job();
  strike();
  cluster_->signal(1, SIGSTOP);
  pause(400);
  cluster_->signal(1, SIGCONT);
  expect(job->advance(2), "with its daemon stopped and continued, it did not go on: {}",
         job->errors());
}

/// Longer than that: its ranks miss its heartbeat, the other daemons its answers, each for 5 s.
void Run::hang_daemon() {
  auto job = running_job();
  const auto at = strike();
  cluster_->signal(1, SIGSTOP);
  expect_errors(*job, {2, 3}, at, {"peer-lost", "link-down", "unavailable"}, "node 1", 6000);
  expect_errors(*job, {0, 1}, at, {"daemon-lost"}, "", 6000);
  cluster_->signal(1, SIGCONT);
  expect(eventually([&] { return cluster_->connected(); }), "it goes on, but they did not meet");
  job.reset();
  next_job_works();
}

void Run::restart_daemon() {
  auto job = running_job();
  strike();
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
  begin_again(1);
  std::uint32_t tries = 0;
  const bool through = eventually(
      [&] {
        bool all = true;
        for (std::uint32_t rank = 0; rank < again.size(); ++rank) {
          if (again[rank]->ended()) {
            ++tries;
            std::this_thread::sleep_for(20ms);
            attach(rank);
          }
          all = all && again[rank]->launches() >= 2;
        }
        return all;
      },
      120s);
  std::string errors;
  for (const auto& rank : again) errors += "[" + rank->error() + "] ";
  expect(through, "ranks that attached again, {} times, did not get their job: {}", tries, errors);
}

void Run::fd_limit() {
  running_job();  // for the neighbour's rate beside a job, since one begins below
  const auto held = static_cast<rlim_t>(cluster_->holdings(1).descriptors);
  rlimit before{};
  ::prlimit(cluster_->pid(1), RLIMIT_NOFILE, nullptr, &before);
  rlimit little = before;
  little.rlim_cur = held + draw(10);
  strike();
  expect(::prlimit(cluster_->pid(1), RLIMIT_NOFILE, &little, nullptr) == 0, "prlimit failed");
  auto job = start_job(next_name());
  std::this_thread::sleep_for(1s + std::chrono::milliseconds(draw(500)));
  expect(cluster_->running(1), "the daemon has ended");
  ::prlimit(cluster_->pid(1), RLIMIT_NOFILE, &before, nullptr);
  // Either it was refused with a reason, or it goes on now.
  expect(eventually([&] {
           return job->any_ended() || (job->rank(0).launches() > 1 && job->rank(2).launches() > 1);
         }),
         "neither refused nor served");
  for (std::uint32_t rank = 0; rank < job->size(); ++rank) {
    if (!job->rank(rank).ended()) continue;
    expect(job->rank(rank).error().size() > 20, "rank {} was told: '{}'", rank,
           job->rank(rank).error());
  }
  job.reset();
  expect(eventually([&] { return cluster_->sessions(1) == 0; }, 90s), "sessions are left");
  next_job_works();
}

}  // namespace mk::faults
