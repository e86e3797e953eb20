/// \file
/// Two real daemons, a healthy job on them that never stops checking its own results, and what the
/// daemons hold; for clients that misbehave.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "tests/multiprocess/cluster.h"

namespace mk::test {

/// What a process holds of the system.
struct Holdings {
  std::size_t descriptors = 0;
  std::size_t memory_files = 0;  ///< of the descriptors, memfds
  std::size_t mapped_files = 0;  ///< mappings of memfds
  std::size_t threads = 0;       ///< but for gRPC's pools

  static Holdings of(pid_t pid);
  friend bool operator==(const Holdings&, const Holdings&) = default;
};
std::ostream& operator<<(std::ostream& out, const Holdings& holdings);

/// A job of one rank per node that launches for ever, each launch with new inputs and every element
/// of its result checked.
class HealthyJob {
 public:
  explicit HealthyJob(const tools::DaemonSet& daemons);
  ~HealthyJob();
  /// Waits until every rank has begun and ended two more launches; fails the test if one reports an
  /// error instead, which is then false.
  bool expect_launches();

 private:
  struct Rank {
    Process process;
    std::thread reader;
    std::atomic<std::uint64_t> launches{0};
    std::mutex mutex;
    std::string error;  ///< under `mutex`

    explicit Rank(Process started) : process(std::move(started)) {}
    std::string trouble() {
      std::lock_guard lock(mutex);
      return error;
    }
  };
  void read(Rank& rank);

  std::vector<std::unique_ptr<Rank>> ranks_;
  std::atomic<bool> stop_{false};
};

/// The daemons and the healthy job live as long as the suite. Every case ends by proving that the
/// daemons are up and hold what they held before, and that the healthy job goes on.
class HostileTest : public testing::Test {
 protected:
  static void SetUpTestSuite();
  static void TearDownTestSuite();
  void SetUp() override;
  void TearDown() override;

  static tools::DaemonSet& daemons() { return *daemons_; }
  static std::string socket(std::uint32_t node = 0) { return daemons_->client_socket(node); }
  /// What `mkctl session list --json` of a node prints.
  static std::string sessions_shown(std::uint32_t node = 0);
  /// Whether mkctl shows, soon, a session of `job` that ended for a reason containing `text`.
  static bool shown_as_failed(const std::string& job, const std::string& text,
                              std::uint32_t node = 0);
  /// Both daemons are up, no stream between them has ever broken, what they show can be read, and
  /// the healthy job goes on.
  static void expect_all_well();
  static std::vector<Holdings> holdings();
  static bool eventually(const std::function<bool()>& done);
  /// Counts hostile inputs of this case: commands, messages, connections, descriptors.
  static void tried(std::uint64_t inputs = 1);

 private:
  /// Of all cases so far, for the file that MK_HOSTILE_JSON names.
  struct Figures {
    std::map<std::string, std::uint64_t> inputs;  ///< by case
    std::uint64_t daemons_lost = 0, healthy_jobs_lost = 0, resources_lost = 0;
    void write() const;
  };
  static Figures figures_;
  static std::unique_ptr<tools::DaemonSet> daemons_;
  static std::unique_ptr<HealthyJob> healthy_;
  static std::vector<Holdings> at_rest_;
  std::vector<Holdings> before_;
};

}  // namespace mk::test
