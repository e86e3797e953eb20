// Operators on a GPU that are destroyed right after a launch, with their sessions: nobody's launch
// fails. Two nodes of one rank each, which are threads of this process and may share a GPU. By
// default a few rounds; MK_TEST_LIFETIME=full runs 200 of each operator, and 50 with delays.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <optional>
#include <random>

#include "tests/client/embedded_ranks.h"
#include "tests/gpu/client_ranks.h"
#include "tests/multiprocess/delays.h"

namespace mk {
namespace {

// What ranks that share a GPU as threads need (client/embedded/README.md): no copy gets in line
// behind a launch that waits for it, and no kernel is loaded while another one waits.
[[maybe_unused]] const int kConnections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
[[maybe_unused]] const int kLoading = ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);

bool full() {
  const char* const wanted = std::getenv("MK_TEST_LIFETIME");
  return wanted != nullptr && std::string(wanted) == "full";
}

/// One rank's stream and matrices, which outlive its operators and sessions.
struct Rank {
  Rank(const Work& work, const AttachOptions& at) : matrices(work, at) {
    test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    // CUDA loads a kernel at its first launch, for which it may wait for the device to be idle.
    matrices.draw(0, stream);
    (void)matrices.bad(work.m, stream);
  }
  ~Rank() { cudaStreamDestroy(stream); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  RankMatrices matrices;
  cudaStream_t stream = nullptr;
};

struct Case {
  const char* op;
  const char* fabric;
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.op << " over " << one.fabric; }

class DestroyedOnTheGpu : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
    EmbeddedOptions options;
    options.nodes = 2;
    options.fabric = GetParam().fabric;
    if (options.fabric == "ofi") options.bind_address = "127.0.0.1";
    auto started = EmbeddedCluster::start(options);
    ASSERT_TRUE(started) << started.error().message;
    cluster_ = std::move(*started);
    work_.op = GetParam().op;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      test::require(cudaSetDevice(device_of(rank)), "device");
      ranks_[rank].emplace(work_, place(*cluster_, 1, rank, ""));
    }
  }

  void run(std::uint32_t rounds, std::chrono::microseconds pause) {
    for (std::uint32_t round = 0; round < rounds && !HasFailure(); ++round) {
      SCOPED_TRACE(fmt::format("round {}", round));
      for_ranks(2, [&](std::uint32_t rank) {
        if (work_.op == "ag-gemm") {
          live_once<AllGatherGemm>(rank, round, pause);
        } else if (work_.op == "gemm-rs") {
          live_once<GemmReduceScatter>(rank, round, pause);
        } else {
          live_once<GemmAllReduce>(rank, round, pause);
        }
      });
      for (std::uint32_t rank = 0; rank < 2 && !HasFailure(); ++rank) {
        test::require(cudaSetDevice(device_of(rank)), "device");
        EXPECT_EQ(ranks_[rank]->matrices.bad(work_.m, ranks_[rank]->stream), 0) << "rank " << rank;
      }
    }
    if (full() && !HasFailure()) {
      std::cout << testing::PrintToString(GetParam()) << ": " << rounds << " times\n";
    }
  }

 private:
  /// Attaches, creates, launches once, destroys and detaches. At each step this rank may wait for a
  /// time of at most `pause`, while the other one goes on.
  template <class Operator>
  void live_once(std::uint32_t rank, std::uint32_t round, std::chrono::microseconds pause) {
    std::mt19937 random(round * 2 + rank);
    const auto dawdle = [&] {
      if (random() % 2 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % pause.count()));
    };
    Rank& own = *ranks_[rank];
    test::require(cudaSetDevice(device_of(rank)), "device");
    auto session = Session::attach(place(*cluster_, 1, rank, fmt::format("round-{}", round)));
    ASSERT_TRUE(session) << session.error().message;
    auto made = create<Operator>(*session, work_, std::chrono::seconds(20));
    ASSERT_TRUE(made) << "rank " << rank << ": " << made.error().message;
    std::optional<Operator> op(std::move(*made));
    own.matrices.draw(round, own.stream);
    test::require(cudaStreamSynchronize(own.stream), "inputs");
    dawdle();
    const Status launched =
        op->launch_on(own.stream, own.matrices.a(), own.matrices.b(), own.matrices.c(), work_.m);
    EXPECT_TRUE(launched) << "rank " << rank << ": " << launched.error().message;
    const auto ended = op->finish(own.stream);
    EXPECT_TRUE(ended) << "rank " << rank << ": " << ended.error().message;
    dawdle();
    op.reset();
    dawdle();
    const Status left = session->detach();
    EXPECT_TRUE(left) << "rank " << rank << ": " << left.error().message;
  }

  Work work_{.m = 256, .n = 256, .k = 128};
  std::unique_ptr<EmbeddedCluster> cluster_;
  std::optional<Rank> ranks_[2];
};

TEST_P(DestroyedOnTheGpu, FailsNobody) { run(full() ? 200 : 10, std::chrono::milliseconds(3)); }

// Threads of the ranks, of the daemons and of CUDA stand still, while the other rank destroys and
// goes.
TEST_P(DestroyedOnTheGpu, FailsNobodyWhileOthersAreDelayed) {
  const test::ThreadDelays delays(std::chrono::milliseconds(20), 1);
  run(full() ? 50 : 4, std::chrono::milliseconds(20));
}

INSTANTIATE_TEST_SUITE_P(Operators, DestroyedOnTheGpu,
                         testing::Values(Case{"ag-gemm", "loopback"}, Case{"gemm-rs", "loopback"},
                                         Case{"gemm-ar", "loopback"}, Case{"ag-gemm", "ofi"},
                                         Case{"gemm-rs", "ofi"}, Case{"gemm-ar", "ofi"}),
                         [](const testing::TestParamInfo<Case>& test) {
                           std::string op = test.param.op;
                           op[op.find('-')] = '_';
                           return fmt::format("{}_{}", op, test.param.fabric);
                         });

}  // namespace
}  // namespace mk
