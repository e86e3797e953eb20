/// \file
/// Sums, and wrong arguments, of an operator class `Op` whose Shape is {m_max, n, k, ...} and whose
/// launch is (a, b, c, m): in a world of one rank, where all of these compute C = A B.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "tests/client/embedded_ranks.h"

namespace mk {

/// Many launches of changing m (also fewer rows than ranks) in both modes: fresh inputs, poisoned
/// outputs, every element of every rank's rows. `rows_of(m, world, rank)`: those that it gets.
template <class Op, class RowsOf>
void expect_sums_over_ranks(const EmbeddedWorld& in, RowsOf&& rows_of) {
  using Elements = std::vector<std::uint16_t>;
  const std::uint32_t world = in.nodes * in.locals;
  constexpr std::uint64_t kM = 70, kN = 136, kK = 33;
  constexpr std::uint32_t kLaunches = 7;
  const auto cluster = cluster_of(in.nodes, in.fabric);
  ASSERT_NE(nullptr, cluster);
  const auto m_of = [](std::uint32_t launch) { return 1 + launch * 23 % kM; };
  const auto matrix = [&](std::uint32_t launch, std::uint32_t rank, bool b) {
    const tools::RandomMatrix drawn{99, launch * 1000 + rank * 2 + b, b ? kN : kK, in.type};
    const std::uint64_t rows = b ? kK : m_of(launch);
    Elements elements(rows * (b ? kN : kK));
    drawn.rows(0, rows, elements.data());
    return elements;
  };
  std::vector<std::vector<Elements>> outputs(kLaunches, std::vector<Elements>(world));
  for_ranks(world, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, in.locals, rank, "world"));
    ASSERT_TRUE(session) << session.error().message;
    auto op = Op::create(*session, {kM, kN, kK, in.type});
    ASSERT_TRUE(op) << op.error().message;
    for (std::uint32_t launch = 0; launch < kLaunches; ++launch) {
      const std::uint64_t m = m_of(launch);
      Elements& c = outputs[launch][rank];
      c.assign(rows_of(m, world, rank).count * kN, 0xffff);
      const Elements a = matrix(launch, rank, false);
      const Elements b = matrix(launch, rank, true);
      const auto stats = op->launch(a.data(), b.data(), c.empty() ? nullptr : c.data(), m,
                                    launch % 3 == 2 ? LaunchMode::kUnfused : LaunchMode::kFused);
      ASSERT_TRUE(stats) << stats.error().message;
      EXPECT_EQ(launch + 1, stats->epoch);
    }
    EXPECT_TRUE(session->barrier());
  });
  if (testing::Test::HasFailure()) return;
  for (std::uint32_t launch = 0; launch < kLaunches; ++launch) {
    const std::uint64_t m = m_of(launch);
    tools::GemmReference reference(m, kN, in.nodes, in.locals, in.type);
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      reference.add_rank(matrix(launch, rank, false).data(), matrix(launch, rank, true).data(), kK,
                         1, 1);
    }
    // Ranks that get the same rows get the same bits.
    Elements whole(m * kN, 0xffff);
    std::vector<bool> known(m);
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      const RowRange rows = rows_of(m, world, rank);
      const Elements& c = outputs[launch][rank];
      if (rows.count == 0) continue;
      const auto to = whole.begin() + static_cast<std::ptrdiff_t>(rows.first * kN);
      if (known[rows.first]) {
        EXPECT_TRUE(std::equal(c.begin(), c.end(), to)) << "launch " << launch << " rank " << rank;
      }
      std::copy(c.begin(), c.end(), to);
      known[rows.first] = true;
    }
    EXPECT_EQ(0u, reference.compare(whole.data()).wrong) << "launch " << launch;
  }
}

/// Each is refused with kInvalidArgument, and the operator then works as if nothing had been.
template <class Op>
void expect_wrong_gemm_arguments_change_nothing() {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "arguments"));
  ASSERT_TRUE(session);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, {0, 8, 8}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, {8, 0, 8}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, {8, 8, 0}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            Op::create(*session, {8, 8, 8, static_cast<DataType>(9)}).error().code);
  auto op = Op::create(*session, {8, 8, 8});
  ASSERT_TRUE(op) << op.error().message;
  const std::vector<std::uint16_t> ones(64, 0x3f80);
  std::vector<std::uint16_t> c(64, 0xffff);
  const auto refused = [&](const void* a, const void* b, void* out, std::uint64_t m) {
    EXPECT_EQ(ErrorCode::kInvalidArgument, op->launch(a, b, out, m).error().code);
  };
  refused(ones.data(), ones.data(), c.data(), 9);
  refused(ones.data(), ones.data(), c.data(), 0);
  refused(nullptr, ones.data(), c.data(), 8);
  refused(ones.data(), nullptr, c.data(), 8);
  refused(ones.data(), ones.data(), nullptr, 8);
  ASSERT_TRUE(op->launch(ones.data(), ones.data(), c.data(), 8));
  for (const std::uint16_t element : c) EXPECT_EQ(0x4100, element);  // 8.0
}

/// Pitches, and a C beside A in rows of one buffer; what is refused of them, by its words.
template <class Op>
void expect_pitches_are_followed_and_checked() {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "pitches"));
  ASSERT_TRUE(session);
  auto op = Op::create(*session, {4, 8, 8});
  ASSERT_TRUE(op) << op.error().message;
  constexpr std::uint16_t kOne = 0x3f80, kEight = 0x4100, kNaN = 0xffff;
  // Rows of 32: A, then a gap, then C, then a gap.
  std::vector<std::uint16_t> rows(4 * 32, kNaN);
  std::vector<std::uint16_t> b(8 * 11, kNaN);
  for (std::size_t i = 0; i < 4 * 8; ++i) rows[i / 8 * 32 + i % 8] = kOne;
  for (std::size_t i = 0; i < 8 * 8; ++i) b[i / 8 * 11 + i % 8] = kOne;
  GemmArguments given;
  given.a = rows.data();
  given.b = b.data();
  given.c = rows.data() + 16;
  given.m = 4;
  given.lda = given.ldc = 32;
  given.ldb = 11;
  const auto stats = op->launch(given);
  ASSERT_TRUE(stats) << stats.error().message;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t column = i % 32;
    const bool in_c = column >= 16 && column < 24;
    EXPECT_EQ(rows[i], column < 8 ? kOne : in_c ? kEight : kNaN) << i;
  }
  const auto refused = [&](auto change, const char* words) {
    GemmArguments wrong = given;
    change(wrong);
    const auto answer = op->launch(wrong);
    ASSERT_FALSE(answer) << words;
    EXPECT_EQ(ErrorCode::kInvalidArgument, answer.error().code);
    EXPECT_NE(std::string::npos, answer.error().message.find(words)) << answer.error().message;
  };
  refused([](GemmArguments& of) { of.lda = 7; }, "lda = 7 is too small: rows of a have 8");
  refused([](GemmArguments& of) { of.ldb = 7; }, "ldb = 7 is too small");
  refused([](GemmArguments& of) { of.ldc = 7; }, "ldc = 7 is too small");
  refused([&](GemmArguments& of) { of.c = rows.data() + 7; }, "shares memory with a (4 rows of 16");
  refused([&](GemmArguments& of) { of.c = b.data() + 70, of.m = 1; }, "shares memory with b");
  refused([&](GemmArguments& of) { of.bias = b.data(); }, "bias is given");
  ASSERT_TRUE(op->launch(given));
}

/// C = silu of gates times ups, with a bias: of each of Op's launches in a world of one rank.
template <class Op>
void expect_an_epilogue() {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "epilogue"));
  ASSERT_TRUE(session);
  typename Op::Shape shape{4, 8, 8};
  shape.epilogue = {Activation::kGatedSilu, true};
  auto op = Op::create(*session, shape);
  ASSERT_TRUE(op) << op.error().message;
  const std::vector<std::uint16_t> ones(64, 0x3f80);
  // Gates are 8 - 8 = 0, but the last, 8 + 56 = 64; ups are 8 + 8 = 16.
  const std::vector<std::uint16_t> bias = {0xc100, 0x4100, 0xc100, 0x4100,
                                           0xc100, 0x4100, 0x4260, 0x4100};
  std::vector<std::uint16_t> c(4 * 4 + 1, 0xffff);
  GemmArguments given;
  given.a = given.b = ones.data();
  given.bias = bias.data();
  given.c = c.data();
  given.m = 4;
  const auto stats = op->launch(given);
  ASSERT_TRUE(stats) << stats.error().message;
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(c[i], i % 4 == 3 ? 0x4480 : 0) << i;  // 1024
  EXPECT_EQ(c[16], 0xffff);
  given.bias = nullptr;
  EXPECT_EQ(ErrorCode::kInvalidArgument, op->launch(given).error().code);
  shape.epilogue.activation = static_cast<Activation>(7);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, shape).error().code);
  shape.epilogue.activation = Activation::kGatedSilu;
  shape.n = 7;
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, shape).error().code);
}

}  // namespace mk
