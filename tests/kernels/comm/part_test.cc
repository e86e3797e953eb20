// Parts of a chunk: of bytes and of tiles' rows, each once, whatever the numbers.
#include "kernels/comm/part.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/comm/sum_job.h"

namespace mk::kernels {
namespace {

TEST(Part, OfBytesEachOnceInOrderAtTheCopyEnginesSteps) {
  for (std::uint32_t bytes = 0; bytes <= 400; ++bytes) {
    for (std::uint32_t count = 1; count <= 20; ++count) {
      const ByteRange whole{1000, bytes};
      std::uint64_t next = whole.begin;
      for (std::uint32_t index = 0; index < count; ++index) {
        const ByteRange part = part_of(whole, {index, count});
        if (part.bytes == 0) continue;
        ASSERT_EQ(part.begin, next) << bytes << " in " << count;
        ASSERT_EQ((part.begin - whole.begin) % 16, 0u);
        next += part.bytes;
      }
      ASSERT_EQ(next, whole.begin + bytes) << bytes << " in " << count;
    }
  }
}

TEST(Part, OfBytesAreAboutEqual) {
  const ByteRange part = part_of({0, 256 * 1024}, {3, 10});
  EXPECT_EQ(part.bytes, 26224u);  // 262144 / 10, rounded up to 16
  EXPECT_EQ(part.begin, 3u * 26224u);
}

// Also where a chunk has fewer tiles than others, and parts are no multiple of its tiles: shards
// whose tiles differ in height have chunks of different numbers of tiles.
TEST(Part, OfTilesEveryRowOnce) {
  constexpr std::uint32_t kRows = 11;
  for (std::uint32_t per_chunk = 1; per_chunk <= 9; ++per_chunk) {
    for (std::uint32_t tiles = 0; tiles <= per_chunk; ++tiles) {
      for (std::uint32_t count = 1; count <= 40; ++count) {
        std::vector<int> seen(tiles * kRows, 0);
        for (std::uint32_t index = 0; index < count; ++index) {
          const TilesPart part = part_of(TileRange{7, 7 + tiles}, per_chunk, {index, count});
          for (std::uint32_t tile = part.tiles.begin; tile < part.tiles.end; ++tile) {
            std::vector<std::uint16_t> memory(kRows);
            SumJob job;
            job.sources[0] = memory.data();
            job.source_count = 1;
            job.source_stride = 1;
            job.rows = kRows;
            if (!job.take(part.rows)) continue;
            const auto first = static_cast<const std::uint16_t*>(job.sources[0]) - memory.data();
            for (std::uint32_t row = 0; row < job.rows; ++row)
              ++seen.at((tile - 7) * kRows + static_cast<std::size_t>(first) + row);
          }
        }
        for (const int times : seen)
          ASSERT_EQ(times, 1) << tiles << " of " << per_chunk << " tiles in " << count;
      }
    }
  }
}

TEST(Part, OnePartIsAll) {
  EXPECT_EQ(part_of(ByteRange{5, 77}, {}).bytes, 77u);
  const TilesPart all = part_of(TileRange{3, 9}, 6, {});
  EXPECT_EQ(all.tiles.begin, 3u);
  EXPECT_EQ(all.tiles.end, 9u);
  EXPECT_EQ(all.rows.count, 1u);
}

}  // namespace
}  // namespace mk::kernels
