// libmkclient's operators on a GPU, over daemons: ranks that are threads of one process, and ranks
// that are processes with the daemons in another one. Every element of every rank's result is
// judged in float64; inputs are drawn anew for each launch and outputs poisoned.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <optional>

#include "kernels/ops/ag_gemm/sm90.h"
#include "tests/client/embedded_ranks.h"
#include "tests/gpu/client_ranks.h"
#include "tests/gpu/client_ring.h"

namespace mk {
namespace {

#define MK_NAME(id, name, Class) name ","
const std::string kAll = MK_OPERATORS(MK_NAME) "ring-open,ring-f16,ring-packed";
#undef MK_NAME

int devices_here() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

class ClientGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (devices_here() == 0) GTEST_SKIP() << "no GPU";
  }
};

void run_threads(std::uint32_t nodes, std::uint32_t locals, const Work& work,
                 const std::string& fabric = "loopback") {
  EmbeddedOptions options;
  options.nodes = nodes;
  options.fabric = fabric;
  if (fabric == "ofi") options.bind_address = "127.0.0.1";
  auto cluster = EmbeddedCluster::start(options);
  ASSERT_TRUE(cluster) << cluster.error().message;
  std::vector<std::string> wrong(nodes * locals);
  for_ranks(nodes * locals, [&](std::uint32_t rank) {
    wrong[rank] = run_rank(place(**cluster, locals, rank, "threads"), work);
  });
  for (const std::string& one : wrong) EXPECT_EQ(one, "");
}

TEST_F(ClientGpu, ThreadsOfOneNode) {
  run_threads(1, 1, {.op = kAll, .launches = 3});
  run_threads(1, 2, {.op = kAll});
  run_threads(1, 4, {.op = kAll, .m = 900, .n = 768});
}
TEST_F(ClientGpu, ThreadsOfTwoNodes) { run_threads(2, 1, {.op = kAll}); }
TEST_F(ClientGpu, ThreadsOfTwoNodesOfTwo) { run_threads(2, 2, {.op = kAll, .m = 900, .n = 768}); }

TEST_F(ClientGpu, AGraphReplaysALaunchWithNewInputs) {
  const Work work{.op = kAll, .launches = 20, .pace = Pace::kReplayed};
  run_threads(1, 2, work);
  run_threads(2, 1, work);
}

// The daemon tells a launch that waits for a rank that has left from one that is merely long by the
// count of launches. So the count must be odd while one is under way and at no other time.
TEST_F(ClientGpu, ARankThatLeavesEndsALaunchThatWaitsForIt) {
  auto cluster = cluster_of(1);
  const Work work{.m = 128, .n = 128, .k = 64};
  // The memory of the rank that leaves stays: the other one's kernel writes to it.
  std::vector<std::optional<Session>> sessions(2);
  std::vector<std::optional<GemmAllReduce>> ops(2);
  for_ranks(2, [&](std::uint32_t rank) {
    test::require(cudaSetDevice(device_of(rank)), "device");
    auto attached = Session::attach(place(*cluster, 2, rank, "leaves"));
    ASSERT_TRUE(attached) << attached.error().message;
    Session& session = sessions[rank].emplace(std::move(*attached));
    auto created = create<GemmAllReduce>(session, work, std::chrono::seconds(25));
    ASSERT_TRUE(created) << created.error().message;
    GemmAllReduce& op = ops[rank].emplace(std::move(*created));
    EXPECT_EQ(launches_seen(session), 0u);
    if (rank == 1) {
      EXPECT_TRUE(session.barrier());
      EXPECT_TRUE(session.detach());
      return;
    }
    RankMatrices matrices(work, session.options());
    cudaStream_t stream = nullptr;
    test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    matrices.draw(1, stream);
    test::require(cudaStreamSynchronize(stream), "inputs");
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_TRUE(op.launch_on(stream, matrices.a(), matrices.b(), matrices.c(), work.m));
    while (launches_seen(session) != 1 &&
           std::chrono::steady_clock::now() < begin + std::chrono::seconds(5))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(launches_seen(session), 1u);
    EXPECT_TRUE(session.barrier());
    const auto ended = op.finish(stream);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    ASSERT_FALSE(ended);
    fmt::print("after {:.2f} s: {}\n", took.count(), ended.error().message);
    EXPECT_EQ(ended.error().code, ErrorCode::kPeerLost);
    EXPECT_NE(ended.error().message.find("detached"), std::string::npos);
    EXPECT_LT(took.count(), 15);
    EXPECT_EQ(launches_seen(session), 2u);
    cudaStreamDestroy(stream);
  });
}

TEST_F(ClientGpu, MemoryOfTheHostIsRefusedAndChangesNothing) {
  auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "host"));
  ASSERT_TRUE(session) << session.error().message;
  cudaStream_t stream = nullptr;
  test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::vector<std::uint16_t> host(1 << 20);
  const auto expect_refused = [](const Status& status, const char* what) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(what), std::string::npos) << status.error().message;
    EXPECT_NE(status.error().message.find("memory of the host"), std::string::npos);
  };
  {
    const Work work;
    RankMatrices matrices(work, session->options());
    auto op = create<GemmAllReduce>(*session, work);
    ASSERT_TRUE(op) << op.error().message;
    expect_refused(op->launch_on(stream, host.data(), matrices.b(), matrices.c(), 8), "gemm-ar: a");
    expect_refused(op->launch_on(stream, matrices.a(), host.data(), matrices.c(), 8), "gemm-ar: b");
    expect_refused(op->launch_on(stream, matrices.a(), matrices.b(), host.data(), 8), "gemm-ar: c");
    matrices.draw(1, stream);
    ASSERT_TRUE(matrices.launch(*op, stream, work.m));
    EXPECT_TRUE(op->finish(stream));
    EXPECT_EQ(matrices.bad(work.m, stream), 0);
  }
  const Work work{.op = "ring"};
  RankSequences sequences(work, session->options());
  auto op = create_ring(*session, sequences);
  ASSERT_TRUE(op) << op.error().message;
  const test::DeviceMemory there(host.size() * 2);
  const RingAttention::Input in{there.data(), there.data(), there.data()};
  const auto launch = [&](const RingAttention::Input& input, void* out, float* lse) {
    return op->launch_on(stream, input, {.out = out, .lse = lse}, 8);
  };
  auto* const host_lse = reinterpret_cast<float*>(host.data());
  expect_refused(launch({host.data(), in.k, in.v}, there.data(), nullptr), "ring: q");
  expect_refused(launch({in.q, host.data(), in.v}, there.data(), nullptr), "ring: k");
  expect_refused(launch({in.q, in.k, host.data()}, there.data(), nullptr), "ring: v");
  expect_refused(launch(in, host.data(), nullptr), "ring: out");
  expect_refused(launch(in, there.data(), host_lse), "ring: lse");
  sequences.draw(1, stream);
  ASSERT_TRUE(sequences.launch(*op, stream, work.m));
  EXPECT_TRUE(op->finish(stream));
  EXPECT_EQ(sequences.bad(work.m, stream), 0);
  cudaStreamDestroy(stream);
}

/// A machine with a GPU and without an RDMA device: payload by way of host memory, over TCP.
TEST_F(ClientGpu, ThreadsOfTwoNodesOverTcp) { run_threads(2, 1, {.op = kAll}, "ofi"); }
TEST_F(ClientGpu, ThreadsOfTwoNodesOfTwoOverTcp) {
  run_threads(2, 2, {.op = kAll, .m = 900, .n = 768}, "ofi");
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

/// Daemons of `nodes` nodes in a process of their own.
struct Daemons {
  explicit Daemons(std::uint32_t nodes, const std::string& fabric = "loopback")
      : process({"--daemon", std::to_string(nodes), fabric}) {
    for (std::uint32_t node = 0; node < nodes; ++node) sockets.push_back(process.line());
  }
  Child process;
  std::vector<std::string> sockets;
};

AttachOptions place_at(const std::vector<std::string>& sockets, std::uint32_t locals,
                       std::uint32_t rank, const std::string& job) {
  const auto nodes = static_cast<std::uint32_t>(sockets.size());
  auto at = AttachOptions::of_rank(job, rank, nodes, locals);
  at.socket = sockets[at.node_rank];
  return at;
}

/// Ranks as processes of a job.
std::vector<std::unique_ptr<Child>> start_ranks(const Daemons& daemons, std::uint32_t locals,
                                                const std::string& job, const Work& work) {
  std::vector<std::unique_ptr<Child>> ranks;
  const std::size_t nodes = daemons.sockets.size();
  for (std::uint32_t rank = 0; rank < nodes * locals; ++rank) {
    ranks.push_back(std::make_unique<Child>(std::vector<std::string>{
        "--rank", std::to_string(rank), std::to_string(nodes), std::to_string(locals),
        daemons.sockets[rank / locals], job, work.op, std::to_string(work.launches),
        std::to_string(static_cast<int>(work.pace)), std::to_string(work.m), std::to_string(work.n),
        std::to_string(work.k)}));
  }
  return ranks;
}
void expect_right(const Daemons& daemons, std::uint32_t locals, const std::string& job,
                  const Work& work) {
  for (auto& rank : start_ranks(daemons, locals, job, work)) {
    std::string line = rank->line();
    if (line == "under way") line = rank->line();
    EXPECT_EQ(line, "right");
  }
}

/// A process for each rank; with several GPUs, on one each.
TEST_F(ClientGpu, ProcessesOverADaemonOfItsOwn) {
  for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {2u, 1u}, {1u, 4u}, {2u, 2u}}) {
    SCOPED_TRACE(fmt::format("{} nodes of {}", nodes, locals));
    if (nodes * locals > 2 && devices_here() == 1) continue;
    const Daemons daemons(nodes);
    expect_right(daemons, locals, "processes", {.op = kAll, .launches = 4});
  }
}

/// So many rows that DMA engines bring them, of up to four ranks with a GPU each.
Work many_rows() { return {.op = "ag-gemm", .m = 16384, .n = 1024, .k = 1024}; }

// Into memory of other processes, which the daemon has handed on.
TEST_F(ClientGpu, ProcessesShareRowsKeysAndTokensByDmaEngines) {
  for (const std::uint32_t locals : {2u, 4u}) {
    if (static_cast<int>(locals) > devices_here()) continue;
    SCOPED_TRACE(locals);
    const Work rows = many_rows();
    const kernels::plan::Problem problem{
        .locals = locals, .shape = {rows.m, rows.n, rows.k}, .named = {}};
    const auto choice =
        kernels::plan::choose(problem, kernels::plan::shipped_machine("H100").value());
    ASSERT_TRUE(choice && choice->candidate.engines);
    const Daemons daemons(1);
    for (Work work : {rows, Work{.op = "ring-engines", .m = 3000}, Work{.op = "moe-engines"}}) {
      expect_right(daemons, locals, work.op + "_by_dma", work);
      work.launches = 20;
      work.pace = Pace::kReplayed;
      expect_right(daemons, locals, work.op + "_replayed", work);
      work.launches = 300;
      work.pace = Pace::kInARow;
      expect_right(daemons, locals, work.op + "_in_a_row", work);
    }
  }
}

/// Daemons in a process of their own open the ranks' GPU memory, and pin their own.
TEST_F(ClientGpu, ProcessesOverTcp) {
  const Daemons daemons(2, "ofi");
  expect_right(daemons, 1, "tcp", {.op = kAll, .launches = 3});
}

/// Threads, so that they share a GPU at the same time.
void run_threads_over(const Daemons& daemons, std::uint32_t locals, const std::string& job,
                      const Work& work, std::vector<std::string>& answers) {
  const auto world = static_cast<std::uint32_t>(daemons.sockets.size()) * locals;
  answers.assign(world, "");
  for_ranks(world, [&](std::uint32_t rank) {
    answers[rank] = run_rank(place_at(daemons.sockets, locals, rank, job), work);
  });
}

TEST_F(ClientGpu, AThousandLaunchesInARow) {
  for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {2u, 1u}}) {
    const Daemons daemons(nodes);
    std::vector<std::string> answers;
    run_threads_over(daemons, locals, "row",
                     {.op = kAll, .m = 384, .launches = 1000, .pace = Pace::kInARow}, answers);
    for (const std::string& answer : answers) EXPECT_EQ(answer, "");
  }
}

struct Loss {
  std::uint32_t nodes, locals;
  Pace pace;
  std::string op;  ///< that the lost ranks were at; "by_dma": AllGather+GEMM of many rows
};
std::vector<Loss> losses() {
  std::vector<Loss> all = {{1, 2, Pace::kInARow, "by_dma"}, {2, 1, Pace::kHeldUp, "unlike"}};
  for (const char* op : {"by_dma", "unlike"}) all.push_back({1, 2, Pace::kHeldUp, op});
  for (const char* op : {"gemm-ar", "moe", "combine", "ring", "all-gather", "reduce-scatter"}) {
    for (const Pace pace : {Pace::kHeldUp, Pace::kInARow}) {
      all.push_back({2, 1, pace, op});
      all.push_back({1, 2, pace, op});
    }
  }
  return all;
}
constexpr double kSecondsToHear = 2.0;

class Lost : public ClientGpu, public testing::WithParamInterface<Loss> {
 protected:
  static Work work() {
    const bool by_dma = GetParam().op == "by_dma";
    Work work = by_dma ? many_rows() : Work{};
    if (!by_dma) work.op = GetParam().op;
    work.launches = 1'000'000;
    work.pace = GetParam().pace;
    return work;
  }
  /// Every rank that is left answers in time, and not that all is well.
  static void expect_errors(std::vector<std::unique_ptr<Child>>& ranks,
                            std::chrono::steady_clock::time_point begin) {
    for (auto& rank : ranks) {
      const std::string answer = rank->line();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      fmt::print("after {:.2f} s: {}\n", took.count(), answer);
      EXPECT_NE(answer.find("lost"), std::string::npos) << answer;
      EXPECT_LT(took.count(), kSecondsToHear);
    }
  }
  static void await_launches(std::vector<std::unique_ptr<Child>>& ranks) {
    for (auto& rank : ranks) ASSERT_EQ(rank->line(), "under way");
  }
};

TEST_P(Lost, AKilledRankEndsTheOthersAndLeavesTheDaemonAndTheGpuUsable) {
  const Daemons daemons(GetParam().nodes);
  auto ranks = start_ranks(daemons, GetParam().locals, "killed", work());
  ASSERT_NO_FATAL_FAILURE(await_launches(ranks));
  const auto begin = std::chrono::steady_clock::now();
  ranks.pop_back();
  expect_errors(ranks, begin);
  expect_right(daemons, GetParam().locals, "after", {.op = "gemm-rs,gemm-ar", .launches = 3});
}

TEST_P(Lost, AKilledDaemonEndsAllRanksAndLeavesTheGpuUsable) {
  auto daemons = std::make_unique<Daemons>(GetParam().nodes);
  auto ranks = start_ranks(*daemons, GetParam().locals, "killed", work());
  ASSERT_NO_FATAL_FAILURE(await_launches(ranks));
  const auto begin = std::chrono::steady_clock::now();
  daemons->process.kill();
  expect_errors(ranks, begin);
  const Daemons next(GetParam().nodes);
  expect_right(next, GetParam().locals, "after", {.op = "gemm-rs,gemm-ar", .launches = 3});
}

TEST_P(Lost, AKilledDaemonEndsThreadsWhoseProcessThenJoinsAnotherJob) {
  auto daemons = std::make_unique<Daemons>(GetParam().nodes);
  std::atomic<std::uint32_t> under_way{0};
  Work doomed = work();
  doomed.under_way = [&] { ++under_way; };
  std::vector<std::string> answers;
  std::thread ranks(
      [&] { run_threads_over(*daemons, GetParam().locals, "killed", doomed, answers); });
  const std::uint32_t world = GetParam().nodes * GetParam().locals;
  const auto start = std::chrono::steady_clock::now();
  while (under_way != world && std::chrono::steady_clock::now() < start + std::chrono::seconds(60))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto begin = std::chrono::steady_clock::now();
  daemons->process.kill();
  ranks.join();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  for (const std::string& answer : answers) {
    fmt::print("after {:.2f} s: {}\n", took.count(), answer);
    EXPECT_NE(answer.find("lost"), std::string::npos) << answer;
  }
  EXPECT_EQ(under_way, world);
  EXPECT_LT(took.count(), kSecondsToHear);
  const Daemons next(GetParam().nodes);
  run_threads_over(next, GetParam().locals, "after", {.op = kAll, .launches = 3}, answers);
  for (const std::string& answer : answers) EXPECT_EQ(answer, "");
}

INSTANTIATE_TEST_SUITE_P(InMidLaunch, Lost, testing::ValuesIn(losses()), [](const auto& test) {
  const Loss& loss = test.param;
  std::string name = fmt::format("{}x{}{}_{}", loss.nodes, loss.locals,
                                 loss.pace == Pace::kHeldUp ? "waiting" : "in_a_row", loss.op);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

int run_daemon(std::uint32_t nodes, const std::string& fabric) {
  EmbeddedOptions options;
  options.nodes = nodes;
  options.fabric = fabric;
  if (fabric == "ofi") options.bind_address = "127.0.0.1";
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
  const auto number = [&](int i) { return static_cast<std::uint32_t>(std::stoul(argv[i])); };
  const std::uint32_t rank = number(2);
  const std::uint32_t locals = number(4);
  std::vector<std::string> sockets(number(3));
  sockets[rank / locals] = argv[5];
  Work work;
  work.op = argv[7];
  work.launches = number(8);
  work.pace = static_cast<Pace>(number(9));
  work.m = number(10);
  work.n = number(11);
  work.k = number(12);
  work.under_way = [] {
    fmt::print("under way\n");
    std::fflush(stdout);
  };
  const std::string wrong = run_rank(place_at(sockets, locals, rank, argv[6]), work);
  fmt::print("{}\n", wrong.empty() ? "right" : wrong);
  std::fflush(stdout);
  return wrong.empty() ? 0 : 1;
}

}  // namespace
}  // namespace mk

int main(int argc, char** argv) {
  if (argc >= 3 && std::string(argv[1]) == "--daemon") {
    return mk::run_daemon(static_cast<std::uint32_t>(std::stoul(argv[2])),
                          argc > 3 ? argv[3] : "loopback");
  }
  if (argc == 13 && std::string(argv[1]) == "--rank") return mk::run_rank_process(argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
