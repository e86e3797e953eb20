// Which executor an operator has, and what is answered where there is no GPU. What GPUs compute is
// in tests/gpu.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "mkernel/mkernel.h"
#include "mkernel/mkernel_c.h"
#include "shm/gpu/driver.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

class ExecutorChoice : public testing::Test {
 protected:
  static Tuning on_gpu() {
    Tuning tuning;
    tuning.executor = Executor::kCuda;
    return tuning;
  }
  Session attach(const std::string& job) {
    auto session = Session::attach(place(*cluster_, 1, 0, job));
    EXPECT_TRUE(session) << session.error().message;
    return std::move(*session);
  }
  const std::unique_ptr<EmbeddedCluster> cluster_ = cluster_of(1);
};

TEST_F(ExecutorChoice, WithoutAGpuEachRequestSaysWhatIsMissing) {
  if (gpu::load_driver()) GTEST_SKIP() << "this machine has a GPU";
  Session session = attach("missing");
  const auto buffer = session.alloc_buffer(4096, "b", MemoryKind::kDevice);
  ASSERT_FALSE(buffer);
  EXPECT_EQ(buffer.error().code, ErrorCode::kUnavailable);
  EXPECT_NE(buffer.error().message.find("CUDA driver"), std::string::npos);
  const auto expect_refused = [](const auto& op) {
    ASSERT_FALSE(op);
    // Without the kernels in the build, or without a GPU for them.
    EXPECT_TRUE(op.error().code == ErrorCode::kUnsupported ||
                op.error().code == ErrorCode::kUnavailable)
        << op.error().message;
  };
  expect_refused(AllGatherGemm::create(session, {.m_max = 64, .n = 64, .k = 64}, on_gpu()));
  expect_refused(GemmReduceScatter::create(session, {.m_max = 64, .n = 64, .k = 64}, on_gpu()));
  expect_refused(GemmAllReduce::create(session, {.m_max = 64, .n = 64, .k = 64}, on_gpu()));
  RingAttention::Tuning ring;
  ring.executor = Executor::kCuda;
  const RingAttention::Shape sequence{64, 2, 1, 64};
  expect_refused(RingAttention::create(session, sequence, ring));
  EXPECT_FALSE(RingAttention::workspace_bytes(session, sequence, ring));
  const MoeDispatchGemm::Shape moe{
      .tokens_max = 8, .hidden = 16, .features = 8, .experts = 2, .top_k = 1};
  expect_refused(MoeDispatchGemm::create(session, moe, on_gpu()));
  EXPECT_FALSE(MoeDispatchGemm::workspace_bytes(session, moe, on_gpu()));
  const GemmCombine::Shape combine{
      .tokens_max = 8, .hidden = 16, .features = 8, .experts = 2, .top_k = 1};
  expect_refused(GemmCombine::create(session, combine, on_gpu()));
  EXPECT_FALSE(GemmCombine::workspace_bytes(session, combine, on_gpu()));
  // The session is as good as before, for the CPU.
  auto op = GemmAllReduce::create(session, {.m_max = 64, .n = 64, .k = 64});
  ASSERT_TRUE(op) << op.error().message;
  EXPECT_TRUE(session.detach());
}

TEST_F(ExecutorChoice, MoeOnAGpuTakesNoTiles) {
  Session session = attach("moe-tiles");
  const MoeDispatchGemm::Shape shape{
      .tokens_max = 8, .hidden = 16, .features = 8, .experts = 2, .top_k = 1};
  for (const auto member : {&Tuning::tile_m, &Tuning::tile_n}) {
    MoeDispatchGemm::Tuning tuning;
    tuning.executor = Executor::kCuda;
    tuning.*member = 64;
    const auto op = MoeDispatchGemm::create(session, shape, tuning);
    ASSERT_FALSE(op);
    EXPECT_EQ(op.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(op.error().message.find("leave tile_m and tile_n 0"), std::string::npos);
    EXPECT_FALSE(MoeDispatchGemm::workspace_bytes(session, shape, tuning));
    const GemmCombine::Shape down{
        .tokens_max = 8, .hidden = 8, .features = 16, .experts = 2, .top_k = 1};
    const auto combine = GemmCombine::create(session, down, tuning);
    ASSERT_FALSE(combine);
    EXPECT_NE(combine.error().message.find("leave tile_m and tile_n 0"), std::string::npos);
  }
  EXPECT_TRUE(session.detach());
}

TEST_F(ExecutorChoice, AnAdaptivePartitionIsForWhatMultipliesOrAttends) {
  Session session = attach("partition");
  const auto expect_refused = [](const auto& op) {
    ASSERT_FALSE(op);
    EXPECT_EQ(op.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(op.error().message.find("leave Tuning::partition planned"), std::string::npos)
        << op.error().message;
  };
  Tuning tuning;
  tuning.partition = Partition::kAdaptive;
  RingAttention::Tuning ring;
  ring.partition = Partition::kAdaptive;
  const MoeDispatchGemm::Shape moe{
      .tokens_max = 8, .hidden = 16, .features = 8, .experts = 2, .top_k = 1};
  const GemmCombine::Shape combine{
      .tokens_max = 8, .hidden = 16, .features = 8, .experts = 2, .top_k = 1};
  EXPECT_TRUE(RingAttention::create(session, {64, 2, 1, 64}, ring));
  EXPECT_TRUE(MoeDispatchGemm::create(session, moe, tuning));
  EXPECT_TRUE(GemmCombine::create(session, combine, tuning));
  EXPECT_TRUE(GemmAllReduce::create(session, {.m_max = 64, .n = 64, .k = 64}, tuning));
  expect_refused(AllGather::create(session, {.m_max = 64, .n = 64}, tuning));
  expect_refused(ReduceScatter::create(session, {.m_max = 64, .n = 64}, tuning));
  EXPECT_TRUE(session.detach());
}

// Threads go over between launches there.
TEST_F(ExecutorChoice, StatisticsAndTracesOfExpertsTellOfTheirPartition) {
  Session session = attach("partition-told");
  MoeDispatchGemm::Tuning tuning;
  tuning.partition = Partition::kAdaptive;
  tuning.compute_sms = 7;
  const MoeDispatchGemm::Shape shape{
      .tokens_max = 8, .hidden = 16, .features = 8, .experts = 2, .top_k = 1};
  auto op = MoeDispatchGemm::create(session, shape, tuning);
  ASSERT_TRUE(op) << op.error().message;
  op->set_trace(true);
  const std::vector<std::uint16_t> any(std::size_t{2} * 16 * 8);
  const std::vector<std::int32_t> ids = {0, 1, 1, 0, 1, 0, 1, 1};
  const std::vector<float> weights(8, 1.0f);
  std::vector<std::uint16_t> y(std::size_t{8} * 8);
  const MoeDispatchGemm::Input input{any.data(), ids.data(), weights.data(),
                                     8,          any.data(), nullptr};
  std::uint32_t moves = 0;
  std::uint32_t before = 1;
  for (int i = 0; i < 30; ++i) {
    const auto stats = op->launch(input, {y.data(), 8}, LaunchMode::kFused);
    ASSERT_TRUE(stats) << stats.error().message;
    EXPECT_EQ(stats->partition_first, stats->partition_last);
    EXPECT_GE(stats->partition_last, 1u);
    EXPECT_LE(stats->partition_last, 7u);
    moves += stats->partition_last != before ? 1 : 0;
    before = stats->partition_last;
    EXPECT_EQ(stats->partition_moves, moves);
    const std::vector<TraceSpan> spans = op->trace();
    const auto told = std::find_if(spans.begin(), spans.end(), [](const TraceSpan& span) {
      return span.role == std::string("partition");
    });
    ASSERT_NE(told, spans.end());
    EXPECT_EQ(told->index[0], before);
    EXPECT_EQ(told->index[1], before);
  }
  EXPECT_GE(moves, 1u);
  EXPECT_TRUE(session.detach());
}

// They are the kernel's own there: what was chosen for the CPU would go unheeded.
TEST_F(ExecutorChoice, RingAttentionOnAGpuTakesNoTilesPassesAndLengths) {
  Session session = attach("tiles");
  for (const auto member : {&RingAttention::Tuning::tile_m, &RingAttention::Tuning::tile_n}) {
    RingAttention::Tuning tuning;
    tuning.executor = Executor::kCuda;
    tuning.*member = 128;
    const auto op = RingAttention::create(session, {64, 2, 1, 64}, tuning);
    ASSERT_FALSE(op);
    EXPECT_EQ(op.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(op.error().message.find("leave tile_m, tile_n and remote_passes 0"),
              std::string::npos);
  }
  RingAttention::Tuning tuning;
  tuning.executor = Executor::kCuda;
  tuning.remote_passes = 2;
  const auto bytes = RingAttention::workspace_bytes(session, {64, 2, 1, 64}, tuning);
  ASSERT_FALSE(bytes);
  EXPECT_NE(bytes.error().message.find("2 remote passes"), std::string::npos);
  EXPECT_TRUE(session.detach());
}

TEST_F(ExecutorChoice, AnOperatorOnTheCpuHasNoStreams) {
  Session session = attach("streams");
  auto op = GemmReduceScatter::create(session, {.m_max = 64, .n = 64, .k = 64});
  ASSERT_TRUE(op) << op.error().message;
  const std::vector<std::uint16_t> matrix(64 * 64);
  std::vector<std::uint16_t> c(64 * 64);
  const Status launched = op->launch_on(nullptr, matrix.data(), matrix.data(), c.data(), 64);
  ASSERT_FALSE(launched);
  EXPECT_EQ(launched.error().code, ErrorCode::kInvalidArgument);
  EXPECT_FALSE(op->finish(nullptr));
  EXPECT_TRUE(op->status());
  auto ring = RingAttention::create(session, {64, 1, 1, 64});
  ASSERT_TRUE(ring) << ring.error().message;
  const Status attended = ring->launch_on(nullptr, {matrix.data(), matrix.data(), matrix.data()},
                                          {.out = c.data()}, 64);
  ASSERT_FALSE(attended);
  EXPECT_EQ(attended.error().code, ErrorCode::kInvalidArgument);
  EXPECT_FALSE(ring->finish(nullptr));
  EXPECT_TRUE(ring->status());
  auto moe = MoeDispatchGemm::create(
      session, {.tokens_max = 8, .hidden = 16, .features = 8, .experts = 2, .top_k = 1});
  ASSERT_TRUE(moe) << moe.error().message;
  const Status sent = moe->launch_on(nullptr, {}, {});
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code, ErrorCode::kInvalidArgument);
  EXPECT_FALSE(moe->finish(nullptr));
  EXPECT_TRUE(moe->status());
  EXPECT_TRUE(op->launch(matrix.data(), matrix.data(), c.data(), 64));
  EXPECT_TRUE(session.detach());
}

TEST_F(ExecutorChoice, AnExecutorThatDoesNotExistIsAnArgumentError) {
  Session session = attach("none");
  Tuning tuning;
  tuning.executor = static_cast<Executor>(7);
  const auto op = AllGatherGemm::create(session, {.m_max = 64, .n = 64, .k = 64}, tuning);
  ASSERT_FALSE(op);
  EXPECT_EQ(op.error().code, ErrorCode::kInvalidArgument);
  EXPECT_TRUE(session.detach());
}

}  // namespace
}  // namespace mk
