#include "tests/gpu/client_ranks.h"

#include <fmt/format.h>

#include <chrono>
#include <sstream>
#include <thread>

#include "tests/gpu/client_collectives.h"
#include "tests/gpu/client_combine.h"
#include "tests/gpu/client_moe.h"
#include "tests/gpu/client_ring.h"
#include "tests/gpu/client_unlike.h"
#include "tests/gpu/graphs.h"
#include "tests/gpu/summed_reference.h"

namespace mk {
namespace {

constexpr auto kType = kernels::cuda::DType::kBf16;

}  // namespace

int device_of(std::uint32_t rank) {
  int devices = 0;
  test::require(cudaGetDeviceCount(&devices), "devices");
  return static_cast<int>(rank) % devices;
}

void RankMatrices::draw(std::uint64_t launch, cudaStream_t stream) {
  for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
    const std::uint64_t seed = work_.seed * 1000 + launch * 64 + 2 * rank;
    test::fill_normal(a_[rank].data(), kType, std::int64_t{work_.m} * work_.k, seed, stream);
    test::fill_normal(b_[rank].data(), kType, std::int64_t{work_.n} * work_.k, seed + 1, stream);
  }
  test::poison(c_.data(), std::int64_t{work_.m} * work_.n, stream);
}

std::int64_t RankMatrices::bad(std::uint32_t m, cudaStream_t stream) const {
  const auto rows = [](const test::DeviceMemory& matrix, std::uint64_t row, std::uint32_t columns) {
    return static_cast<const std::byte*>(matrix.data()) + row * columns * 2;
  };
  test::SummedProduct product;
  product.n = static_cast<int>(work_.n);
  if (work_.op == "ag-gemm") {
    std::int64_t bad = 0;
    for (std::uint32_t origin = 0; origin < at_.world; ++origin) {
      const RowRange shard = rows_of_rank(m, at_.world, origin);
      if (shard.count == 0) continue;
      product.m = static_cast<int>(shard.count);
      product.k[0] = static_cast<int>(work_.k);
      product.a[0] = a_[origin].data();
      product.b[0] = b();
      bad += test::judge_sum(product, rows(c_, shard.first, work_.n), static_cast<int>(work_.n),
                             stream)
                 .bad;
    }
    return bad;
  }
  const RowRange own =
      work_.op == "gemm-rs" ? rows_of_rank(m, at_.world, at_.rank) : RowRange{0, m};
  if (own.count == 0) return 0;
  product.m = static_cast<int>(own.count);
  product.nodes = static_cast<int>(at_.nodes);
  product.locals = static_cast<int>(at_.local_size);
  for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
    product.k[rank] = static_cast<int>(work_.k);
    product.a[rank] = rows(a_[rank], own.first, work_.k);
    product.b[rank] = b_[rank].data();
  }
  return test::judge_sum(product, c_.data(), static_cast<int>(work_.n), stream).bad;
}

namespace {

#define MK_TRY_STEP(step, name)                                                          \
  if (const auto& step_result = (step); !step_result)                                    \
  return fmt::format("rank {}, {}: {} ({})", at.rank, name, step_result.error().message, \
                     error_code_name(step_result.error().code))

/// What each launch adds to it. One rank alone has nobody to wait for, and says nothing.
std::uint64_t launch_counts(const AttachOptions& at) { return at.world == 1 ? 0 : 2; }

/// What every pace begins with: a stream, inputs and outputs (RankMatrices, RankSequences), and
/// kernels that are loaded.
template <class Tensors>
class Lane {
 public:
  Lane(Session& session, const Work& work)
      : session_(session), work_(work), tensors_(work, session.options()) {
    test::require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    // CUDA loads a kernel at its first launch, for which it may wait for the device to be idle.
    tensors_.draw(0, stream_);
    (void)tensors_.bad(work.m, stream_);
    test::require(cudaStreamSynchronize(stream_), "warm-up");
    seen_before_ = launches_seen(session);
  }
  ~Lane() { cudaStreamDestroy(stream_); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  cudaStream_t stream() const { return stream_; }
  const Tensors& tensors() const { return tensors_; }
  /// Of launch `number`: the first is of the largest.
  std::uint32_t m_of(std::uint32_t number) const {
    return number == 0 ? work_.m
                       : tensors_.least() + (number * 7919u) % (work_.m - tensors_.least() + 1);
  }
  template <class Operator>
  Status launch(Operator& op, std::uint32_t m) const {
    return tensors_.launch(op, stream_, m);
  }
  /// New inputs for launch `number`, of all ranks: a rank that returns may launch.
  Status draw(std::uint32_t number) {
    tensors_.draw(number, stream_);
    test::require(cudaStreamSynchronize(stream_), "inputs");
    return session_.barrier();
  }
  /// What is wrong after `launches` launches, the last one with m; or nothing.
  std::string judge(std::uint32_t launches, std::uint32_t m) const {
    const AttachOptions& at = session_.options();
    // The last launch has ended everywhere.
    MK_TRY_STEP(session_.barrier(), "barrier");
    const std::int64_t bad = tensors_.bad(m, stream_);
    if (bad != 0)
      return fmt::format("rank {}, launch {}, m {}: {} wrong", at.rank, launches, m, bad);
    const std::uint64_t seen = launches_seen(session_) - seen_before_;
    if (seen == launches * launch_counts(at)) return {};
    return fmt::format("rank {}, launch {}: the daemon sees {}", at.rank, launches, seen);
  }

 private:
  Session& session_;
  const Work& work_;
  cudaStream_t stream_ = nullptr;
  Tensors tensors_;
  std::uint64_t seen_before_ = 0;
};

// Each answers what went wrong, or nothing.

template <class Operator, class Tensors>
std::string launch_one_by_one(Lane<Tensors>& lane, const AttachOptions& at, Operator& op,
                              const Work& work) {
  for (std::uint32_t launch = 0; launch < work.launches; ++launch) {
    const std::uint32_t m = lane.m_of(launch);
    MK_TRY_STEP(lane.draw(launch), "inputs");
    MK_TRY_STEP(lane.launch(op, m), "launch");
    MK_TRY_STEP(op.finish(lane.stream()), fmt::format("launch {} with m {}", launch, m));
    MK_TRY_STEP(op.status(), "status");
    if (auto wrong = lane.judge(launch + 1, m); !wrong.empty()) return wrong;
  }
  return {};
}

template <class Operator, class Tensors>
std::string replay(Lane<Tensors>& lane, const AttachOptions& at, Operator& op, const Work& work) {
  test::Graphs graphs;
  const Status captured = graphs.capture(lane.stream(), [&] { return lane.launch(op, work.m); });
  MK_TRY_STEP(captured, "launch into a graph");
  std::string wrong;
  for (std::uint32_t launch = 0; wrong.empty() && launch < work.launches; ++launch) {
    MK_TRY_STEP(lane.draw(launch), "inputs");
    graphs.replay(0, lane.stream());
    const auto stats = op.finish(lane.stream());
    MK_TRY_STEP(stats, fmt::format("replay {}", launch));
    wrong = lane.judge(launch + 1, work.m);
    if (wrong.empty() && stats->epoch != launch + 1)
      wrong = fmt::format("rank {}, replay {}: epoch {}", at.rank, launch, stats->epoch);
  }
  return wrong;
}

template <class Operator, class Tensors>
std::string launch_in_a_row(Lane<Tensors>& lane, const AttachOptions& at, Operator& op,
                            const Work& work) {
  for (std::uint32_t launch = 0; launch < work.launches;) {
    MK_TRY_STEP(lane.draw(launch / kRow), "inputs");
    std::uint32_t m = 0;
    for (std::uint32_t i = 0; i < kRow && launch < work.launches; ++i, ++launch) {
      m = lane.m_of(launch);
      MK_TRY_STEP(lane.launch(op, m), "launch");
    }
    if (work.under_way && launch == kRow) work.under_way();
    MK_TRY_STEP(op.finish(lane.stream()), fmt::format("launches to {}", launch));
    if (auto wrong = lane.judge(launch, m); !wrong.empty()) return wrong;
  }
  return {};
}

template <class Operator, class Tensors>
std::string launch_held_up(Session& session, Lane<Tensors>& lane, const AttachOptions& at,
                           Operator& op, const Work& work) {
  const bool last = at.rank + 1 == at.world;
  MK_TRY_STEP(lane.draw(0), "inputs");
  if (!last) {
    const std::uint64_t before = launches_seen(session);
    MK_TRY_STEP(lane.launch(op, work.m), "launch");
    const auto begin = std::chrono::steady_clock::now();
    while (launches_seen(session) == before &&
           std::chrono::steady_clock::now() < begin + std::chrono::seconds(20))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  work.under_way();
  // The last rank waits for the others, too, but in its process.
  if (last) {
    MK_TRY_STEP(session.barrier(), "barrier");
  }
  MK_TRY_STEP(op.finish(lane.stream()), "the launch that waits");
  return "nothing held it up";
}

template <class Operator, class Tensors>
std::string launch_late(Session& session, Lane<Tensors>& lane, const AttachOptions& at,
                        Operator& op, const Work& work) {
  const bool last = at.rank + 1 == at.world;
  MK_TRY_STEP(lane.draw(0), "inputs");
  if (last) work.meanwhile(session);
  MK_TRY_STEP(lane.launch(op, work.m), "launch");
  if (!last) work.meanwhile(session);
  MK_TRY_STEP(op.finish(lane.stream()), "the launch");
  return lane.judge(1, work.m);
}

/// `create(lane)` makes the operator.
template <class Tensors, class Create>
std::string create_and_launch(Session& session, const Work& work, Create&& create) {
  Lane<Tensors> lane(session, work);
  auto op = create(lane);
  if (!op) return fmt::format("rank {}: create: {}", session.options().rank, op.error().message);
  const AttachOptions& at = session.options();
  const auto run = [&] {
    switch (work.pace) {
      case Pace::kReplayed:
        return replay(lane, at, *op, work);
      case Pace::kInARow:
        return launch_in_a_row(lane, at, *op, work);
      case Pace::kHeldUp:
        return launch_held_up(session, lane, at, *op, work);
      case Pace::kLate:
        return launch_late(session, lane, at, *op, work);
      default:
        return launch_one_by_one(lane, at, *op, work);
    }
  };
  if (auto wrong = run(); !wrong.empty()) return wrong;
  MK_TRY_STEP(session.barrier(), "barrier");
  return {};
}

template <class Operator>
std::string multiply(Session& session, const Work& work) {
  return create_and_launch<RankMatrices>(
      session, work, [&](const auto&) { return create<Operator>(session, work); });
}
std::string attend(Session& session, const Work& work) {
  return create_and_launch<RankSequences>(
      session, work, [&](const auto& lane) { return create_ring(session, lane.tensors()); });
}
std::string dispatch(Session& session, const Work& work) {
  return create_and_launch<RankTokens>(
      session, work, [&](const auto& lane) { return create_moe(session, lane.tensors()); });
}
template <class Op>
std::string carry(Session& session, const Work& work) {
  return create_and_launch<RankParts<Op>>(
      session, work, [&](const auto&) { return create_collective<Op>(session, work); });
}
std::string combine(Session& session, const Work& work) {
  return create_and_launch<RankRows>(
      session, work, [&](const auto& lane) { return create_combine(session, lane.tensors()); });
}

}  // namespace

std::string run_rank(const AttachOptions& at, const Work& work) {
  test::require(cudaSetDevice(device_of(at.rank)), "device");
  auto session = Session::attach(at);
  if (!session) return fmt::format("rank {}: attach: {}", at.rank, session.error().message);
  std::istringstream ops(work.op);
  std::string op;
  while (std::getline(ops, op, ',')) {
    Work one = work;
    one.op = op;
#define MK_CARRY(id, name, Class) op == name ? carry<Class>(*session, one):
    const std::string wrong = MK_COLLECTIVES(MK_CARRY) op == "ag-gemm"
                                  ? multiply<AllGatherGemm>(*session, one)
                              : op == "gemm-rs"        ? multiply<GemmReduceScatter>(*session, one)
                              : op.starts_with("moe")  ? dispatch(*session, one)
                              : op == "combine"        ? combine(*session, one)
                              : op == "unlike"         ? launch_unlike(*session, one)
                              : op.starts_with("ring") ? attend(*session, one)
                                                       : multiply<GemmAllReduce>(*session, one);
#undef MK_CARRY
    if (!wrong.empty()) return fmt::format("{}: {}", op, wrong);
  }
  if (const Status left = session->detach(); !left) return left.error().message;
  return {};
}

}  // namespace mk
