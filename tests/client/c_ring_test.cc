/// \file
/// Ring Attention through the C ABI: rows of ranks, batches, strides.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/c_calls.h"

namespace mk {
namespace {

TEST(CApiRing, AttendsOverRanks) {
  const auto cluster = cluster_of(1);
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 2, rank);
    auto shape = sized<mk_ring_shape>();
    shape.seq_max = 20;
    shape.query_heads = 2;
    shape.key_heads = 1;
    shape.head_dim = 64;
    shape.causal = 1;
    shape.dtype = MK_BF16;
    mk_op* const op = create(session, "ring", &shape);
    std::uint64_t first[2] = {}, count[2] = {};
    mk_sequence_rows_of_rank(18, 1, 2, rank, first, count);
    // 18 rows in four parts: 4, 5, 4, 5.
    EXPECT_EQ(rank == 0 ? 4u : 5u, count[0]);
    EXPECT_EQ(rank == 0 ? 5u : 4u, count[1]);
    EXPECT_EQ(rank == 0 ? 13u : 9u, first[1]);
    const std::uint64_t rows = count[0] + count[1];
    const Elements ones(rows * 128, 0x3f80);
    Elements out(rows * 128, 0xffff);
    std::vector<float> lse(rows * 2, std::nanf(""));
    auto arguments = sized<mk_ring_arguments>();
    arguments.q = arguments.k = arguments.v = ones.data();
    arguments.out = out.data();
    arguments.lse = lse.data();
    arguments.seq = 18;
    ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
    EXPECT_EQ(Elements(rows * 128, 0x3f80), out);
    // Every score is 64 / 8; row i sees i + 1 of them.
    for (std::uint64_t row = 0; row < rows; ++row) {
      const std::uint64_t position = row < count[0] ? first[0] + row : first[1] + row - count[0];
      EXPECT_NEAR(lse[row * 2], 8 + std::log(static_cast<double>(position) + 1), 1e-5);
    }
    arguments.seq = 21;
    expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                   {});
    arguments.seq = 18;
    expect_refused(mk_op_launch_on(op, nullptr, &arguments, MK_FUSED), ErrorCode::kInvalidArgument,
                   {"ring", "CPU"});
    // Every stride arrives where it belongs.
    for (const auto& [stride, part] : {std::pair{&mk_ring_arguments::q_stride, "rows of q"},
                                       {&mk_ring_arguments::k_stride, "rows of k"},
                                       {&mk_ring_arguments::v_stride, "rows of v"},
                                       {&mk_ring_arguments::out_stride, "rows of out"},
                                       {&mk_ring_arguments::lse_stride, "rows of lse"},
                                       {&mk_ring_arguments::q_head_stride, "heads of q"},
                                       {&mk_ring_arguments::out_head_stride, "heads of out"},
                                       {&mk_ring_arguments::lse_head_stride, "heads of lse"}}) {
      auto bad = arguments;
      bad.*stride = part[0] == 'r' ? 1 : 3;
      expect_refused(mk_op_launch(op, &bad, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                     {part});
    }
    leave(session, op);
  });
}

/// Rows [floor(rows part / parts), floor(rows (part + 1) / parts)).
RowRange exact_part(std::uint64_t rows, std::uint64_t parts, std::uint64_t part) {
  using Wide = unsigned __int128;
  const auto before = [&](Wide of) { return static_cast<std::uint64_t>(Wide{rows} * of / parts); };
  return {before(part), before(Wide{part} + 1) - before(part)};
}

// Whatever the numbers: ranks that are there have their parts, others no rows; nothing is needed.
TEST(CApiRows, AreOfTheRanksThatAreThere) {
  constexpr std::uint32_t kWorlds[] = {0, 1, 2, 3, 7, 8192, 1u << 31, (1u << 31) + 5, 0xffffffff};
  constexpr std::uint64_t kPoison = 99;
  for (const std::uint32_t world : kWorlds) {
    for (const std::uint32_t rank : {0u, 1u, 2u, 6u, 7u, 8191u, 8192u, (1u << 31) - 1, 1u << 31,
                                     world / 2, world - 1, world, world + 1, 0xffffffffu}) {
      for (const std::uint64_t rows : {0ull, 1ull, 10ull, 65537ull, (1ull << 31) - 1}) {
        SCOPED_TRACE(testing::Message() << rows << " rows, rank " << rank << " of " << world);
        const bool there = rank < world;
        std::uint64_t first = kPoison, count = kPoison;
        mk_rows_of_rank(rows, world, rank, &first, &count);
        const RowRange own = there ? exact_part(rows, world, rank) : RowRange{};
        EXPECT_EQ(own.first, first);
        EXPECT_EQ(own.count, count);
        mk_rows_of_rank(rows, world, rank, nullptr, nullptr);
        for (const std::uint32_t causal : {0u, 1u}) {
          RowRange parts[2] = {own, {}};
          if (there && causal != 0) {
            const std::uint64_t all = std::uint64_t{world} * 2;
            parts[0] = exact_part(rows, all, rank);
            parts[1] = exact_part(rows, all, all - 1 - rank);
          }
          std::uint64_t firsts[2] = {kPoison, kPoison}, counts[2] = {kPoison, kPoison};
          mk_sequence_rows_of_rank(rows, causal, world, rank, firsts, nullptr);
          mk_sequence_rows_of_rank(rows, causal, world, rank, nullptr, counts);
          for (int part = 0; part < 2; ++part) {
            EXPECT_EQ(parts[part].first, firsts[part]) << part;
            EXPECT_EQ(parts[part].count, counts[part]) << part;
          }
        }
      }
    }
  }
}

TEST(CApiRing, TakesBatches) {
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  auto shape = sized<mk_ring_shape>();
  shape.seq_max = 5;
  shape.query_heads = shape.key_heads = 2;
  shape.head_dim = 64;
  shape.batch = 3;
  shape.dtype = MK_BF16;
  mk_op* const op = create(session, "ring", &shape);
  constexpr std::uint64_t kRow = 128, kGap = 8, kBatch = 5 * kRow + kGap;
  // All values of a batch are the same, so its output is that; what is in the gaps is not.
  Elements values(3 * kBatch, 0x7fc0), out(3 * kBatch, 0xffff);
  Elements expected = out;
  for (std::uint64_t batch = 0; batch < 3; ++batch) {
    for (std::uint64_t i = 0; i < 5 * kRow; ++i)
      values[batch * kBatch + i] = expected[batch * kBatch + i] =
          static_cast<std::uint16_t>(0x3f80 + batch * 0x80);
  }
  auto arguments = sized<mk_ring_arguments>();
  arguments.q = arguments.k = arguments.v = values.data();
  arguments.out = out.data();
  arguments.seq = 5;
  arguments.q_batch_stride = arguments.k_batch_stride = arguments.v_batch_stride =
      arguments.out_batch_stride = kBatch;
  ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
  EXPECT_EQ(expected, out);
  for (const auto& [stride, part] : {std::pair{&mk_ring_arguments::q_batch_stride, "batches of q"},
                                     {&mk_ring_arguments::k_batch_stride, "batches of k"},
                                     {&mk_ring_arguments::v_batch_stride, "batches of v"},
                                     {&mk_ring_arguments::out_batch_stride, "batches of out"},
                                     {&mk_ring_arguments::lse_batch_stride, "batches of lse"},
                                     {&mk_ring_arguments::k_head_stride, "heads of k"},
                                     {&mk_ring_arguments::v_head_stride, "heads of v"}}) {
    auto bad = arguments;
    bad.*stride = 3;
    expect_refused(mk_op_launch(op, &bad, MK_FUSED, nullptr), ErrorCode::kInvalidArgument, {part});
  }
  leave(session, op);
}

TEST(CApiRing, TakesSequencesOfDifferentLengths) {
  const auto cluster = cluster_of(2);
  constexpr std::uint32_t kStarts[] = {0, 7, 8, 20};
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 1, rank);
    auto shape = sized<mk_ring_shape>();
    shape.seq_max = 20;
    shape.query_heads = shape.key_heads = 1;
    shape.head_dim = 64;
    shape.causal = 1;
    shape.sequences_max = 3;
    shape.dtype = MK_BF16;
    mk_op* const op = create(session, "ring", &shape);
    // All values of a sequence are the same, so its output is that.
    Elements values;
    std::vector<float> expected_lse;
    for (std::uint32_t sequence = 0; sequence < 3; ++sequence) {
      std::uint64_t first[2] = {}, count[2] = {};
      mk_sequence_rows_of_rank(kStarts[sequence + 1] - kStarts[sequence], 1, 2, rank, first, count);
      values.insert(values.end(), (count[0] + count[1]) * 64,
                    static_cast<std::uint16_t>(0x3f80 + sequence * 0x80));
      for (int part = 0; part < 2; ++part) {
        for (std::uint64_t row = first[part]; row < first[part] + count[part]; ++row)
          expected_lse.push_back(std::log(static_cast<float>(row + 1)));
      }
    }
    const Elements zeros(values.size(), 0);  // keys: all scores are 0
    Elements out(values.size(), 0xffff);
    std::vector<float> lse(expected_lse.size(), std::nanf(""));
    auto arguments = sized<mk_ring_arguments>();
    arguments.q = arguments.v = values.data();
    arguments.k = zeros.data();
    arguments.out = out.data();
    arguments.lse = lse.data();
    arguments.seq = 20;
    expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                   {"starts are null"});
    arguments.sequence_starts = kStarts;
    arguments.sequences = 3;
    ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
    EXPECT_EQ(values, out);
    for (std::size_t row = 0; row < lse.size(); ++row)
      EXPECT_NEAR(lse[row], expected_lse[row], 1e-5);
    leave(session, op);
  });
}

}  // namespace
}  // namespace mk
