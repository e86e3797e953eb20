// The faults that need root: network namespaces, and a small disk of their own.
#include <signal.h>
#include <sys/mount.h>

#include <filesystem>

#include "tests/faults/run.h"

namespace mk::faults {

using namespace std::chrono_literals;

void Run::cut_network() {
  if (!wanted("cut-network") || quick()) return;
  fault_ = "cut-network";
  if (shell("ip netns add mkfprobe && ip netns del mkfprobe") != 0) {
    fmt::print("cut-network: left out, no network namespaces here\n");
    return;
  }
  begin_cluster(begin_folder(), 2, true);
  if (failures_.empty()) cluster_->take_baselines();
  for (std::uint32_t repetition = 0; repetition < seldom() && failures_.empty(); ++repetition) {
    const auto began = Clock::now();
    auto job = running_job();
    const auto at = strike();
    cluster_->cut(true);
    // Nobody says anything: keepalive finds out within 5 s, and the error follows.
    expect_errors(*job, {2, 3}, at, {"peer-lost", "link-down", "unavailable"}, "node 1", 6000);
    expect_errors(*job, {0, 1}, at, {"peer-lost", "link-down", "unavailable"}, "node 0", 6000);
    job.reset();
    pause(500);
    cluster_->cut(false);
    ++cuts_;
    expect(eventually([&] { return cluster_->connected(); }), "healed, they did not meet again");
    next_job_works();
    ++tallies_[fault_].repetitions;
    // Links that were made anew hold what the old ones held.
    settle();
    fmt::print("cut-network {}: {:.1f} s\n", repetition + 1,
               std::chrono::duration<double>(Clock::now() - began).count());
    std::fflush(stdout);
  }
  cluster_.reset();
}

void Run::disk_full() {
  if (!wanted("disk-full") || quick()) return;
  fault_ = "disk-full";
  const std::string folder = begin_folder(true);
  if (folder.empty()) {
    fmt::print("disk-full: left out, no tmpfs of its own here\n");
    return;
  }
  begin_cluster(folder, 2, false);
  if (failures_.empty()) cluster_->take_baselines();
  for (std::uint32_t repetition = 0; repetition < seldom() && failures_.empty(); ++repetition) {
    shell("dd if=/dev/zero of=" + folder + "/filler bs=4k count=1000");
    const bool full = shell("dd if=/dev/zero of=" + folder + "/more bs=4k count=1") != 0;
    expect(full, "the disk is not full");
    auto job = running_job();
    const auto at = kill(job->rank(0));
    expect_errors(*job, {0}, at, {"peer-lost"}, "rank 0");
    job.reset();
    next_job_works();
    shell("rm -f " + folder + "/filler " + folder + "/more");
    ++tallies_[fault_].repetitions;
    settle();
  }
  cluster_.reset();
  ::umount(folder.c_str());
}

}  // namespace mk::faults
