// Unlike operators on a GPU that share a workspace, over daemons: ranks that are threads of this
// process and share the GPUs there are. Every element of every launch is judged; inputs are drawn
// anew and outputs poisoned.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/client/embedded_ranks.h"
#include "tests/gpu/client_moe.h"
#include "tests/gpu/client_ranks.h"
#include "tests/gpu/client_unlike.h"
#include "tests/gpu/devices.h"

namespace mk {
namespace {

// Each operator has a stream of its own, and no rank's launches get in line behind another's.
[[maybe_unused]] const int kConnections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

/// The stream waits so long: what is put on it next comes later.
void delay(cudaStream_t stream, std::chrono::milliseconds time) {
  auto* const given = new std::chrono::milliseconds(time);
  test::require(cudaLaunchHostFunc(
                    stream,
                    [](void* what) {
                      auto* const taken = static_cast<std::chrono::milliseconds*>(what);
                      std::this_thread::sleep_for(*taken);
                      delete taken;
                    },
                    given),
                "delay");
}

class UnlikeGpu : public testing::TestWithParam<EmbeddedWorld> {
 protected:
  void SetUp() override {
    if (test::device_count() == 0) GTEST_SKIP() << "no GPU";
  }

  struct Rank {
    Session& session;
    std::uint32_t number;
    cudaStream_t stream;

    void ready() const {
      test::require(cudaStreamSynchronize(stream), "inputs");
      ASSERT_TRUE(session.barrier());
    }
    /// Its launch has ended well on all ranks.
    void judge(const UnlikeOperator& op, const char* what, std::uint32_t launch) const {
      EXPECT_EQ(0, op.bad(stream))
          << what << " " << launch << ", " << op.name() << ", rank " << number;
    }
  };

  static void on_ranks(const std::function<void(Rank&)>& body) {
    const auto [nodes, locals, fabric, type] = GetParam();
    const auto cluster = cluster_of(nodes, fabric);
    ASSERT_NE(nullptr, cluster);
    for_ranks(nodes * locals, [&, locals = locals](std::uint32_t number) {
      test::require(cudaSetDevice(device_of(number)), "device");
      auto session = Session::attach(place(*cluster, locals, number, "unlike"));
      ASSERT_TRUE(session) << session.error().message;
      cudaStream_t stream = nullptr;
      test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      Rank rank{*session, number, stream};
      body(rank);
      EXPECT_TRUE(session->barrier());
      cudaStreamDestroy(stream);
    });
  }
  /// Kernels that draw and judge are loaded before any that wait.
  static std::optional<UnlikeOperator> make(const Rank& rank, const Work& work, bool slow = false) {
    auto op = UnlikeOperator::create(rank.session, work, slow);
    EXPECT_TRUE(op) << "rank " << rank.number << ": " << op.error().message;
    if (!op) return std::nullopt;
    op->draw(0, rank.stream);
    (void)op->bad(rank.stream);
    EXPECT_TRUE(rank.session.barrier());
    return std::move(*op);
  }
};

std::vector<Work> kinds() {
  const auto& [nodes, locals, fabric, type] = UnlikeGpu::GetParam();
  std::vector<Work> all = {{.op = "gemm-ar", .m = 128, .n = 256, .k = 128},
                           {.op = "ag-gemm", .m = 640, .n = 512, .k = 320},
                           {.op = "gemm-rs", .m = 640, .n = 512, .k = 320},
                           {.op = "all-gather", .m = 900, .n = 768},
                           {.op = "moe"},
                           {.op = "gemm-ar", .m = 1024, .n = 768, .k = 256},
                           {.op = "combine"},
                           {.op = "reduce-scatter", .m = 300, .n = 264},
                           {.op = "ring"},
                           {.op = "ag-gemm", .m = 1500, .n = 256, .k = 512}};
  // A rank waits for the tokens alone that its experts need: engines may still write when it ends.
  if (nodes == 1 && locals > 1) all.push_back({.op = "moe-engines"});
  return all;
}

// Rounds of launches that follow each other on the stream, in an order that all ranks draw; ranks
// are late now and then. Sizes come in no order, so operators move.
TEST_P(UnlikeGpu, AreRightInAnyOrder) {
  on_ranks([](Rank& rank) {
    std::vector<UnlikeOperator> ops;
    for (const Work& work : kinds()) {
      auto op = make(rank, work);
      ASSERT_TRUE(op);
      ops.push_back(std::move(*op));
    }
    std::mt19937 order(7);
    std::mt19937 lateness(rank.number);
    for (std::uint32_t round = 0; round < 20 && !HasFailure(); ++round) {
      for (UnlikeOperator& op : ops) op.draw(round + 1, rank.stream);
      rank.ready();
      std::ranges::shuffle(ops, order);
      for (UnlikeOperator& op : ops) {
        if (lateness() % 6 == 0) delay(rank.stream, std::chrono::milliseconds(lateness() % 5));
        const Status put = op.launch(rank.stream);
        ASSERT_TRUE(put) << op.name() << ": " << put.error().message;
      }
      for (UnlikeOperator& op : ops) {
        const Status ended = op.finish(rank.stream);
        ASSERT_TRUE(ended) << op.name() << ": " << ended.error().message;
      }
      ASSERT_TRUE(rank.session.barrier());
      for (UnlikeOperator& op : ops) rank.judge(op, "round", round);
    }
  });
}

// A larger one comes when the others have launched: some move, and go on.
TEST_P(UnlikeGpu, GoOnWhenALargerOneComes) {
  on_ranks([](Rank& rank) {
    std::vector<UnlikeOperator> ops;
    for (std::uint32_t size = 1; size <= 5 && !HasFailure(); ++size) {
      auto op = make(
          rank, {.op = size % 2 == 0 ? "gemm-rs" : "gemm-ar", .m = 200 * size, .n = 512, .k = 128});
      ASSERT_TRUE(op);
      ops.push_back(std::move(*op));
      for (UnlikeOperator& one : ops) one.draw(size, rank.stream);
      rank.ready();
      for (UnlikeOperator& one : ops) ASSERT_TRUE(one.launch(rank.stream));
      for (UnlikeOperator& one : ops) {
        const Status ended = one.finish(rank.stream);
        ASSERT_TRUE(ended) << one.name() << ": " << ended.error().message;
      }
      ASSERT_TRUE(rank.session.barrier());
      for (UnlikeOperator& one : ops) rank.judge(one, "after", size);
    }
  });
}

// CUDA keeps a thread's last error, and launches answer it.
TEST_P(UnlikeGpu, AnErrorOfAnotherCallRefusesNoLaunch) {
  on_ranks([](Rank& rank) {
    auto first = make(rank, {.op = "ag-gemm", .m = 640, .n = 512, .k = 320});
    auto second = make(rank, {.op = "gemm-ar", .m = 128, .n = 256, .k = 128});
    ASSERT_TRUE(first && second);
    for (std::uint32_t round = 1; round <= 4; ++round) {
      for (UnlikeOperator* const one : {&*first, &*second}) one->draw(round, rank.stream);
      rank.ready();
      for (UnlikeOperator* const one : {&*first, &*second}) {
        void* never = nullptr;
        ASSERT_NE(cudaSuccess, cudaMalloc(&never, std::size_t{1} << 60));
        const Status put = one->launch(rank.stream);
        ASSERT_TRUE(put) << one->name() << ": " << put.error().message;
        const Status ended = one->finish(rank.stream);
        ASSERT_TRUE(ended) << one->name() << ": " << ended.error().message;
      }
      ASSERT_TRUE(rank.session.barrier());
      cudaGetLastError();  // this program's CUDA runtime has it still: the library has its own
      rank.judge(*first, "round", round);
      rank.judge(*second, "round", round);
    }
  });
}

// Memory of operators that have gone is freed on a thread of the library, at any time.
TEST_P(UnlikeGpu, WhatIsFreedMeanwhileEndsNoCapture) {
  on_ranks([](Rank& rank) {
    auto stays = make(rank, {.op = "gemm-ar", .m = 128, .n = 256, .k = 128});
    ASSERT_TRUE(stays);
    const std::uint32_t world = rank.session.options().world;
    for (std::uint32_t turn = 0; turn < 2 * world && !HasFailure(); ++turn) {
      auto goes = make(rank, {.op = "gemm-rs", .m = 640 + turn, .n = 512, .k = 320});
      ASSERT_TRUE(goes);
      goes.reset();
      ASSERT_TRUE(rank.session.barrier());
      // One rank at a time: a capture of this kind also forbids the other ranks' threads much.
      for (int i = 0; i < 20 && turn % world == rank.number; ++i) {
        cudaGraph_t graph = nullptr;
        test::require(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeGlobal), "capture");
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        ASSERT_EQ(cudaSuccess, cudaStreamEndCapture(rank.stream, &graph)) << "turn " << turn;
        test::require(cudaGraphDestroy(graph), "graph");
      }
      ASSERT_TRUE(rank.session.barrier());
    }
    stays->draw(1, rank.stream);
    rank.ready();
    ASSERT_TRUE(stays->launch(rank.stream));
    ASSERT_TRUE(stays->finish(rank.stream));
    ASSERT_TRUE(rank.session.barrier());
    rank.judge(*stays, "after captures", 1);
  });
}

// "Always at the same address": a caller that has asked for it may keep it.
TEST_P(UnlikeGpu, WhoHasShownAnAddressStays) {
  on_ranks([](Rank& rank) {
    const RankTokens tokens({.op = "moe"}, rank.session.options());
    auto moe = create_moe(rank.session, tokens);
    ASSERT_TRUE(moe) << moe.error().message;
    const auto* const offsets = moe->expert_offsets().data();
    const auto* const rows = moe->rows().data();
    const auto larger = make(rank, {.op = "gemm-rs", .m = 8000, .n = 2048, .k = 128});
    ASSERT_TRUE(larger);
    EXPECT_EQ(offsets, moe->expert_offsets().data());
    EXPECT_EQ(rows, moe->rows().data());
  });
}

// A graph takes its turns without the host: A, B and an equal of A, replayed, with launches of A,
// B and others in between. One rank after the other is late.
TEST_P(UnlikeGpu, AGraphOfTwoOperatorsIsRightOnEveryReplay) {
  on_ranks([](Rank& rank) {
    const Work gather{.op = "ag-gemm", .m = 900, .n = 512, .k = 512};
    auto a = make(rank, gather);
    auto b = make(rank, {.op = "gemm-ar", .m = 700, .n = 768, .k = 192});
    auto like_a = make(rank, gather);
    auto other = make(rank, {.op = "gemm-rs", .m = 512, .n = 512, .k = 64});
    ASSERT_TRUE(a && b && like_a && other);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    test::require(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "capture");
    const Status captured[] = {a->launch(rank.stream), b->launch(rank.stream),
                               like_a->launch(rank.stream)};
    test::require(cudaStreamEndCapture(rank.stream, &graph), "end of capture");
    for (const Status& one : captured) ASSERT_TRUE(one) << one.error().message;
    test::require(cudaGraphInstantiate(&replay, graph, 0), "graph");
    test::require(cudaGraphUpload(replay, rank.stream), "graph");
    UnlikeOperator* const all[] = {&*a, &*b, &*like_a};
    UnlikeOperator* const between[] = {&*other, &*b, &*a};
    for (std::uint32_t round = 0; round < 20 && !HasFailure(); ++round) {
      UnlikeOperator& eager = *between[round % 3];
      for (UnlikeOperator* const one : all) one->draw(2 * round + 1, rank.stream);
      other->draw(2 * round + 1, rank.stream);
      rank.ready();
      const bool late = round % rank.session.options().world == rank.number;
      if (late) delay(rank.stream, std::chrono::milliseconds(2));
      if (round % 2 == 0) {
        ASSERT_TRUE(eager.launch(rank.stream));
      }
      test::require(cudaGraphLaunch(replay, rank.stream), "replay");
      for (UnlikeOperator* const one : all) {
        const Status ended = one->finish(rank.stream);
        ASSERT_TRUE(ended) << one->name() << ": " << ended.error().message;
      }
      ASSERT_TRUE(rank.session.barrier());
      for (UnlikeOperator* const one : all) rank.judge(*one, "replay", round);
      if (round % 6 == 0) rank.judge(*other, "between replays", round);
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  });
}

// The last rank is long at a product of gathered rows. The others have ended theirs, and would
// write sums where it reads these.
TEST_P(UnlikeGpu, WhoIsLongAtOneOperatorIsWaitedFor) {
  on_ranks([](Rank& rank) {
    const bool last = rank.number + 1 == rank.session.options().world;
    auto slow = make(rank, {.op = "ag-gemm", .m = 1024, .n = 4096, .k = 2048}, last);
    auto next = make(rank, {.op = "gemm-ar", .m = 1024, .n = 1024, .k = 128});
    ASSERT_TRUE(slow && next);
    for (std::uint32_t round = 0; round < 6 && !HasFailure(); ++round) {
      slow->draw(round + 1, rank.stream);
      next->draw(round + 1, rank.stream);
      rank.ready();
      for (int turn = 0; turn < 2; ++turn) {
        ASSERT_TRUE(slow->launch(rank.stream));
        ASSERT_TRUE(next->launch(rank.stream));
      }
      for (UnlikeOperator* const one : {&*slow, &*next}) {
        const Status ended = one->finish(rank.stream);
        ASSERT_TRUE(ended) << one->name() << ": " << ended.error().message;
      }
      ASSERT_TRUE(rank.session.barrier());
      rank.judge(*slow, "round", round);
      rank.judge(*next, "round", round);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, UnlikeGpu,
                         testing::Values(EmbeddedWorld{1, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{1, 2, "loopback", DataType::kBf16},
                                         EmbeddedWorld{1, 4, "loopback", DataType::kBf16},
                                         EmbeddedWorld{2, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{2, 2, "loopback", DataType::kBf16},
                                         EmbeddedWorld{3, 1, "loopback", DataType::kF16}),
                         name_of_world);

class UnlikeGpuMemory : public testing::TestWithParam<EmbeddedWorld> {};

// 64 layers of five shapes, in both orders: what the largest takes, and little.
TEST_P(UnlikeGpuMemory, FiveShapesNeedTheMemoryOfTheLargest) {
  if (test::device_count() == 0) GTEST_SKIP() << "no GPU";
  for (const bool largest_first : {false, true}) {
    const auto [nodes, locals, fabric, type] = GetParam();
    const auto cluster = cluster_of(nodes, fabric);
    ASSERT_NE(nullptr, cluster);
    const std::uint32_t world = nodes * locals;
    for_ranks(world, [&, locals = locals](std::uint32_t number) {
      test::require(cudaSetDevice(device_of(number)), "device");
      auto session = Session::attach(place(*cluster, locals, number, "layers"));
      ASSERT_TRUE(session) << session.error().message;
      std::vector<std::uint64_t> rows = {1024, 2048, 3072, 4096, 6144};
      if (largest_first) std::ranges::reverse(rows);
      const auto create_one = [&](std::uint64_t m) {
        GemmAllReduce::Shape shape;
        shape.m_max = m;
        shape.n = 8192;
        shape.k = 256;
        shape.b_layout = BLayout::kNK;
        Tuning tuning;
        tuning.executor = Executor::kCuda;
        const auto bytes = GemmAllReduce::workspace_bytes(*session, shape, tuning);
        return std::pair(GemmAllReduce::create(*session, shape, tuning), bytes.value_or(0));
      };
      // All that is loaded at the first creation.
      create_one(128);
      const auto used = [&] {
        EXPECT_TRUE(session->barrier());
        std::size_t free = 0;
        std::size_t total = 0;
        test::require(cudaMemGetInfo(&free, &total), "memory");
        EXPECT_TRUE(session->barrier());
        return total - free;
      };
      const std::size_t before = used();
      const int ranks_here =
          (static_cast<int>(world) + test::device_count() - 1) / test::device_count();
      std::vector<GemmAllReduce> layers;
      std::uint64_t largest = 0;
      std::uint64_t sum = 0;
      for (std::size_t layer = 0; layer < 64; ++layer) {
        auto [op, bytes] = create_one(rows[layer % rows.size()]);
        ASSERT_TRUE(op) << op.error().message;
        layers.push_back(std::move(*op));
        largest = std::max(largest, bytes);
        if (layer < rows.size()) sum += bytes;
      }
      std::size_t taken = 0;
      for (int look = 0; look < 50; ++look) {
        taken = used() - before;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      fmt::print("rank {}: {} MiB for {} ranks here; the largest needs {} MiB, all five {} MiB\n",
                 number, taken >> 20, ranks_here, largest >> 20, sum >> 20);
      EXPECT_LE(taken, static_cast<std::uint64_t>(ranks_here) * (largest + (48 << 20)));
      EXPECT_GT(sum, largest + (96 << 20));
      EXPECT_TRUE(session->barrier());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, UnlikeGpuMemory,
                         testing::Values(EmbeddedWorld{1, 2, "loopback", DataType::kBf16},
                                         EmbeddedWorld{2, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{2, 2, "loopback", DataType::kBf16}),
                         name_of_world);

}  // namespace
}  // namespace mk
