// The steps of copy engines in a launch, for rows, pieces and chunks of any sizes, in either order.
#include "kernels/gather/engine_steps.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/gather/plan.h"

namespace mk::kernels::gather {
namespace {

/// The steps of engines, in order.
struct Recorder {
  const GatherSchedule& gather;
  std::uint32_t rows;
  std::vector<std::uint64_t> copied;      ///< by turn: bytes so far
  std::vector<std::uint32_t> shown;       ///< by turn: chunks so far, the header first
  std::vector<std::uint32_t> turns = {};  ///< of the copies
  std::uint32_t yields = 0;

  Recorder(const GatherSchedule& schedule, std::uint32_t own)
      : gather(schedule),
        rows(own),
        copied(schedule.world().locals),
        shown(schedule.world().locals, 1) {}

  Status copy(std::uint32_t turn, std::uint64_t begin, std::uint64_t end) {
    EXPECT_EQ(begin, copied.at(turn));
    EXPECT_LT(begin, end);
    copied[turn] = end;
    turns.push_back(turn);
    return {};
  }
  Status show(std::uint32_t turn, ChunkRange chunks) {
    EXPECT_EQ(chunks.begin, shown.at(turn));
    EXPECT_LT(chunks.begin, chunks.end);
    shown[turn] = chunks.end;
    check_shown(turn);
    return {};
  }
  Status yield() {
    ++yields;
    check_shown(turns.back());
    return {};
  }
  /// All chunks that are there as a whole are shown, and none else.
  void check_shown(std::uint32_t turn) const {
    EXPECT_LE(gather.rows_in(shown[turn], rows) * std::uint64_t{gather.geometry().row_bytes},
              copied[turn]);
    const ByteRange next = gather.chunk_range(rows, shown[turn]);
    if (shown[turn] < gather.chunks(rows)) {
      EXPECT_GT(next.begin + next.bytes - kGatherHeaderBytes, copied[turn]);
    }
  }
};

// To each of the node's others: every byte once, in order, and each chunk once, when its bytes are
// there.
TEST(EngineSteps, EveryByteIsBroughtAndEveryChunkShownOnce) {
  for (const std::uint32_t nodes : {1u, 2u}) {
    for (const std::uint32_t locals : {2u, 3u, 8u}) {
      for (const std::uint32_t chunk_bytes : {64u, 4096u, 100000u}) {
        const auto plan = GatherPlan::make("test", nodes, locals, {300, 136},
                                           GatherKind::kBroadcast, chunk_bytes, 2, 1);
        ASSERT_TRUE(plan) << plan.error().message;
        const GatherSchedule gather(*plan, World{nodes, locals, 0, 0});
        for (const std::uint32_t rows : {0u, 1u, 7u, 300u}) {
          const std::uint64_t bytes = gather.data_bytes(rows);
          for (const std::uint64_t piece : {std::uint64_t{100}, std::uint64_t{4096}, bytes + 1}) {
            for (const PieceOrder order : {PieceOrder::kRankByRank, PieceOrder::kPieceByPiece}) {
              Recorder record(gather, rows);
              ASSERT_TRUE(bring_rows(gather, rows, piece, order, record));
              const auto pieces = static_cast<std::uint32_t>((bytes + piece - 1) / piece);
              EXPECT_EQ(record.turns.size(), pieces * (locals - 1));
              EXPECT_EQ(record.yields, nodes > 1 ? record.turns.size() : 0);
              for (std::uint32_t turn = 1; turn < locals; ++turn) {
                EXPECT_EQ(record.copied[turn], bytes);
                EXPECT_EQ(record.shown[turn], gather.chunks(rows));
              }
              for (std::uint32_t i = 0; i < record.turns.size(); ++i) {
                const bool by_rank = order == PieceOrder::kRankByRank;
                EXPECT_EQ(record.turns[i], 1 + (by_rank ? i / pieces : i % (locals - 1)));
              }
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

// A failure is told, and nothing is queued behind it.
TEST(EngineSteps, AFailureEndsThem) {
  struct Failing {
    std::uint32_t left;
    Status step() {
      if (left == 0) return fail(ErrorCode::kSystem, "no more");
      --left;
      return {};
    }
    Status copy(std::uint32_t, std::uint64_t, std::uint64_t) { return step(); }
    Status show(std::uint32_t, ChunkRange) { return step(); }
    Status yield() { return step(); }
  };
  const auto plan = GatherPlan::make("test", 2, 2, {300, 136}, GatherKind::kBroadcast, 4096, 2, 1);
  ASSERT_TRUE(plan);
  const GatherSchedule gather(*plan, World{2, 2, 0, 0});
  for (std::uint32_t left = 0; left < 30; ++left) {
    Failing engines{left};
    const Status brought = bring_rows(gather, 300, 4096, PieceOrder::kPieceByPiece, engines);
    ASSERT_FALSE(brought);
    EXPECT_EQ(engines.left, 0u);
  }
  EXPECT_TRUE(bring_rows(gather, 300, 4096, PieceOrder::kPieceByPiece, Failing{30}));
}

}  // namespace
}  // namespace mk::kernels::gather
