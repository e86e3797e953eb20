// Operators on a GPU that are destroyed right after a launch, with their sessions: nobody's launch
// fails. Two nodes of one rank each, which are threads of this process and may share a GPU. By
// default a few rounds; MK_TEST_LIFETIME=full runs 200 of each operator, and 50 with delays.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <random>

#include "tests/client/embedded_ranks.h"
#include "tests/gpu/client_ranks.h"
#include "tests/gpu/client_ring.h"
#include "tests/multiprocess/delays.h"

namespace mk {
namespace {

// What ranks that share a GPU as threads need (client/embedded/README.md): no copy gets in line
// behind a launch that waits for it. No kernel is loaded while another one waits.
[[maybe_unused]] const int kConnections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
[[maybe_unused]] const int kLoading = ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);

bool full() {
  const char* const wanted = std::getenv("MK_TEST_LIFETIME");
  return wanted != nullptr && std::string(wanted) == "full";
}

/// One rank's stream and tensors (RankMatrices, RankSequences), which outlive its operators and
/// sessions.
template <class Tensors>
struct Rank {
  Rank(const Work& work, const AttachOptions& at) : tensors(work, at) {
    test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    // CUDA loads a kernel at its first launch, for which it may wait for the device to be idle.
    tensors.draw(0, stream);
    (void)tensors.bad(work.m, stream);
  }
  ~Rank() { cudaStreamDestroy(stream); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  Tensors tensors;
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
  }

  void run(std::uint32_t rounds, std::chrono::microseconds pause) {
    const auto multiply = [&]<class Operator>() {
      run_with<RankMatrices>(rounds, pause, [this](Session& session, const RankMatrices&) {
        return create<Operator>(session, work_, std::chrono::seconds(20));
      });
    };
    if (work_.op == "ag-gemm") {
      multiply.operator()<AllGatherGemm>();
    } else if (work_.op == "gemm-rs") {
      multiply.operator()<GemmReduceScatter>();
    } else if (work_.op == "gemm-ar") {
      multiply.operator()<GemmAllReduce>();
    } else {
      run_with<RankSequences>(rounds, pause, [](Session& session, const RankSequences& sequences) {
        return create_ring(session, sequences, std::chrono::seconds(20));
      });
    }
  }

 private:
  template <class Tensors, class Create>
  void run_with(std::uint32_t rounds, std::chrono::microseconds pause, Create&& create_op) {
    std::optional<Rank<Tensors>> ranks[2];
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      test::require(cudaSetDevice(device_of(rank)), "device");
      ranks[rank].emplace(work_, place(*cluster_, 1, rank, ""));
    }
    for (std::uint32_t round = 0; round < rounds && !HasFailure(); ++round) {
      SCOPED_TRACE(fmt::format("round {}", round));
      for_ranks(
          2, [&](std::uint32_t rank) { live_once(*ranks[rank], rank, round, pause, create_op); });
      for (std::uint32_t rank = 0; rank < 2 && !HasFailure(); ++rank) {
        test::require(cudaSetDevice(device_of(rank)), "device");
        EXPECT_EQ(ranks[rank]->tensors.bad(work_.m, ranks[rank]->stream), 0) << "rank " << rank;
      }
    }
    if (full() && !HasFailure()) {
      std::cout << testing::PrintToString(GetParam()) << ": " << rounds << " times\n";
    }
  }

  /// Attaches, creates, launches once, destroys and detaches. At each step this rank may wait for a
  /// time of at most `pause`, while the other one goes on.
  template <class Tensors, class Create>
  void live_once(Rank<Tensors>& own, std::uint32_t rank, std::uint32_t round,
                 std::chrono::microseconds pause, Create&& create_op) {
    std::mt19937 random(round * 2 + rank);
    const auto dawdle = [&] {
      if (random() % 2 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % pause.count()));
    };
    test::require(cudaSetDevice(device_of(rank)), "device");
    auto session = Session::attach(place(*cluster_, 1, rank, fmt::format("round-{}", round)));
    ASSERT_TRUE(session) << session.error().message;
    auto made = create_op(*session, own.tensors);
    ASSERT_TRUE(made) << "rank " << rank << ": " << made.error().message;
    std::optional op(std::move(*made));
    own.tensors.draw(round, own.stream);
    test::require(cudaStreamSynchronize(own.stream), "inputs");
    dawdle();
    const Status launched = own.tensors.launch(*op, own.stream, work_.m);
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
                                         Case{"gemm-rs", "ofi"}, Case{"gemm-ar", "ofi"},
                                         Case{"ring", "loopback"}, Case{"ring", "ofi"},
                                         Case{"ring-packed", "loopback"}),
                         [](const testing::TestParamInfo<Case>& test) {
                           std::string op = test.param.op;
                           std::replace(op.begin(), op.end(), '-', '_');
                           return fmt::format("{}_{}", op, test.param.fabric);
                         });

}  // namespace
}  // namespace mk
