// How a GPU's groups share what there is to do: arithmetic of the CUDA executor that the host can
// check.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "kernels/comm/sum_job.h"
#include "kernels/cuda/chunk_steps.h"
#include "kernels/cuda/launch_state.h"

namespace mk::kernels {
namespace {

using cuda::ChunkSteps;
using cuda::kGroupsOfBlock;
using cuda::spread_stream;
using cuda::tile_parts;

// Every group gets a number of its own, below their count; and as long as there are blocks of which
// no group has one, the next number goes to such a block.
TEST(GpuGroups, StreamsAreSpreadOverTheBlocksFirst) {
  for (std::uint32_t before = 0; before <= 8; ++before) {
    for (std::uint32_t streams = 1; streams <= 70; ++streams) {
      std::vector<std::uint32_t> block_of(streams, 0xffffffffu);
      std::set<std::uint32_t> blocks;
      for (std::uint32_t index = 0; index < streams; ++index) {
        const std::uint32_t number = spread_stream(index, before, streams);
        ASSERT_LT(number, streams) << before;
        ASSERT_EQ(block_of[number], 0xffffffffu) << before << " twice " << number;
        block_of[number] = (before + index) / kGroupsOfBlock;
        blocks.insert(block_of[number]);
      }
      // The first of each block whose first group streams come first, one a block.
      const std::uint32_t whole = (before + streams - 1) / kGroupsOfBlock + 1 -
                                  (before + kGroupsOfBlock - 1) / kGroupsOfBlock;
      std::set<std::uint32_t> first;
      for (std::uint32_t number = 0; number < whole; ++number) first.insert(block_of[number]);
      EXPECT_EQ(first.size(), whole) << before << " " << streams;
    }
  }
}

// Who polls, sends and receives comes first: no group of that block or a later one does, one of the
// block before it does.
TEST(GpuGroups, BlocksThatOnlyStreamFollowThoseThatSeeTheLaunchToItsEnd) {
  constexpr std::uint32_t kCompute = 7;
  for (std::uint32_t pollers = 0; pollers <= 1; ++pollers) {
    for (std::uint32_t send = 0; send <= 4; ++send) {
      for (std::uint32_t receive = 0; receive <= 40; ++receive) {
        cuda::FrameArguments frame;
        frame.pollers = pollers;
        RoleBlocks blocks;
        blocks.compute = kCompute;
        blocks.send = send;
        blocks.receive = receive;
        std::uint32_t after_last = kCompute;
        for (std::uint32_t group = 0; group < pollers + send + receive; ++group)
          after_last = kCompute + group / kGroupsOfBlock + 1;
        ASSERT_EQ(cuda::first_streaming_block(frame, blocks), after_last)
            << pollers << " " << send << " " << receive;
      }
    }
  }
}

TEST(GpuGroups, FewTilesAreSummedInParts) {
  EXPECT_EQ(tile_parts(1), 8u);
  EXPECT_EQ(tile_parts(48), 8u);
  EXPECT_EQ(tile_parts(49), 4u);
  EXPECT_EQ(tile_parts(96), 4u);
  EXPECT_EQ(tile_parts(97), 2u);
  EXPECT_EQ(tile_parts(193), 1u);
  EXPECT_EQ(tile_parts(100000), 1u);
}

using Step = ChunkSteps::Step;

// Each part of each chunk is one step, chunk after chunk: whoever takes steps in their order finds
// the parts of a chunk next to each other.
void expect_each_part_once(const ChunkSteps& steps) {
  std::uint32_t step = 0;
  for (std::uint32_t chunk = 0; chunk < steps.chunks; ++chunk) {
    const bool whole = chunk >= steps.head && chunk < steps.head + steps.whole;
    const std::uint32_t parts = whole ? 1 : steps.parts;
    for (std::uint32_t part = 0; part < parts; ++part, ++step) {
      const Step found = steps.at(step);
      ASSERT_EQ(found.chunk, chunk) << "step " << step;
      ASSERT_EQ(found.part.index, part) << "step " << step;
      ASSERT_EQ(found.part.count, parts) << "step " << step;
    }
  }
  ASSERT_EQ(steps.count(), step);
}

// No two chunks that groups share in count their parts in one place.
void expect_places_of_their_own(const ChunkSteps& steps) {
  std::vector<std::uint32_t> user(cuda::kPartedChunksMax, 0xffffffffu);
  for (std::uint32_t step = 0; step < steps.count(); ++step) {
    const Step found = steps.at(step);
    if (found.part.count == 1) continue;
    const std::uint32_t place = cuda::place_of_parts(found.chunk);
    ASSERT_LT(place, cuda::kPartedChunksMax);
    ASSERT_TRUE(user[place] == 0xffffffffu || user[place] == found.chunk)
        << "chunks " << user[place] << " and " << found.chunk;
    user[place] = found.chunk;
  }
}

TEST(GpuGroups, ARoleThatTakesItsChunksTwiceCountsEachTurnsPartsApart) {
  for (std::uint32_t chunks = 1; chunks <= 2 * cuda::kPartedChunksMax; ++chunks) {
    std::set<std::uint32_t> places;
    for (std::uint32_t chunk = 0; chunk < 2 * chunks; ++chunk)
      places.insert(cuda::place_of_parts(chunk));
    ASSERT_EQ(cuda::has_places_twice(chunks), places.size() == 2 * chunks) << chunks << " chunks";
  }
}

TEST(GpuGroups, StepsAreThePartsOfAllChunksInTheirOrder) {
  for (std::uint32_t chunks = 0; chunks <= 20; ++chunks) {
    for (std::uint32_t head = 0; head <= chunks; ++head) {
      for (std::uint32_t whole = 0; whole <= chunks - head; ++whole) {
        for (const std::uint32_t parts : {1u, 2u, 3u, 16u})
          expect_each_part_once({chunks, parts, head, whole});
      }
    }
  }
}

TEST(GpuGroups, ChunksThatAreSummedAreEachThereOnceAndCountedApart) {
  for (std::uint32_t per_chunk = 1; per_chunk <= 130; per_chunk += per_chunk < 20 ? 1 : 22) {
    for (std::uint32_t chunks = 0; chunks <= 600; chunks += chunks < 150 ? 1 : 31) {
      for (const ChunkSteps& steps :
           {cuda::sum_steps(chunks, per_chunk, false), cuda::sum_steps(chunks, per_chunk, true),
            cuda::arrival_steps(chunks, per_chunk, 12),
            cuda::arrival_steps(chunks, per_chunk, 396)}) {
        ASSERT_EQ(steps.chunks, chunks);
        ASSERT_EQ(steps.parts % per_chunk, 0u) << "parts of whole tiles, or of one";
        expect_each_part_once(steps);
        expect_places_of_their_own(steps);
      }
    }
  }
}

// As many parts as tiles at least, while chunks are few.
TEST(GpuGroups, FewChunksAreSummedInParts) {
  const auto parts = [](std::uint32_t chunks, std::uint32_t per_chunk) {
    const ChunkSteps steps = cuda::sum_steps(chunks, per_chunk, true);
    EXPECT_EQ(steps.whole, 0u) << chunks;
    return steps.parts;
  };
  EXPECT_EQ(parts(1, 4), 32u);
  EXPECT_EQ(parts(12, 4), 32u);  // 48 tiles, in eighths
  EXPECT_EQ(parts(24, 4), 16u);
  EXPECT_EQ(parts(96, 4), 4u);
  EXPECT_EQ(parts(128, 1), 2u);
  EXPECT_EQ(parts(48, 1), 8u);  // within a node a chunk is a tile
}

// Of many chunks the last ones are shared in, of some 96 tiles together, and for the network the
// first ones, too.
TEST(GpuGroups, TheEndsOfManyChunksAreSummedInParts) {
  const auto expect = [](const ChunkSteps& steps, std::uint32_t parts, std::uint32_t head,
                         std::uint32_t whole) {
    EXPECT_EQ(steps.parts, parts);
    EXPECT_EQ(steps.head, head);
    EXPECT_EQ(steps.whole, whole);
  };
  expect(cuda::sum_steps(129, 8, false), 8 * 4, 0, 117);
  expect(cuda::sum_steps(129, 8, true), 8 * 4, 12, 105);
  expect(cuda::sum_steps(512, 1, false), 4, 0, 448);  // 64 tiles: no more are counted at an end
  expect(cuda::sum_steps(4000, 200, true), 200, 1, 3998);
  expect(cuda::arrival_steps(256, 8, 396), 8 * 8, 0, 244);
  expect(cuda::arrival_steps(256, 8, 50), 8 * 2, 0, 244);
}

// What comes over the network: whole tiles at least, eighths at most, halved until every group has
// four parts or fewer.
TEST(GpuGroups, ChunksThatArriveAreSummedInPartsByAllGroups) {
  const auto parts = [](std::uint32_t chunks, std::uint32_t per_chunk, std::uint32_t groups) {
    return cuda::arrival_steps(chunks, per_chunk, groups).parts;
  };
  EXPECT_EQ(parts(16, 8, 396), 8u * 8) << "128 tiles, a whole GPU";
  EXPECT_EQ(parts(16, 8, 198), 8u * 4) << "half of one";
  EXPECT_EQ(parts(16, 8, 99), 8u * 2);
  EXPECT_EQ(parts(16, 8, 12), 8u);
  EXPECT_EQ(parts(1, 1, 1), 4u);
  for (std::uint32_t chunks = 1; chunks <= cuda::kPartedChunksMax; ++chunks) {
    for (std::uint32_t per_chunk = 1; per_chunk <= 16; ++per_chunk) {
      for (const std::uint32_t groups : {1u, 50u, 396u}) {
        const std::uint32_t found = parts(chunks, per_chunk, groups);
        ASSERT_EQ(found % per_chunk, 0u);
        ASSERT_GE(found, per_chunk);
        ASSERT_LE(found, 8 * per_chunk);
        if (found > per_chunk) {
          ASSERT_LE(chunks * found, 4 * groups);
        }
        if (found < 8 * per_chunk) {
          ASSERT_GT(chunks * found * 2, 4 * groups);
        }
      }
    }
  }
}

TEST(GpuGroups, FewChunksAreCopiedInPartsByAllGroups) {
  using cuda::copy_parts;
  EXPECT_EQ(copy_parts(2, 256 << 10, 96, true, 7), 32u) << "of 8 KiB at least";
  EXPECT_EQ(copy_parts(2, 256 << 10, 96, false, 7), 10u) << "of 24 KiB";
  EXPECT_EQ(copy_parts(2, 256 << 10, 96, false, 1), 5u) << "of 48 KiB: they go to one rank only";
  EXPECT_EQ(copy_parts(16, 256 << 10, 96, true, 7), 24u) << "the first four chunks first";
  EXPECT_EQ(copy_parts(64, 256 << 10, 96, true, 1), 6u);
  EXPECT_EQ(copy_parts(64, 256 << 10, 96, false, 7), 6u);
  EXPECT_EQ(copy_parts(65, 256 << 10, 16, true, 7), 1u);
  EXPECT_EQ(copy_parts(3, 8 << 10, 96, true, 7), 1u);
  EXPECT_EQ(copy_parts(3, 8 << 10, 96, false, 1), 1u);
  EXPECT_EQ(copy_parts(0, 256 << 10, 96, true, 7), 1u);
  EXPECT_EQ(copy_parts(cuda::kPartedChunksMax + 1, 1 << 20, 100000, true, 7), 1u);
}

// The parts of a job are its rows, each once, with their places in sources and targets.
TEST(GpuGroups, PartsOfASumAreItsRowsOnce) {
  constexpr std::uint32_t kSourceStride = 24;
  constexpr std::uint32_t kTargetStride = 40;
  std::vector<std::byte> memory(1 << 16);
  for (std::uint32_t rows = 1; rows <= 130; ++rows) {
    for (std::uint32_t parts : {1u, 2u, 4u, 7u}) {
      std::vector<int> seen(rows, 0);
      for (std::uint32_t part = 0; part < parts; ++part) {
        SumJob job;
        job.rows = rows;
        job.columns = 8;
        job.source_count = 2;
        job.target_count = 1;
        job.source_stride = kSourceStride;
        job.target_stride = kTargetStride;
        job.sources[0] = memory.data();
        job.sources[1] = memory.data() + 16;
        job.targets[0] = memory.data() + 32;
        if (!job.take({part, parts})) continue;
        const auto first = static_cast<const std::byte*>(job.sources[0]) - memory.data();
        ASSERT_EQ(first % (kSourceStride * 2), 0);
        const auto row = static_cast<std::uint32_t>(first / (kSourceStride * 2));
        EXPECT_EQ(static_cast<const std::byte*>(job.sources[1]), memory.data() + 16 + first);
        EXPECT_EQ(static_cast<std::byte*>(job.targets[0]),
                  memory.data() + 32 + row * kTargetStride * 2);
        ASSERT_GT(job.rows, 0u);
        for (std::uint32_t i = 0; i < job.rows; ++i) ++seen.at(row + i);
      }
      for (int times : seen) ASSERT_EQ(times, 1) << rows << " rows, " << parts << " parts";
    }
  }
}

}  // namespace
}  // namespace mk::kernels
