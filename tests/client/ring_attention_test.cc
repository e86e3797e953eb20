// Ring Attention through libmkclient against real engines in this process.

#include "mkernel/ring_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "client/tools/numeric/attention_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "kernels/ops/ring/schedule.h"
#include "mkernel/mkernel_c.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using Elements = std::vector<std::uint16_t>;

struct Case {
  std::uint32_t nodes, locals;
  const char* fabric;
  DataType type;
  bool causal;
};

/// The rows of a matrix that lie in a rank's parts.
Elements rows_of(const tools::RandomMatrix& matrix, const SequenceRows& rows) {
  Elements elements(rows.count() * matrix.columns);
  matrix.rows(rows.parts[0].first, rows.parts[0].count, elements.data());
  matrix.rows(rows.parts[1].first, rows.parts[1].count,
              elements.data() + rows.parts[0].count * matrix.columns);
  return elements;
}

class RingAttentionWorld : public testing::TestWithParam<Case> {};

// Many launches of changing length in both modes: fresh inputs, poisoned outputs, every element of
// every rank's rows and every log-sum-exp.
TEST_P(RingAttentionWorld, GivesEveryRankItsRows) {
  const auto [nodes, locals, fabric, type, causal] = GetParam();
  const std::uint32_t world = nodes * locals;
  constexpr std::uint32_t kHeads = 4, kKeyHeads = 2, kDim = 64;
  constexpr std::uint64_t kSeq = 150;
  constexpr std::uint32_t kLaunches = 5;
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  const auto matrix = [&, type = type](std::uint32_t launch, std::uint32_t which) {
    return tools::RandomMatrix{17, launch * 3 + which, (which == 0 ? kHeads : kKeyHeads) * kDim,
                               type};
  };
  const std::uint64_t least = world * (causal ? 2 : 1);
  const auto length = [&](std::uint32_t launch) {
    return launch == 0 ? kSeq : least + launch * 37 % (kSeq - least);
  };

  std::vector<std::vector<Elements>> outputs(kLaunches, std::vector<Elements>(world));
  std::vector<std::vector<std::vector<float>>> lses(kLaunches,
                                                    std::vector<std::vector<float>>(world));
  for_ranks(world, [&, type = type, locals = locals, causal = causal](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "world"));
    ASSERT_TRUE(session) << session.error().message;
    auto op = RingAttention::create(*session, {kSeq, kHeads, kKeyHeads, kDim, causal, type});
    ASSERT_TRUE(op) << op.error().message;
    for (std::uint32_t launch = 0; launch < kLaunches; ++launch) {
      const SequenceRows rows = sequence_rows_of_rank(length(launch), causal, world, rank);
      const Elements q = rows_of(matrix(launch, 0), rows);
      const Elements k = rows_of(matrix(launch, 1), rows);
      const Elements v = rows_of(matrix(launch, 2), rows);
      Elements out(q.size(), 0xffff);
      std::vector<float> lse(rows.count() * kHeads, std::nanf(""));
      RingAttention::Input input;
      input.q = q.data();
      input.k = k.data();
      input.v = v.data();
      RingAttention::Output output;
      output.out = out.data();
      output.lse = lse.data();
      const auto stats = op->launch(input, output, length(launch),
                                    launch % 3 == 2 ? LaunchMode::kUnfused : LaunchMode::kFused);
      ASSERT_TRUE(stats) << stats.error().message;
      EXPECT_EQ(launch + 1, stats->epoch);
      outputs[launch][rank] = std::move(out);
      lses[launch][rank] = std::move(lse);
    }
    EXPECT_TRUE(session->barrier());
  });
  if (HasFailure()) return;
  for (std::uint32_t launch = 0; launch < kLaunches; ++launch) {
    const std::uint64_t seq = length(launch);
    const SequenceRows all{{{0, seq}, {}}};
    const Elements q = rows_of(matrix(launch, 0), all);
    tools::AttentionProblem problem;
    problem.sequence = seq;
    problem.query_heads = kHeads;
    problem.key_heads = kKeyHeads;
    problem.head_dim = kDim;
    problem.causal = causal;
    problem.scale = 1 / std::sqrt(double{kDim});
    problem.type = type;
    problem.tiles = tools::AttentionProblem::tiles_over(seq, 2 * world, problem.tile_keys);
    const tools::AttentionReference reference(problem, rows_of(matrix(launch, 1), all).data(),
                                              rows_of(matrix(launch, 2), all).data());
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      std::uint64_t row = 0;
      for (const RowRange& part : sequence_rows_of_rank(seq, causal, world, rank).parts) {
        const auto result =
            reference.compare(part.first, part.count, q.data() + part.first * kHeads * kDim,
                              outputs[launch][rank].data() + row * kHeads * kDim,
                              lses[launch][rank].data() + row * kHeads);
        EXPECT_EQ(0u, result.out.wrong) << "launch " << launch << " rank " << rank;
        EXPECT_EQ(0u, result.lse.wrong) << "launch " << launch << " rank " << rank;
        EXPECT_EQ(part.count * kHeads * kDim, result.out.compared);
        row += part.count;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, RingAttentionWorld,
                         testing::Values(Case{1, 1, "loopback", DataType::kBf16, true},
                                         Case{1, 3, "loopback", DataType::kBf16, false},
                                         Case{2, 1, "loopback", DataType::kF16, true},
                                         Case{2, 2, "loopback", DataType::kBf16, true},
                                         Case{3, 2, "loopback", DataType::kBf16, false},
                                         Case{4, 1, "loopback", DataType::kBf16, true},
                                         Case{2, 2, "ofi", DataType::kBf16, false},
                                         Case{3, 1, "ofi", DataType::kF16, true}),
                         [](const auto& test) {
                           return std::string(test.param.fabric) +
                                  std::to_string(test.param.nodes) + "x" +
                                  std::to_string(test.param.locals) + name_of(test.param.type) +
                                  (test.param.causal ? "causal" : "");
                         });

TEST(RingAttention, SaysWhichRowsARankHasAsTheOperatorDealsThemOut) {
  for (std::uint32_t locals : {1u, 2u, 3u, 7u}) {
    for (bool causal : {false, true}) {
      for (std::uint32_t seq : {14u, 15u, 100u, 4096u}) {
        kernels::RingAttentionGeometry plan;
        plan.locals = locals;
        plan.causal = causal;
        plan.tile_q = plan.tile_k = 128;
        for (std::uint32_t rank = 0; rank < locals; ++rank) {
          const kernels::RingAttentionSchedule schedule(plan, {1, locals, 0, rank}, seq,
                                                        kernels::Mode::kFused);
          const SequenceRows rows = sequence_rows_of_rank(seq, causal, locals, rank);
          ASSERT_EQ(rows.count(), schedule.rows(rank));
          for (std::uint32_t half = 0; half < (causal ? 2u : 1u); ++half) {
            ASSERT_EQ(rows.parts[half].first, schedule.part(rank, half).first);
            ASSERT_EQ(rows.parts[half].count, schedule.part(rank, half).count);
          }
        }
      }
    }
  }
}

TEST(RingAttention, WrongArgumentsChangeNothing) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "arguments"));
  ASSERT_TRUE(session);
  using Op = RingAttention;
  const RingAttention::Shape good{8, 2, 1, 64, true};
  const auto refused_shape = [&](const RingAttention::Shape& shape, const char* part) {
    const auto op = Op::create(*session, shape);
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kInvalidArgument, op.error().code);
    EXPECT_NE(std::string::npos, op.error().message.find(part)) << op.error().message;
  };
  refused_shape({1, 2, 1, 64, true}, "sequences_max = 1, with which a sequence may be shorter");
  refused_shape({8, 3, 2, 64, true}, "3 query heads over 2 key heads");
  refused_shape({8, 2, 1, 65, true}, "64 or 128");
  refused_shape({8, 2, 1, 64, true, static_cast<DataType>(9)}, "bf16 or f16");
  refused_shape({1ull << 40, 2, 1, 64, true}, "seq_max");
  auto op = Op::create(*session, good);
  ASSERT_TRUE(op) << op.error().message;
  const Elements ones(8 * 128, 0x3f80);
  Elements out(8 * 128, 0xffff);
  const auto refused = [&](const void* q, const void* k, const void* v, void* to,
                           std::uint64_t seq) {
    RingAttention::Input input;
    input.q = q;
    input.k = k;
    input.v = v;
    RingAttention::Output output;
    output.out = to;
    EXPECT_EQ(ErrorCode::kInvalidArgument, op->launch(input, output, seq).error().code);
  };
  const void* in = ones.data();
  refused(in, in, in, out.data(), 9);
  refused(in, in, in, out.data(), 1);
  refused(nullptr, in, in, out.data(), 8);
  refused(in, nullptr, in, out.data(), 8);
  refused(in, in, nullptr, out.data(), 8);
  refused(in, in, in, nullptr, 8);
  RingAttention::Input input;
  input.q = input.k = input.v = in;
  RingAttention::Output output;
  output.out = out.data();
  ASSERT_TRUE(op->launch(input, output, 8));
  for (const std::uint16_t element : out) EXPECT_EQ(0x3f80, element);  // a mean of ones
}

TEST(RingAttention, RanksThatDifferAreNamed) {
  const auto cluster = cluster_of(1);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "differ"));
    ASSERT_TRUE(session) << session.error().message;
    const auto op = RingAttention::create(*session, {64, 2, 1, 64, rank == 0});
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kShapeMismatch, op.error().code);
    EXPECT_NE(std::string::npos, op.error().message.find("causal=true")) << op.error().message;
    EXPECT_NE(std::string::npos, op.error().message.find("causal=false")) << op.error().message;
  });
}

}  // namespace
}  // namespace mk
