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
#include <optional>

#include "tests/client/embedded_ranks.h"
#include "tests/gpu/client_ranks.h"

namespace mk {
namespace {

class ClientGpu : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
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
  run_threads(1, 1, {.op = "ag-gemm,gemm-rs,gemm-ar", .launches = 3});
  run_threads(1, 2, {.op = "ag-gemm,gemm-rs,gemm-ar"});
}
TEST_F(ClientGpu, ThreadsOfTwoNodes) { run_threads(2, 1, {.op = "ag-gemm,gemm-rs,gemm-ar"}); }
TEST_F(ClientGpu, ThreadsOfTwoNodesOfTwo) {
  run_threads(2, 2, {.op = "ag-gemm,gemm-rs,gemm-ar", .m = 900, .n = 768});
}

TEST_F(ClientGpu, AGraphReplaysALaunchWithNewInputs) {
  const Work work{.op = "ag-gemm,gemm-rs,gemm-ar", .launches = 20, .replays = true};
  run_threads(1, 2, work);
  run_threads(2, 1, work);
}

// The daemon tells a launch that waits for a rank that has left from one that is merely long by the
// count of launches, which therefore must be odd while one is under way and at no other time.
TEST_F(ClientGpu, ARankThatLeavesEndsALaunchThatWaitsForIt) {
  auto cluster = cluster_of(1);
  const Work work{.m = 128, .n = 128, .k = 64};
  // The memory of the rank that leaves stays: the other one's kernel writes to it.
  std::vector<std::optional<Session>> sessions(2);
  std::vector<std::optional<GemmAllReduce>> ops(2);
  for_ranks(2, [&](std::uint32_t rank) {
    test::require(cudaSetDevice(0), "device");
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

/// A machine with a GPU and without an RDMA device: payload by way of host memory, over TCP.
TEST_F(ClientGpu, ThreadsOfTwoNodesOverTcp) {
  run_threads(2, 1, {.op = "ag-gemm,gemm-rs,gemm-ar"}, "ofi");
}
TEST_F(ClientGpu, ThreadsOfTwoNodesOfTwoOverTcp) {
  run_threads(2, 2, {.op = "ag-gemm,gemm-rs,gemm-ar", .m = 900, .n = 768}, "ofi");
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

/// Daemons in a process of their own open the ranks' GPU memory, and pin their own.
TEST_F(ClientGpu, ProcessesOverTcp) {
  Child daemon({"--daemon", "2", "ofi"});
  const std::vector<std::string> sockets{daemon.line(), daemon.line()};
  auto ranks = start_ranks(sockets, 1, "tcp", {.op = "ag-gemm,gemm-rs,gemm-ar", .launches = 3});
  for (auto& rank : ranks) EXPECT_EQ(rank->line(), "right");
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
  if (argc >= 3 && std::string(argv[1]) == "--daemon") {
    return mk::run_daemon(static_cast<std::uint32_t>(std::stoul(argv[2])),
                          argc > 3 ? argv[3] : "loopback");
  }
  if (argc == 9 && std::string(argv[1]) == "--rank") return mk::run_rank_process(argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
