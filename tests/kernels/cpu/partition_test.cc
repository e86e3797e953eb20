// An adaptive partition without threads: the decision over small spaces, the protocol in every
// order and with stale words, and whole launches in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "kernels/comm/partition.h"
#include "kernels/cpu/partition_board.h"
#include "shm/host/segment.h"

namespace mk::kernels {
namespace {

// The split that ends both kinds of work soonest, by trying all: workers are divisible.
double best_split(std::uint32_t workers, double compute, double communicate) {
  double best = 0;
  double soonest = std::numeric_limits<double>::infinity();
  for (std::uint32_t i = 1; i < 1000; ++i) {
    const double others = workers * i / 1000.0;
    const double end = std::max(compute / (workers - others), communicate / others);
    if (end < soonest) {
      soonest = end;
      best = others;
    }
  }
  return best;
}

TEST(PartitionDecision, EndsBothKindsOfWorkAtOneTime) {
  for (const std::uint32_t workers : {2u, 5u, 132u}) {
    for (const std::uint64_t tiles : {1u, 7u, 100u}) {
      for (const std::uint64_t chunks : {1u, 9u, 64u}) {
        for (const double cost : {0.1, 1.0, 8.0}) {
          const double found = balanced_workers(workers, {tiles, chunks}, {1.0, cost});
          const double wanted =
              best_split(workers, static_cast<double>(tiles), static_cast<double>(chunks) * cost);
          EXPECT_NEAR(found, wanted, workers / 900.0) << tiles << " " << chunks << " " << cost;
        }
      }
    }
  }
}

TEST(PartitionDecision, StaysInItsBoundsAndAtRest) {
  for (std::uint32_t workers = 1; workers <= 9; ++workers) {
    for (std::uint32_t start = 0; start <= 12; ++start) {
      for (std::uint64_t compute_ns : {1u, 10u, 100u, 1000u}) {
        for (std::uint64_t other_ns : {1u, 10u, 100u, 1000u}) {
          PartitionController controller;
          constexpr std::uint64_t kTasks = 40;
          controller.begin(workers, start, {kTasks, kTasks});
          WorkDone done;
          std::uint32_t before = controller.target();
          for (std::uint64_t i = 1; i <= kTasks; ++i) {
            done.tasks[0] = done.tasks[1] = i;
            done.ns[0] = i * compute_ns;
            done.ns[1] = i * other_ns;
            const std::uint64_t left = kTasks - i;
            const std::uint32_t target = controller.look(done, {left, left});
            ASSERT_LE(target, workers);
            if (left == 0) {
              EXPECT_EQ(target, 0u) << "nothing is left to communicate";
            } else if (workers > 1) {
              ASSERT_GE(target, 1u);
              ASSERT_LT(target, workers);
              // As much of both is left all the time: it moves once, at the first look.
              if (i > 1) {
                ASSERT_EQ(target, before) << "look " << i;
              }
            }
            before = target;
          }
        }
      }
    }
  }
}

TEST(PartitionDecision, NoiseOfATenthMovesNothing) {
  std::mt19937_64 random(1);
  for (const std::uint32_t workers : {4u, 16u, 132u}) {
    PartitionController controller;
    constexpr std::uint64_t kTasks = 2000;
    controller.begin(workers, 1, {kTasks, kTasks});
    WorkDone done;
    std::uint32_t moves = 0;
    std::uint32_t before = 0;
    for (std::uint64_t i = 1; i < kTasks; ++i) {
      for (std::uint32_t work = 0; work < kWorks; ++work) {
        ++done.tasks[work];
        done.ns[work] += 900 + random() % 200;
      }
      const std::uint32_t target = controller.look(done, {kTasks - i, kTasks - i});
      if (i > 16) moves += target != before ? 1 : 0;
      before = target;
    }
    EXPECT_LE(moves, 2u) << workers << " workers";
  }
}

TEST(PartitionDecision, ALaterLaunchStartsFromWhatWasLearned) {
  PartitionController controller;
  controller.begin(8, 1, {100, 100});
  EXPECT_EQ(controller.target(), 1u);
  controller.look({{10, 10}, {1000, 3000}}, {90, 90});
  EXPECT_EQ(controller.target(), 6u);
  controller.begin(8, 1, {100, 100});
  EXPECT_EQ(controller.target(), 6u);
  controller.begin(8, 1, {100, 0});
  EXPECT_EQ(controller.target(), 0u);
}

// --- Launches in virtual time ---

/// Chunk c may be summed when its part of the tiles is done (`sums`: as in GEMM+AllReduce). Or tile
/// t needs its part of the chunks (AllGather+GEMM).
struct LaunchShape {
  std::uint32_t tiles = 0, chunks = 0;
  double tile_ns = 0, chunk_ns = 0;
  bool sums = true;
  /// When this part of the tiles is done, a chunk costs so much more: as over a link with other
  /// load.
  double disturbed_at = 2, disturbance = 1;
};

class VirtualLaunch {
 public:
  VirtualLaunch(const LaunchShape& shape, std::uint32_t workers)
      : shape_(shape), free_at_(workers, 0) {}

  /// Each worker keeps its role: the first `others` communicate. Answers when all is done.
  double run_static(std::uint32_t others) {
    std::uint32_t taken[kWorks] = {};
    return run_all([&](std::uint32_t worker) {
      const Work work = worker < others ? Work::kCommunicate : Work::kCompute;
      std::uint32_t& next = taken[static_cast<std::uint32_t>(work)];
      if (next == count(work)) return WorkerStep::kEnd;
      if (ready_at(work, next) == kNever) {
        spent_ = kParked;
        return WorkerStep::kRan;
      }
      run(work, next++);
      return WorkerStep::kRan;
    });
  }
  template <class Board>
  double run_adaptive(Board& board, std::uint32_t start) {
    board.begin(start, shape_.tiles, shape_.chunks, 0);
    return run_all([&](std::uint32_t worker) { return take_task(board, worker, *this); });
  }
  double best_static(std::uint32_t* others) {
    double best = kNever;
    for (std::uint32_t i = 1; i < free_at_.size(); ++i) {
      const double end = run_static(i);
      if (end >= best) continue;
      best = end;
      *others = i;
    }
    return best;
  }

  // As take_task wants it.
  bool ready(Work work, std::uint32_t task) const { return ready_at(work, task) <= now_; }
  bool run(Work work, std::uint32_t task) {
    const double ready = ready_at(work, task);
    EXPECT_LT(ready, kNever) << "it waits for what nobody has begun";
    const bool disturbed = tiles_done_ >= shape_.disturbed_at * shape_.tiles;
    const double cost = work == Work::kCompute
                            ? shape_.tile_ns
                            : shape_.chunk_ns * (disturbed ? shape_.disturbance : 1);
    spent_ = std::max(0.0, ready - now_) + cost;
    // Workers that wait look again.
    std::replace(free_at_.begin(), free_at_.end(), kParked, now_);
    const auto kind = static_cast<std::uint32_t>(work);
    end_[kind][task] = now_ + spent_;
    for (std::size_t next = first_[kind].size(); next <= end_[kind].size(); ++next) {
      if (end_[kind][next - 1] == kNever) break;
      first_[kind].push_back(std::max(first_[kind].back(), end_[kind][next - 1]));
    }
    last_ = std::max(last_, now_ + spent_);
    tiles_done_ += work == Work::kCompute ? 1 : 0;
    ++times_done_[(work == Work::kCompute ? 0 : shape_.tiles) + task];
    return true;
  }
  std::uint64_t now_ns() const { return static_cast<std::uint64_t>(now_ + spent_); }
  bool each_once() const {
    return std::all_of(times_done_.begin(), times_done_.end(),
                       [](std::uint32_t times) { return times == 1; });
  }

 private:
  static constexpr double kNever = 1e300;
  static constexpr double kParked = 1e200;

  std::uint32_t count(Work work) const {
    return work == Work::kCompute ? shape_.tiles : shape_.chunks;
  }
  double ready_at(Work work, std::uint32_t task) const {
    if ((work == Work::kCommunicate) != shape_.sums) return 0;
    const std::uint32_t other = work == Work::kCompute ? 1 : 0;
    const std::uint64_t needed = (std::uint64_t{task} + 1) * end_[other].size() / count(work);
    return needed < first_[other].size() ? first_[other][needed] : kNever;
  }
  template <class Step>
  double run_all(Step&& step) {
    std::fill(free_at_.begin(), free_at_.end(), 0);
    end_[0].assign(shape_.tiles, kNever);
    end_[1].assign(shape_.chunks, kNever);
    for (auto& first : first_) first.assign(1, 0);
    times_done_.assign(shape_.tiles + shape_.chunks, 0);
    tiles_done_ = 0;
    last_ = 0;
    for (;;) {
      const auto next = std::min_element(free_at_.begin(), free_at_.end());
      if (*next >= kParked) return *next == kNever ? last_ : kNever;
      now_ = *next;
      spent_ = 0;
      const auto worker = static_cast<std::uint32_t>(next - free_at_.begin());
      const bool ran = step(worker) == WorkerStep::kRan;
      *next = !ran ? kNever : spent_ == kParked ? kParked : now_ + spent_;
    }
  }

  const LaunchShape shape_;
  std::vector<double> free_at_;
  std::vector<double> end_[kWorks];
  std::vector<double> first_[kWorks];  ///< [n]: when the first n have ended, as far as it is known
  std::vector<std::uint32_t> times_done_;
  std::uint32_t tiles_done_ = 0;
  double now_ = 0;
  double spent_ = 0;
  double last_ = 0;
};

std::vector<LaunchShape> shapes() {
  std::vector<LaunchShape> all;
  for (const bool sums : {true, false}) {
    for (const std::uint32_t tiles : {96u, 500u}) {
      for (const std::uint32_t chunks : {48u, 250u}) {
        for (const double share : {0.05, 0.2, 0.5, 1.5}) {
          // A share of the time that all tiles take.
          const double chunk_ns = 20'000.0 * tiles * share / chunks;
          all.push_back({tiles, chunks, 20'000, chunk_ns, sums});
        }
      }
    }
  }
  return all;
}

TEST(PartitionInVirtualTime, IsAsGoodAsTheBestSplitAlsoFromAWrongStart) {
  double log_sum[3] = {};
  int cases = 0;
  for (const std::uint32_t workers : {4u, 16u, 48u}) {
    for (const LaunchShape& shape : shapes()) {
      VirtualLaunch launch(shape, workers);
      std::uint32_t best_others = 1;
      const double best = launch.best_static(&best_others);
      const std::uint32_t starts[] = {best_others, std::max(1u, best_others / 4),
                                      std::min(workers - 1, best_others * 4)};
      for (int i = 0; i < 3; ++i) {
        PartitionBoard board(workers);
        const double end = launch.run_adaptive(board, starts[i]);
        ASSERT_TRUE(launch.each_once());
        EXPECT_LE(end, 1.10 * best) << workers << " workers, " << shape.tiles << " tiles, "
                                    << shape.chunks << " chunks, start " << starts[i] << ", best "
                                    << best_others << (shape.sums ? ", sums" : ", shares");
        log_sum[i] += std::log(end / best);
      }
      ++cases;
    }
  }
  EXPECT_LE(std::exp(log_sum[0] / cases), 1.03);
  EXPECT_LE(std::exp(log_sum[1] / cases), 1.10);
  EXPECT_LE(std::exp(log_sum[2] / cases), 1.10);
}

// A chunk costs five times as much from a fifth of the tiles on, which no plan knows.
TEST(PartitionInVirtualTime, FollowsADisturbance) {
  int matters = 0;
  for (const std::uint32_t workers : {4u, 16u, 48u}) {
    for (LaunchShape shape : shapes()) {
      std::uint32_t planned_others = 1;
      VirtualLaunch(shape, workers).best_static(&planned_others);
      shape.disturbed_at = 0.2;
      shape.disturbance = 5;
      VirtualLaunch launch(shape, workers);
      const double planned = launch.run_static(planned_others);
      std::uint32_t best_others = 1;
      const double best = launch.best_static(&best_others);
      PartitionBoard board(workers);
      const double adaptive = launch.run_adaptive(board, planned_others);
      if (planned >= 1.15 * best) {
        ++matters;
        EXPECT_GE(planned, 1.1 * adaptive) << workers << " workers, " << shape.tiles << " tiles";
      } else {
        EXPECT_LE(adaptive, 1.03 * planned) << workers << " workers, " << shape.tiles << " tiles";
      }
    }
  }
  EXPECT_GT(matters, 20);
}

// --- The protocol ---

/// Every worker sees another target each time, none of them the one that was published.
class StaleBoard : public PartitionBoard {
 public:
  StaleBoard(std::uint32_t workers, std::uint64_t seed) : PartitionBoard(workers), random_(seed) {}
  Work preferred(std::uint32_t /*worker*/) {
    return random_() % 2 == 0 ? Work::kCompute : Work::kCommunicate;
  }

 private:
  std::mt19937_64 random_;
};

TEST(PartitionProtocol, AStaleTargetIsOnlySlower) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 random(seed);
    const auto draw = [&](std::uint32_t most) {
      return static_cast<std::uint32_t>(1 + random() % most);
    };
    const std::uint32_t workers = draw(6);
    const LaunchShape shape{draw(20), draw(20), static_cast<double>(draw(50)),
                            static_cast<double>(draw(50)), seed % 2 == 0};
    VirtualLaunch launch(shape, workers);
    StaleBoard board(workers, seed);
    launch.run_adaptive(board, draw(6));
    ASSERT_TRUE(launch.each_once()) << "seed " << seed;
  }
}

/// Tasks of real threads. A chunk waits for all tiles up to its own.
struct CountedTasks {
  std::vector<std::uint32_t>& tiles;
  std::vector<std::uint32_t>& chunks;

  bool ready(Work work, std::uint32_t task) const {
    return work == Work::kCompute || shm::load_acquire(&tiles[task]) != 0;
  }
  bool run(Work work, std::uint32_t task) {
    while (!ready(work, task)) std::this_thread::yield();
    shm::fetch_add(work == Work::kCompute ? &tiles[task] : &chunks[task], 1u);
    return true;
  }
  static std::uint64_t now_ns() { return shm::monotonic_ns(); }
};

TEST(PartitionProtocol, ThreadsDoEachTaskOnce) {
  PartitionBoard board(4);
  for (int launch = 0; launch < 200; ++launch) {
    std::vector<std::uint32_t> tiles(64, 0);
    std::vector<std::uint32_t> chunks(64, 0);
    board.begin(static_cast<std::uint32_t>(launch) % 5, tiles.size(), chunks.size(), 0);
    std::vector<std::thread> threads;
    for (std::uint32_t worker = 0; worker < board.workers(); ++worker) {
      threads.emplace_back([&, worker] {
        CountedTasks tasks{tiles, chunks};
        while (take_task(board, worker, tasks) == WorkerStep::kRan) {
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(tiles, std::vector<std::uint32_t>(64, 1));
    ASSERT_EQ(chunks, std::vector<std::uint32_t>(64, 1));
    EXPECT_FALSE(board.steps().empty());
  }
}

TEST(PartitionProtocol, AFailureEndsAWorker) {
  struct Failing {
    bool ready(Work, std::uint32_t) const { return true; }
    bool run(Work, std::uint32_t task) const { return task != 3; }
    static std::uint64_t now_ns() { return 1; }
  } tasks;
  PartitionBoard board(1);
  board.begin(0, 10, 0, 0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(take_task(board, 0, tasks), WorkerStep::kRan);
  EXPECT_EQ(take_task(board, 0, tasks), WorkerStep::kFailed);
}

}  // namespace
}  // namespace mk::kernels
