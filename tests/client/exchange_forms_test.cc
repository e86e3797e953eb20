// Tuning::exchange in jobs of three nodes and more: both forms of GEMM+AllReduce give every element
// within the bound of float64, and the same bits. So do they in a workspace that unlike operators
// share, and through the C ABI.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel.h"
#include "tests/client/c_calls.h"
#include "tests/client/embedded_ranks.h"
#include "tests/client/unlike_operators.h"

namespace mk {
namespace {

constexpr Exchange kForms[] = {Exchange::kOneShot, Exchange::kTwoShot};

Tuning tuning_of(Exchange form) {
  Tuning tuning;
  tuning.exchange = form;
  return tuning;
}

/// The random matrices of a launch, and what must come of them.
struct Product {
  std::uint64_t m, n, k;
  DataType type;
  std::uint64_t seed;

  Elements matrix(std::uint32_t rank, bool b) const {
    const std::uint64_t rows = b ? k : m;
    Elements all(rows * (b ? n : k));
    tools::RandomMatrix{77, seed * 1000 + rank * 2 + (b ? 1 : 0), b ? n : k, type}.rows(0, rows,
                                                                                        all.data());
    return all;
  }
  Elements bias() const {
    Elements all(n);
    tools::RandomMatrix{78, seed, n, type}.rows(0, 1, all.data());
    return all;
  }
  std::uint64_t wrong(const AttachOptions& at, const GemmAllReduce::Shape& shape,
                      const Elements& c) const {
    tools::GemmReference reference(m, n, at.nodes, at.local_size, type, shape.partials);
    for (std::uint32_t rank = 0; rank < at.world; ++rank)
      reference.add_rank(matrix(rank, false).data(), matrix(rank, true).data(), k, 1, 1);
    if (shape.epilogue.bias) reference.finish(shape.epilogue.activation, bias());
    return reference.compare(c.data()).wrong;
  }
};

/// A rank's bytes are those of all ranks.
void expect_alike(Session& session, const Elements& c) {
  const auto all = session.exchange("alike", std::as_bytes(std::span(c)));
  ASSERT_TRUE(all) << all.error().message;
  for (const auto& one : *all) EXPECT_EQ(one, all->front());
}

class ExchangeForms : public testing::TestWithParam<EmbeddedWorld> {};

TEST_P(ExchangeForms, AreRightAndHaveTheSameBits) {
  const auto [nodes, locals, fabric, type] = GetParam();
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  constexpr std::uint64_t kM = 100, kN = 72, kK = 24;
  for_ranks(nodes * locals, [&, locals = locals, type = type](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "forms"));
    ASSERT_TRUE(session) << session.error().message;
    std::uint64_t seed = 0;
    for (const Partials partials : {Partials::kElement, Partials::kF32}) {
      for (const bool finishes : {false, true}) {
        GemmAllReduce::Shape shape{kM, kN, kK, type};
        shape.partials = partials;
        if (finishes) shape.epilogue = {Activation::kGelu, true};
        std::vector<GemmAllReduce> forms;
        for (const Exchange form : kForms) {
          auto tuning = tuning_of(form);
          tuning.tile_m = 16;  // more tiles than nodes
          tuning.tile_n = 24;
          auto op = GemmAllReduce::create(*session, shape, tuning);
          ASSERT_TRUE(op) << op.error().message;
          forms.push_back(std::move(*op));
        }
        for (const std::uint64_t m : {kM, std::uint64_t{1}, std::uint64_t{17}, kM, kM - 1}) {
          const Product product{m, kN, kK, type, ++seed};
          const Elements a = product.matrix(rank, false), b = product.matrix(rank, true);
          const Elements bias = product.bias();
          std::vector<Elements> results;
          std::uint64_t sent[2] = {};
          for (const LaunchMode mode : {LaunchMode::kFused, LaunchMode::kUnfused}) {
            for (std::size_t i = 0; i < forms.size(); ++i) {
              Elements c(m * kN, 0x7fff);  // a NaN in either type
              const GemmArguments arguments{a.data(), b.data(), c.data(), m,
                                            finishes ? bias.data() : nullptr};
              const auto stats = forms[i].launch(arguments, mode);
              ASSERT_TRUE(stats) << stats.error().message;
              EXPECT_EQ(0u, product.wrong(session->options(), shape, c)) << "m " << m;
              sent[i] = stats->network_bytes;
              results.push_back(std::move(c));
            }
          }
          for (const Elements& c : results) EXPECT_EQ(results.front(), c) << "m " << m;
          expect_alike(*session, results.front());
          // 2 (N - 1) / N of a share, not N - 1 times it. Headers and the last tiles' rests remain.
          if (m == kM) {
            EXPECT_LT(sent[1], sent[0]) << "it is the form that was asked for";
          }
        }
      }
    }
    EXPECT_TRUE(session->barrier());
  });
}

// Words of its own, data in common with others: two-shot has two places more there.
TEST_P(ExchangeForms, ShareAWorkspaceWithUnlikeOperators) {
  const auto [nodes, locals, fabric, type] = GetParam();
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for_ranks(nodes * locals, [&, locals = locals, type = type](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "turns"));
    ASSERT_TRUE(session) << session.error().message;
    const AttachOptions& at = session->options();
    std::vector<std::pair<GemmAllReduce, GemmAllReduce::Shape>> products;
    std::vector<test::AnyOperator> others;
    const auto add = [&](const GemmAllReduce::Shape& shape, Exchange form) {
      auto op = GemmAllReduce::create(*session, shape, tuning_of(form));
      ASSERT_TRUE(op) << op.error().message;
      products.emplace_back(std::move(*op), shape);
    };
    add({64, 64, 16, type}, Exchange::kTwoShot);
    for (const test::Kind kind : test::kKinds) {
      auto op = test::AnyOperator::create(*session, kind, 0);
      ASSERT_TRUE(op) << op.error().message;
      others.push_back(std::move(*op));
    }
    add({150, 136, 24, type}, Exchange::kTwoShot);
    add({64, 64, 16, type}, Exchange::kOneShot);
    add({33, 40, 24, type}, Exchange::kTwoShot);
    EXPECT_EQ(nullptr, products[0].first.output()) << "it shares its workspace";
    std::mt19937_64 random(seed);  // the same on all ranks
    for (std::uint64_t number = 1; number <= 60; ++number) {
      const std::uint64_t dice = random();
      if (dice % 3 == 0) {
        const Status right =
            others[dice / 3 % others.size()].launch(static_cast<std::uint32_t>(1 + dice / 64 % 4));
        ASSERT_TRUE(right) << "launch " << number << ": " << right.error().message;
        continue;
      }
      auto& [op, shape] = products[dice / 3 % products.size()];
      const Product product{1 + dice / 64 % shape.m_max, shape.n, shape.k, type, number};
      Elements c(product.m * product.n, 0x7fff);
      const auto stats =
          op.launch(product.matrix(rank, false).data(), product.matrix(rank, true).data(), c.data(),
                    product.m, dice / 8192 % 4 == 0 ? LaunchMode::kUnfused : LaunchMode::kFused);
      ASSERT_TRUE(stats) << "launch " << number << ": " << stats.error().message;
      ASSERT_EQ(0u, product.wrong(at, shape, c)) << "launch " << number;
      if (number % 20 == 10) add({40 + 8 * number, 72, 8, type}, Exchange::kTwoShot);
    }
    EXPECT_TRUE(session->barrier());
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ExchangeForms,
                         testing::Values(EmbeddedWorld{3, 1, "loopback", DataType::kF16},
                                         EmbeddedWorld{3, 2, "loopback", DataType::kBf16},
                                         EmbeddedWorld{4, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{4, 1, "ofi", DataType::kF16}),
                         name_of_world);

TEST(CApiExchange, ForcesEitherForm) {
  constexpr std::uint32_t kNodes = 3;
  constexpr std::uint64_t kM = 70, kN = 48, kK = 16;
  const auto cluster = cluster_of(kNodes);
  for_ranks(kNodes, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 1, rank);
    ASSERT_NE(nullptr, session);
    const Product product{kM, kN, kK, DataType::kBf16, 5};
    const Elements a = product.matrix(rank, false), b = product.matrix(rank, true);
    std::vector<Elements> results;
    std::vector<std::uint64_t> sent;
    for (const std::uint32_t form : {1u, 2u}) {
      auto tuning = sized<mk_tuning>();
      tuning.exchange = form;
      auto shape = sized<mk_gemm_shape>();
      shape.tuning = &tuning;
      shape.m_max = kM;
      shape.n = kN;
      shape.k = kK;
      shape.dtype = MK_BF16;
      mk_op* const op = create(session, "gemm-ar", &shape);
      ASSERT_NE(nullptr, op);
      Elements c(kM * kN, 0x7fff);
      const auto arguments = gemm_arguments(a.data(), b.data(), c.data(), kM);
      auto stats = sized<mk_launch_stats>();
      ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, &stats)) << mk_last_error();
      const auto at = place(*cluster, 1, rank, "c");
      EXPECT_EQ(0u, product.wrong(at, {kM, kN, kK, DataType::kBf16}, c));
      results.push_back(c);
      sent.push_back(stats.network_bytes);
      mk_op_destroy(op);
    }
    EXPECT_EQ(results[0], results[1]);
    EXPECT_LT(sent[1], sent[0]);
    leave(session);
  });
}

TEST(CApiExchange, ATwoShotFormOfTwoNodesIsRefusedInWords) {
  const auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 1, rank);
    ASSERT_NE(nullptr, session);
    auto tuning = sized<mk_tuning>();
    auto shape = square_shape(32);
    shape.tuning = &tuning;
    mk_op* op = nullptr;
    tuning.exchange = 2;
    expect_refused(mk_op_create(session, "gemm-ar", &shape, &op), ErrorCode::kInvalidArgument,
                   {"two-shot", "three nodes"});
    tuning.exchange = 3;
    expect_refused(mk_op_create(session, "gemm-ar", &shape, &op), ErrorCode::kInvalidArgument,
                   {"exchange 3"});
    leave(session);
  });
}

}  // namespace
}  // namespace mk
