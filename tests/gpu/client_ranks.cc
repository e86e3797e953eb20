#include "tests/gpu/client_ranks.h"

#include <fmt/format.h>

#include <sstream>

#include "tests/gpu/summed_reference.h"

namespace mk {
namespace {

constexpr auto kType = kernels::cuda::DType::kBf16;

}  // namespace

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

/// Launches of one operator with changing m; what went wrong, or nothing.
template <class Operator>
std::string launch_all(Session& session, Operator& op, const Work& work) {
  const AttachOptions& at = session.options();
  cudaStream_t stream = nullptr;
  test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  RankMatrices matrices(work, at);
  // CUDA loads a kernel at its first launch, for which it may wait for the device to be idle.
  matrices.draw(0, stream);
  (void)matrices.bad(work.m, stream);
  test::require(cudaStreamSynchronize(stream), "warm-up");
  const std::uint64_t before = launches_seen(session);
  for (std::uint32_t launch = 0; launch < work.launches; ++launch) {
    const std::uint32_t m = launch == 0 ? work.m : 1 + (launch * 7919u) % work.m;
    matrices.draw(launch, stream);
    test::require(cudaStreamSynchronize(stream), "inputs");
    MK_TRY_STEP(session.barrier(), "barrier");
    MK_TRY_STEP(op.launch_on(stream, matrices.a(), matrices.b(), matrices.c(), m), "launch");
    MK_TRY_STEP(op.finish(stream), fmt::format("launch {} with m {}", launch, m));
    MK_TRY_STEP(op.status(), "status");
    MK_TRY_STEP(session.barrier(), "barrier");
    const std::int64_t bad = matrices.bad(m, stream);
    if (bad != 0) return fmt::format("rank {}, launch {}, m {}: {} wrong", at.rank, launch, m, bad);
    const std::uint64_t seen = launches_seen(session) - before;
    if (seen != (launch + 1) * launch_counts(at))
      return fmt::format("rank {}, launch {}: the daemon sees {}", at.rank, launch, seen);
  }
  MK_TRY_STEP(session.barrier(), "barrier");
  cudaStreamDestroy(stream);
  return {};
}

/// Captures one launch into a graph and replays it with new inputs; what went wrong, or nothing.
template <class Operator>
std::string replay_all(Session& session, Operator& op, const Work& work) {
  const AttachOptions& at = session.options();
  cudaStream_t stream = nullptr;
  test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  RankMatrices matrices(work, at);
  matrices.draw(0, stream);
  (void)matrices.bad(work.m, stream);
  test::require(cudaStreamSynchronize(stream), "warm-up");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  test::require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const Status captured = op.launch_on(stream, matrices.a(), matrices.b(), matrices.c(), work.m);
  test::require(cudaStreamEndCapture(stream, &graph), "end of capture");
  MK_TRY_STEP(captured, "launch into a graph");
  test::require(cudaGraphInstantiate(&replay, graph, 0), "graph");
  test::require(cudaGraphUpload(replay, stream), "graph");
  const std::uint64_t before = launches_seen(session);
  for (std::uint32_t launch = 0; launch < work.launches; ++launch) {
    matrices.draw(launch, stream);
    test::require(cudaStreamSynchronize(stream), "inputs");
    MK_TRY_STEP(session.barrier(), "barrier");
    test::require(cudaGraphLaunch(replay, stream), "replay");
    auto stats = op.finish(stream);
    MK_TRY_STEP(stats, fmt::format("replay {}", launch));
    MK_TRY_STEP(session.barrier(), "barrier");
    const std::int64_t bad = matrices.bad(work.m, stream);
    const std::uint64_t seen = launches_seen(session) - before;
    if (bad != 0 || stats->epoch != launch + 1 || seen != (launch + 1) * launch_counts(at)) {
      return fmt::format("rank {}, replay {}: {} wrong, epoch {}, the daemon sees {}", at.rank,
                         launch, bad, stats->epoch, seen);
    }
  }
  MK_TRY_STEP(session.barrier(), "barrier");
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return {};
}

template <class Operator>
std::string create_and_launch(Session& session, const Work& work) {
  auto op = create<Operator>(session, work);
  if (!op) return fmt::format("rank {}: create: {}", session.options().rank, op.error().message);
  return work.replays ? replay_all(session, *op, work) : launch_all(session, *op, work);
}

}  // namespace

std::string run_rank(const AttachOptions& at, const Work& work) {
  test::require(cudaSetDevice(0), "device");
  auto session = Session::attach(at);
  if (!session) return fmt::format("rank {}: attach: {}", at.rank, session.error().message);
  std::istringstream ops(work.op);
  std::string op;
  while (std::getline(ops, op, ',')) {
    Work one = work;
    one.op = op;
    const std::string wrong = op == "ag-gemm" ? create_and_launch<AllGatherGemm>(*session, one)
                              : op == "gemm-rs"
                                  ? create_and_launch<GemmReduceScatter>(*session, one)
                                  : create_and_launch<GemmAllReduce>(*session, one);
    if (!wrong.empty()) return fmt::format("{}: {}", op, wrong);
  }
  if (const Status left = session->detach(); !left) return left.error().message;
  return {};
}

}  // namespace mk
