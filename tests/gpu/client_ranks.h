/// \file
/// A rank of a job on a GPU through libmkclient: launches, or replays of a captured one, whose
/// every element is judged in float64. Inputs are drawn anew for each launch and outputs poisoned.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "client/src/session_impl.h"
#include "kernels/ops/registry.h"
#include "mkernel/mkernel.h"
#include "shm/atomic.h"
#include "tests/gpu/gemm_reference.h"

namespace mk {

/// How a rank launches.
enum class Pace {
  kOneByOne,  ///< each judged before the next, with changing m
  kReplayed,  ///< one launch, captured into a graph and replayed; each replay judged
  kInARow,    ///< without a pause, with changing m; each `kRow`-th judged
  kHeldUp,    ///< once, without the last rank: the others wait for it inside the launch
  kLate,      ///< once, judged; the last rank comes when `meanwhile` lets it
};
inline constexpr std::uint32_t kRow = 100;

/// What all ranks do.
struct Work {
  std::string op = "gemm-ar";  ///< or several, with commas; client_ring.h has "ring" and its like,
                               ///< client_moe.h "moe", client_combine.h "combine",
                               ///< client_unlike.h "unlike"
  std::uint32_t m = 640, n = 512, k = 320;
  std::uint32_t launches = 6;
  std::uint64_t seed = 1;
  Pace pace = Pace::kOneByOne;
  bool own_workspace = false;  ///< Tuning's, of a product
  /// Called when a launch is under way; kHeldUp: when it waits.
  std::function<void()> under_way = {};
  /// kLate: called by the last rank before it launches, by the others when they have.
  std::function<void(const Session&)> meanwhile = {};
};

/// The GPU of a rank: ranks are dealt out to all there are.
int device_of(std::uint32_t rank);

/// One rank's buffers; A and B of all ranks, which it draws itself to judge by.
class RankMatrices {
 public:
  RankMatrices(const Work& work, const AttachOptions& at) : work_(work), at_(at) {
    for (std::uint32_t rank = 0; rank < at.world; ++rank) {
      a_.emplace_back(std::size_t{work.m} * work.k * 2);
      b_.emplace_back(std::size_t{work.n} * work.k * 2);
    }
  }
  /// Fresh inputs of all ranks, and NaN into the output.
  void draw(std::uint64_t launch, cudaStream_t stream);
  const void* a() const { return a_[at_.rank].data(); }
  const void* b() const { return b_[at_.rank].data(); }
  void* c() const { return c_.data(); }
  /// Rows that a launch has at least.
  std::uint32_t least() const { return 1; }
  template <class Operator>
  Status launch(Operator& op, cudaStream_t stream, std::uint32_t m) const {
    return op.launch_on(stream, a(), b(), c(), m);
  }

  /// Elements of this rank's result of a launch with m that are wrong.
  std::int64_t bad(std::uint32_t m, cudaStream_t stream) const;

 private:
  const Work work_;
  const AttachOptions at_;
  std::vector<test::DeviceMemory> a_, b_;
  test::DeviceMemory c_{std::size_t{work_.m} * work_.n * 2};
};

/// Launches begun plus launches ended, as the rank's daemon sees them.
inline std::uint64_t launches_seen(const Session& session) {
  return shm::load_acquire(&session.impl()->segment().header().launches);
}
template <class Operator>
Result<Operator> create(Session& session, const Work& work,
                        std::chrono::seconds wait_timeout = std::chrono::seconds(8),
                        std::uint32_t compute_sms = 0) {
  typename Operator::Shape shape;
  shape.m_max = work.m;
  shape.n = work.n;
  shape.k = work.k;
  shape.b_layout = BLayout::kNK;
  Tuning tuning;
  tuning.executor = Executor::kCuda;
  tuning.wait_timeout = wait_timeout;
  tuning.compute_sms = compute_sms;
  tuning.own_workspace = work.own_workspace;
  return Operator::create(session, shape, tuning);
}

/// The work as a rank of a job, from attach to detach; what went wrong, or nothing.
std::string run_rank(const AttachOptions& at, const Work& work);

}  // namespace mk
