// libmkclient's operators on a GPU, over daemons: ranks that are threads of one process, and ranks
// that are processes with the daemons in another one. Every element of every rank's result is
// judged in float64; inputs are drawn anew for each launch and outputs poisoned.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <sstream>

#include "mkernel/mkernel.h"
#include "tests/client/embedded_ranks.h"
#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/summed_reference.h"

namespace mk {
namespace {

using test::DeviceMemory;
using test::SummedProduct;

/// What all ranks do.
struct Work {
  std::string op = "gemm-ar";
  std::uint32_t m = 640, n = 512, k = 320;
  std::uint32_t launches = 6;
  std::uint64_t seed = 1;
};

constexpr auto kType = kernels::cuda::DType::kBf16;

/// One rank's buffers; A and B of all ranks, which it draws itself to judge by.
class RankMatrices {
 public:
  RankMatrices(const Work& work, const AttachOptions& at) : work_(work), at_(at) {
    for (std::uint32_t rank = 0; rank < at.world; ++rank) {
      a_.emplace_back(std::size_t{work.m} * work.k * 2);
      b_.emplace_back(std::size_t{work.n} * work.k * 2);
    }
  }
  void draw(std::uint64_t launch, cudaStream_t stream) {
    for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
      const std::uint64_t seed = work_.seed * 1000 + launch * 64 + 2 * rank;
      test::fill_normal(a_[rank].data(), kType, std::int64_t{work_.m} * work_.k, seed, stream);
      test::fill_normal(b_[rank].data(), kType, std::int64_t{work_.n} * work_.k, seed + 1, stream);
    }
    test::poison(c_.data(), std::int64_t{work_.m} * work_.n, stream);
  }
  const void* a() const { return a_[at_.rank].data(); }
  const void* b() const { return b_[at_.rank].data(); }
  void* c() const { return c_.data(); }

  std::int64_t bad(std::uint32_t m, cudaStream_t stream) const {
    const auto rows = [](const DeviceMemory& matrix, std::uint64_t row, std::uint32_t columns) {
      return static_cast<const std::byte*>(matrix.data()) + row * columns * 2;
    };
    SummedProduct product;
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

 private:
  const Work work_;
  const AttachOptions at_;
  std::vector<DeviceMemory> a_, b_;
  DeviceMemory c_{std::size_t{work_.m} * work_.n * 2};
};

#define MK_TRY_STEP(step, name)                                                          \
  if (auto step_result = (step); !step_result)                                           \
  return fmt::format("rank {}, {}: {} ({})", at.rank, name, step_result.error().message, \
                     error_code_name(step_result.error().code))

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
  }
  MK_TRY_STEP(session.barrier(), "barrier");
  cudaStreamDestroy(stream);
  return {};
}

template <class Operator>
std::string create_and_launch(Session& session, const Work& work) {
  const AttachOptions& at = session.options();
  typename Operator::Shape shape;
  shape.m_max = work.m;
  shape.n = work.n;
  shape.k = work.k;
  shape.b_layout = BLayout::kNK;
  Tuning tuning;
  tuning.executor = Executor::kCuda;
  tuning.wait_timeout = std::chrono::seconds(8);
  auto op = Operator::create(session, shape, tuning);
  if (!op) return fmt::format("rank {}: create: {}", at.rank, op.error().message);
  return launch_all(session, *op, work);
}

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
    if (!wrong.empty()) return op + ": " + wrong;
  }
  if (const Status left = session->detach(); !left) return left.error().message;
  return {};
}

class ClientGpu : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
  }
};

void run_threads(std::uint32_t nodes, std::uint32_t locals, const Work& work) {
  EmbeddedOptions options;
  options.nodes = nodes;
  auto cluster = EmbeddedCluster::start(options);
  ASSERT_TRUE(cluster) << cluster.error().message;
  std::vector<std::string> wrong(nodes * locals);
  for_ranks(nodes * locals, [&](std::uint32_t rank) {
    wrong[rank] = run_rank(place(**cluster, locals, rank, "threads"), work);
  });
  for (const std::string& one : wrong) EXPECT_EQ(one, "");
}

TEST_F(ClientGpu, ThreadsOfOneNode) {
  run_threads(1, 1, {.op = "ag-gemm,gemm-rs,gemm-ar", .launches = 3});
  run_threads(1, 2, {.op = "ag-gemm,gemm-rs,gemm-ar"});
}
TEST_F(ClientGpu, ThreadsOfTwoNodes) { run_threads(2, 1, {.op = "ag-gemm,gemm-rs,gemm-ar"}); }
TEST_F(ClientGpu, ThreadsOfTwoNodesOfTwo) {
  run_threads(2, 2, {.op = "ag-gemm,gemm-rs,gemm-ar", .m = 900, .n = 768});
}

TEST_F(ClientGpu, BuffersComeAndGo) {
  auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 1, rank, "buffers"));
    ASSERT_TRUE(session) << session.error().message;
    std::size_t free_before = 0;
    std::size_t total = 0;
    for (int round = 0; round < 20; ++round) {
      auto buffer = session->alloc_buffer(32 << 20, "buffer", MemoryKind::kDevice);
      ASSERT_TRUE(buffer) << buffer.error().message;
      std::vector<std::byte> bytes(1 << 20, std::byte{1});
      test::require(cudaMemcpy(bytes.data(), buffer->data, bytes.size(), cudaMemcpyDeviceToHost),
                    "read");
      EXPECT_EQ(bytes, std::vector<std::byte>(1 << 20));
      ASSERT_TRUE(session->barrier());
      ASSERT_TRUE(session->free_buffer(*buffer));
      ASSERT_TRUE(session->barrier());
      std::size_t now = 0;
      cudaMemGetInfo(&now, &total);
      if (round == 2) free_before = now;
    }
    std::size_t after = 0;
    cudaMemGetInfo(&after, &total);
    EXPECT_GE(after + (64u << 20), free_before);
    ASSERT_TRUE(session->barrier());
  });
}

/// A child of ours that runs this program with other arguments.
class Child {
 public:
  explicit Child(const std::vector<std::string>& words) {
    int in[2];
    int out[2];
    if (::pipe(in) != 0 || ::pipe(out) != 0) throw std::runtime_error("pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::dup2(in[0], 0);
      ::dup2(out[1], 1);
      std::vector<char*> args{const_cast<char*>("client_gpu_test")};
      for (const std::string& word : words) args.push_back(const_cast<char*>(word.c_str()));
      args.push_back(nullptr);
      ::execv("/proc/self/exe", args.data());
      ::_exit(1);
    }
    ::close(in[0]);
    ::close(out[1]);
    to_ = in[1];
    from_ = ::fdopen(out[0], "r");
  }
  ~Child() {
    kill();
    ::close(to_);
    std::fclose(from_);
  }
  std::string line() {
    char buffer[2048] = {};
    if (std::fgets(buffer, sizeof buffer, from_) == nullptr) return "(ended)";
    std::string text(buffer);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  pid_t pid_ = 0;
  int to_ = -1;
  std::FILE* from_ = nullptr;
};

/// Ranks as processes of a job over the daemons whose sockets are given.
std::vector<std::unique_ptr<Child>> start_ranks(const std::vector<std::string>& sockets,
                                                std::uint32_t locals, const std::string& job,
                                                const Work& work) {
  std::vector<std::unique_ptr<Child>> ranks;
  const auto nodes = static_cast<std::uint32_t>(sockets.size());
  for (std::uint32_t rank = 0; rank < nodes * locals; ++rank) {
    ranks.push_back(std::make_unique<Child>(std::vector<std::string>{
        "--rank", std::to_string(rank), std::to_string(nodes), std::to_string(locals),
        sockets[rank / locals], job, work.op, std::to_string(work.launches)}));
  }
  return ranks;
}

TEST_F(ClientGpu, ProcessesOverADaemonOfItsOwn) {
  for (const std::uint32_t nodes : {1u, 2u}) {
    Child daemon({"--daemon", std::to_string(nodes)});
    std::vector<std::string> sockets;
    for (std::uint32_t node = 0; node < nodes; ++node) sockets.push_back(daemon.line());
    auto ranks = start_ranks(sockets, nodes == 1 ? 2 : 1, "processes",
                             {.op = "ag-gemm,gemm-rs,gemm-ar", .launches = 4});
    for (auto& rank : ranks) EXPECT_EQ(rank->line(), "right");
  }
}

TEST_F(ClientGpu, AKilledRankEndsTheOthersAndLeavesTheDaemonAndTheGpuUsable) {
  Child daemon({"--daemon", "2"});
  const std::vector<std::string> sockets{daemon.line(), daemon.line()};
  {
    auto ranks = start_ranks(sockets, 1, "killed", {.op = "gemm-ar", .launches = 1'000'000});
    std::this_thread::sleep_for(std::chrono::seconds(6));
    const auto begin = std::chrono::steady_clock::now();
    ranks[1]->kill();
    const std::string answer = ranks[0]->line();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    fmt::print("after {:.2f} s: {}\n", took.count(), answer);
    EXPECT_NE(answer.find("lost"), std::string::npos) << answer;
    EXPECT_LT(took.count(), 2.5);
  }
  auto ranks = start_ranks(sockets, 1, "after", {.op = "gemm-rs,gemm-ar", .launches = 3});
  for (auto& rank : ranks) EXPECT_EQ(rank->line(), "right");
}

int run_daemon(std::uint32_t nodes) {
  EmbeddedOptions options;
  options.nodes = nodes;
  auto cluster = EmbeddedCluster::start(options);
  if (!cluster) {
    fmt::print("{}\n", cluster.error().message);
    return 1;
  }
  for (std::uint32_t node = 0; node < nodes; ++node)
    fmt::print("{}\n", (*cluster)->socket_path(node));
  std::fflush(stdout);
  char byte = 0;
  (void)!::read(0, &byte, 1);
  return 0;
}

int run_rank_process(char** argv) {
  AttachOptions at;
  at.rank = static_cast<std::uint32_t>(std::stoul(argv[2]));
  at.nodes = static_cast<std::uint32_t>(std::stoul(argv[3]));
  at.local_size = static_cast<std::uint32_t>(std::stoul(argv[4]));
  at.world = at.nodes * at.local_size;
  at.node_rank = at.rank / at.local_size;
  at.local_rank = at.rank % at.local_size;
  at.socket = argv[5];
  at.job = argv[6];
  Work work;
  work.op = argv[7];
  work.launches = static_cast<std::uint32_t>(std::stoul(argv[8]));
  const std::string wrong = run_rank(at, work);
  fmt::print("{}\n", wrong.empty() ? "right" : wrong);
  std::fflush(stdout);
  return wrong.empty() ? 0 : 1;
}

}  // namespace
}  // namespace mk

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--daemon")
    return mk::run_daemon(static_cast<std::uint32_t>(std::stoul(argv[2])));
  if (argc == 9 && std::string(argv[1]) == "--rank") return mk::run_rank_process(argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
