// How a GPU's groups share what there is to do: arithmetic of the CUDA executor that the host can
// check.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "kernels/comm/sum_job.h"
#include "kernels/cuda/launch_state.h"

namespace mk::kernels {
namespace {

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

// As many parts as tiles at least, while chunks are few; counted in state that is large enough.
TEST(GpuGroups, FewChunksAreSummedInParts) {
  using cuda::sum_parts;
  EXPECT_EQ(sum_parts(1, 4), 32u);
  EXPECT_EQ(sum_parts(12, 4), 32u);  // 48 tiles, in eighths
  EXPECT_EQ(sum_parts(24, 4), 16u);
  EXPECT_EQ(sum_parts(96, 4), 4u);
  EXPECT_EQ(sum_parts(128, 1), 2u);
  EXPECT_EQ(sum_parts(129, 4), 1u);
  EXPECT_EQ(sum_parts(48, 1), 8u);  // within a node a chunk is a tile
  for (std::uint32_t chunks = 1; chunks < 1000; ++chunks) {
    if (sum_parts(chunks, 3) > 1) {
      ASSERT_LE(chunks, cuda::kPartedChunksMax);
    }
  }
}

// What comes over the network: whole tiles at least, eighths at most, halved until every group has
// four parts or fewer.
TEST(GpuGroups, ChunksThatArriveAreSummedInPartsByAllGroups) {
  using cuda::receive_parts;
  EXPECT_EQ(receive_parts(16, 8, 396), 8u * 8) << "128 tiles, a whole GPU";
  EXPECT_EQ(receive_parts(16, 8, 198), 8u * 4) << "half of one";
  EXPECT_EQ(receive_parts(16, 8, 99), 8u * 2);
  EXPECT_EQ(receive_parts(16, 8, 12), 8u);
  EXPECT_EQ(receive_parts(1, 1, 1), 4u);
  EXPECT_EQ(receive_parts(cuda::kPartedChunksMax + 1, 4, 396), 1u);
  for (std::uint32_t chunks = 1; chunks <= cuda::kPartedChunksMax; ++chunks) {
    for (std::uint32_t per_chunk = 1; per_chunk <= 16; ++per_chunk) {
      for (const std::uint32_t groups : {1u, 50u, 396u}) {
        const std::uint32_t parts = receive_parts(chunks, per_chunk, groups);
        ASSERT_EQ(parts % per_chunk, 0u);
        ASSERT_GE(parts, per_chunk);
        ASSERT_LE(parts, 8 * per_chunk);
        if (parts > per_chunk) {
          ASSERT_LE(chunks * parts, 4 * groups);
        }
        if (parts < 8 * per_chunk) {
          ASSERT_GT(chunks * parts * 2, 4 * groups);
        }
      }
    }
  }
}

// Launches whose sums are parts of chunks are those that compute blocks join.
TEST(GpuGroups, ComputeBlocksJoinWhereChunksAreSharedInParts) {
  using cuda::compute_receives;
  using cuda::sum_parts;
  for (std::uint32_t chunks = 1; chunks < 1000; ++chunks)
    ASSERT_EQ(compute_receives(chunks), sum_parts(chunks, 2) > 1) << chunks;
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
