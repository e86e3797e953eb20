/// \file
/// With Tuning::batch_invariant a row's bits do not depend on how many rows there are, nor on
/// tiles: the same rows in launches of other sizes, every element, of every operator and in any
/// executor.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel.h"
#include "tests/client/embedded_ranks.h"

namespace mk::test {

/// Where an executor reads and writes: of the calling rank's thread.
class Memory {
 public:
  virtual ~Memory() = default;
  /// Before a rank's first operator.
  virtual void choose_device(std::uint32_t /*rank*/) const {}
  virtual std::shared_ptr<void> room(std::size_t bytes) const = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) const = 0;
};

class HostMemory : public Memory {
 public:
  std::shared_ptr<void> room(std::size_t bytes) const override {
    return {::operator new(bytes + 1), [](void* memory) { ::operator delete(memory); }};
  }
  void copy(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

/// The bits of rows, by the rows' names: a row that is brought again must have the same ones. Any
/// thread.
class SameRows {
 public:
  using Name = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

  template <class Element>
  void take(const Name& name, std::span<const Element> row) {
    const auto bytes = std::as_bytes(row);
    std::lock_guard lock(mutex_);
    const auto [at, is_new] =
        rows_.try_emplace(name, std::vector<std::byte>(bytes.begin(), bytes.end()));
    if (is_new) return;
    ++compared_;
    const auto [mine, theirs] =
        std::mismatch(at->second.begin(), at->second.end(), bytes.begin(), bytes.end());
    EXPECT_TRUE(mine == at->second.end() && theirs == bytes.end())
        << "row " << std::get<0>(name) << " " << std::get<1>(name) << " " << std::get<2>(name)
        << " has other bits from byte " << mine - at->second.begin() << " on";
  }
  std::size_t compared() const { return compared_; }

 private:
  std::mutex mutex_;
  std::map<Name, std::vector<std::byte>> rows_;
  std::size_t compared_ = 0;
};

/// One size of the problem, and how its tiles are cut (0: chosen).
struct BatchSize {
  std::uint64_t rows;
  std::uint64_t rows_max;
  std::uint32_t tile_m, tile_n;
};

/// A world and what it computes; a function for each operator, which fails as tests do.
class RowBits {
 public:
  using Elements = std::vector<std::uint16_t>;

  const Memory& memory;
  Executor executor;
  EmbeddedWorld world_of;
  std::vector<BatchSize> sizes;
  /// Columns, and a depth of several panels or tiles of K.
  std::uint64_t n, k;
  std::vector<BLayout> layouts;
  bool epilogues;     ///< whether products have a bias and an activation, and experts gates
  bool expert_tiles;  ///< whether Tuning's tiles are for experts, too
  std::uint64_t seq;
  std::vector<std::uint32_t> query_tiles;

  void all_gather_gemm() const {
    SameRows same;
    for_sessions([&](Session& session, std::uint32_t rank) {
      for (const BLayout layout : layouts) {
        const auto b = bring(weights(100, k, n, layout));
        for (const BatchSize& size : sizes) {
          auto op = AllGatherGemm::create(session, {size.rows_max, n, k, type(), layout},
                                          tuning_of<Tuning>(size));
          ASSERT_TRUE(op) << op.error().message;
          const RowRange mine = AllGatherGemm::rows_of(size.rows, world(), rank);
          const auto a = bring(inputs(0, mine.count, mine.first));
          const auto c = poisoned<std::uint16_t>(size.rows * n);
          const auto stats =
              alone(session, [&] { return op->launch(a.get(), b.get(), c.get(), size.rows); });
          ASSERT_TRUE(stats) << stats.error().message;
          const Elements got = fetch<std::uint16_t>(c, size.rows * n);
          for (std::uint64_t i = 0; i < size.rows; ++i) same.take({i, 0, 0}, row_of(got, i, n));
        }
      }
    });
    EXPECT_EQ(same.compared(), layouts.size() * rows_of_all() * world() - rows_most());
  }

  /// GemmReduceScatter or GemmAllReduce. `rows_of(m, rank)`: the rows of C that a rank gets;
  /// `copies`: ranks that get a row.
  template <class Op, class RowsOf>
  void products_that_sum(std::uint32_t copies, RowsOf&& rows_of) const {
    for (const Partials partials : {Partials::kElement, Partials::kF32}) {
      SameRows same;
      for_sessions([&](Session& session, std::uint32_t rank) {
        const bool cancels = this->cancels(rank);
        const auto b = bring(weights(100 + (cancels ? 0 : rank), k, n, layouts.front()));
        const auto bias = bring(matrix(99, 1, n));
        for (const BatchSize& size : sizes) {
          typename Op::Shape shape{size.rows_max, n, k, type(), layouts.front()};
          shape.partials = partials;
          const bool finishes = epilogues && partials == Partials::kElement;
          if (finishes) shape.epilogue = {Activation::kGelu, true};
          auto op = Op::create(session, shape, tuning_of<Tuning>(size));
          ASSERT_TRUE(op) << op.error().message;
          Elements drawn = inputs(cancels ? 0 : rank, size.rows);
          if (cancels) enlarge(drawn, rank);
          const auto a = bring(drawn);
          const RowRange mine = rows_of(size.rows, rank);
          const auto c = poisoned<std::uint16_t>(mine.count * n);
          GemmArguments given;
          given.a = a.get();
          given.b = b.get();
          given.c = c.get();
          if (finishes) given.bias = bias.get();
          given.m = size.rows;
          const auto stats = alone(session, [&] { return op->launch(given); });
          ASSERT_TRUE(stats) << stats.error().message;
          const Elements got = fetch<std::uint16_t>(c, mine.count * n);
          for (std::uint64_t i = 0; i < mine.count; ++i)
            same.take({mine.first + i, 0, 0}, row_of(got, i, n));
        }
      });
      EXPECT_EQ(same.compared(), rows_of_all() * copies - rows_most());
    }
  }
  void gemm_reduce_scatter() const {
    products_that_sum<GemmReduceScatter>(1, [this](std::uint64_t m, std::uint32_t rank) {
      return GemmReduceScatter::rows_of(m, world(), rank);
    });
  }
  void gemm_all_reduce() const {
    products_that_sum<GemmAllReduce>(world(), [](std::uint64_t m, std::uint32_t) {
      return RowRange{0, m};
    });
  }

  void reduce_scatter() const {
    SameRows same;
    for_sessions([&](Session& session, std::uint32_t rank) {
      for (const BatchSize& size : sizes) {
        auto op = ReduceScatter::create(session, {size.rows_max, n, type(), Partials::kF32},
                                        tuning_of<Tuning>(size));
        ASSERT_TRUE(op) << op.error().message;
        Elements drawn = matrix(cancels(rank) ? 0 : rank, size.rows, n);
        if (cancels(rank)) enlarge(drawn, rank);
        const auto input = bring(drawn);
        const RowRange mine = ReduceScatter::rows_of(size.rows, world(), rank);
        const auto output = poisoned<std::uint16_t>(mine.count * n);
        const auto stats =
            alone(session, [&] { return op->launch(input.get(), output.get(), size.rows); });
        ASSERT_TRUE(stats) << stats.error().message;
        const Elements got = fetch<std::uint16_t>(output, mine.count * n);
        for (std::uint64_t i = 0; i < mine.count; ++i)
          same.take({mine.first + i, 0, 0}, row_of(got, i, n));
      }
    });
    EXPECT_EQ(same.compared(), rows_of_all() - rows_most());
  }

  /// A layer of experts: each rank's first tokens, alone and among others, which fill the experts'
  /// tiles in other ways.
  void experts() const {
    constexpr std::uint64_t kInner = 72;
    // (In f16 the products of gates would be too small.)
    const bool gated = epilogues && type() == DataType::kBf16;
    SameRows products, sums;
    for_sessions([&](Session& session, std::uint32_t rank) {
      for (const BatchSize& size : sizes) {
        BatchSize tiles = size;
        if (!expert_tiles) tiles.tile_m = tiles.tile_n = 0;
        MoeDispatchGemm::Shape up_shape{size.rows_max, k, kInner, kExperts,
                                        kTopK,         0, type(), layouts.front()};
        if (gated) up_shape.epilogue = MoeEpilogue::kGatedSilu;
        auto dispatch =
            MoeDispatchGemm::create(session, up_shape, tuning_of<MoeDispatchGemm::Tuning>(tiles));
        ASSERT_TRUE(dispatch) << dispatch.error().message;
        auto combine = GemmCombine::create(
            session, {size.rows_max, n, kInner, kExperts, kTopK, type(), layouts.front()},
            tuning_of<GemmCombine::Tuning>(tiles));
        ASSERT_TRUE(combine) << combine.error().message;
        const std::uint32_t count = dispatch->expert_count();
        Elements up_all, down_all;
        for (std::uint32_t i = 0; i < count; ++i) {
          const std::uint32_t expert = dispatch->first_expert() + i;
          const Elements one =
              weights(200 + expert, k, (gated ? 2 : 1) * kInner, layouts.front(), kInner);
          up_all.insert(up_all.end(), one.begin(), one.end());
          const Elements other = weights(300 + expert, kInner, n, layouts.front());
          down_all.insert(down_all.end(), other.begin(), other.end());
        }
        std::vector<std::int32_t> slots;
        std::vector<float> factors;
        for (std::uint64_t i = 0; i < size.rows * kTopK; ++i) {
          slots.push_back(expert_of(rank, i));
          factors.push_back(static_cast<float>(slot_draw(rank, i) % 97) / 97);
        }
        const auto up = bring(up_all), down = bring(down_all);
        const auto tokens = bring(inputs(rank, size.rows));
        const auto ids = bring(slots), weights = bring(factors);
        const std::uint64_t room = world() * size.rows_max * kTopK;
        const auto y = poisoned<std::uint16_t>(room * kInner);
        const auto* const ids_there = static_cast<const std::int32_t*>(ids.get());
        const auto dispatched = alone(session, [&] {
          return dispatch->launch({tokens.get(), ids_there,
                                   static_cast<const float*>(weights.get()), size.rows, up.get()},
                                  {y.get(), room});
        });
        ASSERT_TRUE(dispatched) << dispatched.error().message;
        std::vector<std::uint32_t> offsets(count + std::size_t{1});
        memory.copy(offsets.data(), dispatch->expert_offsets().data(), offsets.size() * 4);
        std::vector<MoeRow> whose(offsets.back());
        memory.copy(whose.data(), dispatch->rows().data(), whose.size() * sizeof(MoeRow));
        const Elements product = fetch<std::uint16_t>(y, whose.size() * kInner);
        for (std::size_t i = 0; i < whose.size(); ++i)
          products.take({whose[i].rank, whose[i].token, whose[i].slot}, row_of(product, i, kInner));
        const auto out = poisoned<std::uint16_t>(size.rows * n);
        const auto combined = alone(session, [&] {
          return combine->launch({y.get(), dispatch->rows(), dispatch->expert_offsets(), down.get(),
                                  ids_there, size.rows},
                                 out.get());
        });
        ASSERT_TRUE(combined) << combined.error().message;
        const Elements sum = fetch<std::uint16_t>(out, size.rows * n);
        for (std::uint64_t i = 0; i < size.rows; ++i) sums.take({rank, i, 0}, row_of(sum, i, n));
      }
    });
    // The first launch with a row has nothing to compare it with: of each row that is one.
    std::uint64_t rows = 0;
    for (std::uint32_t rank = 0; rank < world(); ++rank) {
      for (const BatchSize& size : sizes) rows += routed(rank, size.rows);
      rows -= routed(rank, rows_most());
    }
    EXPECT_EQ(products.compared(), rows);
    EXPECT_EQ(sums.compared(), (rows_of_all() - rows_most()) * world());
  }

  /// A sequence alone, in a batch, with more heads, with a larger maximum, and packed behind
  /// another. Tiles of queries differ; those of keys are the same.
  void ring_attention() const {
    for (const bool causal : {false, true}) {
      SameRows same;
      std::size_t launches = 0;
      for_sessions([&](Session& session, std::uint32_t rank) {
        std::vector<Attention> all = {{seq, 1, 1, 0, false},
                                      {seq, 3, 1, 0, false},
                                      {10 * seq, 1, 1, 0, false},
                                      {seq + seq / 5, 1, 1, 0, true}};
        for (const std::uint32_t tile : query_tiles) all.push_back({seq, 1, 2, tile, false});
        for (const Attention& one : all) attend(session, rank, causal, one, same);
        if (rank == 0) launches = all.size();
      });
      EXPECT_EQ(same.compared(), (launches - 1) * 2 * seq);
    }
  }

 private:
  struct Attention {
    std::uint64_t seq_max;
    std::uint32_t batch, key_heads, tile_q;
    bool packed;
  };
  static constexpr std::uint32_t kDim = 64, kGroup = 2;

  std::uint32_t world() const { return world_of.nodes * world_of.locals; }
  DataType type() const { return world_of.type; }
  static constexpr std::uint32_t kExperts = 7, kTopK = 3;

  static std::uint64_t slot_draw(std::uint32_t rank, std::uint64_t slot) {
    return tools::mix64(rank * 1'000'000 + slot);
  }

  /// The expert of a slot of all the rank's tokens; some have none, -1.
  static std::int32_t expert_of(std::uint32_t rank, std::uint64_t slot) {
    return static_cast<std::int32_t>(slot_draw(rank, slot) % (kExperts + 1)) - 1;
  }

  /// The rows that a rank's first tokens become.
  static std::uint64_t routed(std::uint32_t rank, std::uint64_t tokens) {
    std::uint64_t rows = 0;
    for (std::uint64_t i = 0; i < tokens * kTopK; ++i) rows += expert_of(rank, i) >= 0 ? 1 : 0;
    return rows;
  }

  std::uint64_t rows_of_all() const {
    std::uint64_t rows = 0;
    for (const BatchSize& size : sizes) rows += size.rows;
    return rows;
  }
  std::uint64_t rows_most() const {
    std::uint64_t rows = 0;
    for (const BatchSize& size : sizes) rows = std::max(rows, size.rows);
    return rows;
  }

  Elements matrix(std::uint32_t which, std::uint64_t rows, std::uint64_t columns,
                  std::uint64_t first = 0) const {
    Elements elements(rows * columns);
    tools::RandomMatrix{31, which, columns, type()}.rows(first, rows, elements.data());
    return elements;
  }
  static constexpr std::uint16_t kSign = 0x8000;
  /// Rows of A whose second half is the first one's negative, from behind.
  Elements inputs(std::uint32_t which, std::uint64_t rows, std::uint64_t first = 0) const {
    Elements elements = matrix(which, rows, k, first);
    for (std::uint64_t i = 0; i < rows; ++i) {
      for (std::uint64_t j = 0; j < k / 2; ++j)
        elements[(i + 1) * k - 1 - j] = elements[i * k + j] ^ kSign;
    }
    return elements;
  }
  /// B, whose second half of rows is the first one, from behind. So the exact product of such
  /// inputs is 0, and the result is rounding alone, which shows the order of the sums.
  /// `negated`: the last so many columns are each other's negatives likewise, and so is what comes
  /// of them.
  Elements weights(std::uint32_t which, std::uint64_t depth, std::uint64_t columns, BLayout layout,
                   std::uint64_t negated = 0) const {
    const Elements drawn = matrix(which, depth, columns);
    Elements elements(depth * columns);
    for (std::uint64_t i = 0; i < depth; ++i) {
      for (std::uint64_t j = 0; j < columns; ++j) {
        const bool flips = j >= columns - negated / 2;
        const std::uint64_t from = flips ? 2 * columns - negated - 1 - j : j;
        const std::uint16_t bits =
            drawn[std::min(i, depth - 1 - i) * columns + from] ^ (flips ? kSign : 0);
        elements[layout == BLayout::kKN ? i * columns + j : j * depth + i] = bits;
      }
    }
    return elements;
  }
  /// Over three nodes and more the first ranks of the first two nodes cancel out. A small
  /// term that is added between them has been lost by then.
  bool cancels(std::uint32_t rank) const {
    return world_of.nodes > 2 && rank % world_of.locals == 0 && rank / world_of.locals < 2;
  }
  /// Multiplies bf16 by 2^20, or by its negative.
  static void enlarge(Elements& elements, std::uint32_t rank) {
    constexpr std::uint16_t kExponent = 20 << 7;
    for (std::uint16_t& element : elements)
      element = static_cast<std::uint16_t>((element + kExponent) ^ (rank != 0 ? kSign : 0));
  }
  template <class Element>
  static std::span<const Element> row_of(const std::vector<Element>& all, std::uint64_t row,
                                         std::uint64_t columns) {
    return std::span(all).subspan(row * columns, columns);
  }
  template <class Element>
  std::shared_ptr<void> bring(const std::vector<Element>& elements) const {
    auto there = memory.room(elements.size() * sizeof(Element));
    memory.copy(there.get(), elements.data(), elements.size() * sizeof(Element));
    return there;
  }
  template <class Element>
  std::shared_ptr<void> poisoned(std::uint64_t count) const {
    std::vector<Element> poison(count);
    std::memset(poison.data(), 0xff, count * sizeof(Element));
    return bring(poison);
  }
  template <class Element>
  std::vector<Element> fetch(const std::shared_ptr<void>& there, std::uint64_t count) const {
    std::vector<Element> elements(count);
    memory.copy(elements.data(), there.get(), count * sizeof(Element));
    return elements;
  }
  template <class Tuned>
  Tuned tuning_of(const BatchSize& size) const {
    Tuned tuning;
    tuning.executor = executor;
    tuning.batch_invariant = true;
    tuning.tile_m = size.tile_m;
    tuning.tile_n = size.tile_n;
    return tuning;
  }

  /// What `launch()` answers, while no rank takes or frees memory: where ranks share a GPU, that
  /// would wait for the others' kernels, which wait for this rank.
  template <class Launch>
  static std::invoke_result_t<Launch> alone(Session& session, Launch&& launch) {
    EXPECT_TRUE(session.barrier());
    auto launched = launch();
    EXPECT_TRUE(session.barrier());
    return launched;
  }

  /// `body(session, rank)` for each rank.
  template <class Body>
  void for_sessions(Body&& body) const {
    const auto cluster = cluster_of(world_of.nodes, world_of.fabric);
    ASSERT_NE(nullptr, cluster);
    for_ranks(world(), [&](std::uint32_t rank) {
      memory.choose_device(rank);
      auto session = Session::attach(place(*cluster, world_of.locals, rank, "rows"));
      ASSERT_TRUE(session) << session.error().message;
      body(*session, rank);
      EXPECT_TRUE(session->barrier());
    });
  }

  /// This rank's rows of Q, K or V (`which`: 0, 1, 2). The first head of the sequence comes of the
  /// same matrices whatever the launch, all else of others.
  Elements tensor(std::uint32_t which, const Attention& one, const SequenceRows& own,
                  const SequenceRows& other) const {
    const std::uint64_t first_heads = (which == 0 ? kGroup : 1) * kDim;
    const std::uint64_t width = first_heads * one.key_heads;
    Elements all;
    const auto add = [&](const SequenceRows& rows, std::uint32_t salt, bool is_same) {
      for (const RowRange& part : rows.parts) {
        const Elements same =
            matrix(which + (is_same ? 0 : 50), part.count, first_heads, part.first);
        const Elements rest = matrix(which + 10 + salt, part.count, width, part.first);
        for (std::uint64_t row = 0; row < part.count; ++row) {
          const auto mine = row_of(same, row, first_heads);
          const auto others = row_of(rest, row, width).subspan(first_heads);
          all.insert(all.end(), mine.begin(), mine.end());
          all.insert(all.end(), others.begin(), others.end());
        }
      }
    };
    if (one.packed) add(other, 20, false);
    for (std::uint32_t i = 0; i < one.batch; ++i) add(own, 5 * i, i == 0);
    return all;
  }

  void attend(Session& session, std::uint32_t rank, bool causal, const Attention& one,
              SameRows& same) const {
    const SequenceRows own = sequence_rows_of_rank(seq, causal, world(), rank);
    const SequenceRows other = sequence_rows_of_rank(seq / 5, causal, world(), rank);
    const std::uint32_t heads = kGroup * one.key_heads;
    RingAttention::Shape shape{one.seq_max, heads, one.key_heads, kDim, causal, type()};
    shape.batch = one.batch;
    shape.sequences_max = one.packed ? 2 : 0;
    auto op = RingAttention::create(session, shape,
                                    tuning_of<RingAttention::Tuning>({0, 0, one.tile_q, 0}));
    ASSERT_TRUE(op) << op.error().message;
    const auto q = bring(tensor(0, one, own, other)), k_there = bring(tensor(1, one, own, other)),
               v = bring(tensor(2, one, own, other));
    const std::uint64_t before = one.packed ? other.count() : 0;
    const std::uint64_t rows = before + one.batch * own.count();
    const auto out = poisoned<std::uint16_t>(rows * heads * kDim);
    const auto lse = poisoned<float>(rows * heads);
    const std::uint64_t total = one.packed ? seq + seq / 5 : seq;
    const auto starts = bring(std::vector<std::uint32_t>{0, static_cast<std::uint32_t>(seq / 5),
                                                         static_cast<std::uint32_t>(total)});
    RingAttention::Input input;
    input.q = q.get();
    input.k = k_there.get();
    input.v = v.get();
    if (one.packed) {
      input.sequence_starts = static_cast<const std::uint32_t*>(starts.get());
      input.sequences = 2;
      input.rows = rows;
    }
    RingAttention::Output output;
    output.out = out.get();
    output.lse = static_cast<float*>(lse.get());
    const auto stats = alone(session, [&] { return op->launch(input, output, total); });
    ASSERT_TRUE(stats) << stats.error().message;
    const Elements o = fetch<std::uint16_t>(out, rows * heads * kDim);
    const auto l = fetch<float>(lse, rows * heads);
    for (std::uint64_t row = 0; row < own.count(); ++row) {
      same.take({rank, row, 0}, row_of(o, before + row, heads * kDim).first(kGroup * kDim));
      same.take({rank, row, 1}, row_of(l, before + row, heads).first(kGroup));
    }
  }
};

}  // namespace mk::test
