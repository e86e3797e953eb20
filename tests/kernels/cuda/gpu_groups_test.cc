// How a GPU's groups share what there is to do: arithmetic of the CUDA executor that the host can
// check.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "kernels/comm/sum_job.h"
#include "kernels/cuda/skeleton/chunk_steps.h"
#include "kernels/cuda/skeleton/launch_state.h"

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
  EXPECT_EQ(tile_parts(1), 16u);
  EXPECT_EQ(tile_parts(24), 16u);
  EXPECT_EQ(tile_parts(25), 8u);
  EXPECT_EQ(tile_parts(48), 8u);
  EXPECT_EQ(tile_parts(49), 4u);
  EXPECT_EQ(tile_parts(96), 4u);
  EXPECT_EQ(tile_parts(97), 2u);
  EXPECT_EQ(tile_parts(193), 1u);
  EXPECT_EQ(tile_parts(100000), 1u);
}

using Step = ChunkSteps::Step;

std::uint32_t chunks_of(const ChunkSteps& steps) {
  std::uint32_t chunks = 0;
  for (const ChunkSteps::Run& run : steps.runs) chunks += run.chunks;
  return chunks;
}
std::uint32_t parts_of_last(const ChunkSteps& steps) {
  std::uint32_t parts = 0;
  for (const ChunkSteps::Run& run : steps.runs) parts = run.chunks != 0 ? run.parts : parts;
  return parts;
}

// Each part of each chunk is one step, chunk after chunk: a taker of steps in their order finds
// the parts of a chunk next to each other.
void expect_each_part_once(const ChunkSteps& steps) {
  std::uint32_t step = 0;
  std::uint32_t chunk = 0;
  for (const ChunkSteps::Run& run : steps.runs) {
    for (const std::uint32_t end = chunk + run.chunks; chunk < end; ++chunk) {
      for (std::uint32_t part = 0; part < run.parts; ++part, ++step) {
        const Step found = steps.at(step);
        ASSERT_EQ(found.chunk, chunk) << "step " << step;
        ASSERT_EQ(found.part.index, part) << "step " << step;
        ASSERT_EQ(found.part.count, run.parts) << "step " << step;
      }
    }
  }
  ASSERT_EQ(steps.count(), step);
}

// No two chunks that groups share in count their parts in one place.
void expect_places_of_their_own(const ChunkSteps& steps) {
  std::vector<std::uint32_t> user(cuda::kPartPlaces, 0xffffffffu);
  for (std::uint32_t step = 0; step < steps.count(); ++step) {
    const Step found = steps.at(step);
    if (found.part.count == 1) continue;
    const std::uint32_t place = cuda::place_of_parts(found.chunk);
    ASSERT_LT(place, cuda::kPartPlaces);
    ASSERT_TRUE(user[place] == 0xffffffffu || user[place] == found.chunk)
        << "chunks " << user[place] << " and " << found.chunk;
    user[place] = found.chunk;
  }
}

TEST(GpuGroups, ChunksThatAreTakenTwiceCountEachTurnsPartsApart) {
  for (const std::uint32_t parts : {1u, 2u, 8u}) {
    for (std::uint32_t chunks = 0; chunks <= 2 * cuda::kPartPlaces; ++chunks) {
      const std::uint32_t first = cuda::network_first(chunks, parts);
      ASSERT_LE(first, chunks);
      if (chunks != 0 && (parts == 1 || chunks < cuda::kPartPlaces)) {
        ASSERT_GT(first, 0u);
      }
      if (parts == 1 || chunks > cuda::kPartPlaces) continue;  // not counted; not in parts
      std::set<std::uint32_t> places;
      for (std::uint32_t chunk = 0; chunk < chunks + first; ++chunk)
        places.insert(cuda::place_of_parts(chunk));
      ASSERT_EQ(places.size(), chunks + first) << chunks << " chunks";
    }
  }
}

TEST(GpuGroups, StepsAreThePartsOfAllChunksInTheirOrder) {
  for (std::uint32_t first = 0; first <= 9; ++first) {
    for (std::uint32_t second = 0; second <= 5; ++second) {
      for (std::uint32_t last = 0; last <= 4; ++last) {
        for (const std::uint32_t parts : {1u, 2u, 3u, 16u}) {
          expect_each_part_once({{{first, parts}, {second, 5}, {0, 7}, {last, 1}}});
          expect_each_part_once({{{0, 1}, {first, 1}, {second, parts}, {0, 1}, {last, 3}}});
        }
      }
    }
  }
}

TEST(GpuGroups, ChunksThatAreSummedAreEachThereOnceAndCountedApart) {
  for (std::uint32_t per_chunk = 1; per_chunk <= 130; per_chunk += per_chunk < 20 ? 1 : 22) {
    for (std::uint32_t chunks = 0; chunks <= 2600; chunks += chunks < 150 ? 1 : 131) {
      for (const ChunkSteps& steps :
           {cuda::sum_steps(chunks, per_chunk, 0, 12),
            cuda::sum_steps(chunks, per_chunk, chunks, 24),
            cuda::sum_steps(chunks, per_chunk, chunks / 2, 1),
            cuda::sum_steps(chunks, per_chunk, chunks < 3 ? chunks : 3, 144),
            cuda::arrival_steps(chunks, per_chunk, 12),
            cuda::arrival_steps(chunks, per_chunk, 396)}) {
        ASSERT_EQ(chunks_of(steps), chunks);
        for (const ChunkSteps::Run& run : steps.runs) {
          if (run.chunks == 0 || run.parts <= 2) continue;  // whole chunks, and halves
          ASSERT_EQ(run.parts % per_chunk, 0u) << "parts of whole tiles, or of one";
        }
        expect_each_part_once(steps);
        expect_places_of_their_own(steps);
      }
    }
  }
}

// As many parts as tiles at least, while chunks are few.
TEST(GpuGroups, FewChunksAreSummedInParts) {
  const auto parts = [](std::uint32_t chunks, std::uint32_t per_chunk) {
    const ChunkSteps steps = cuda::sum_steps(chunks, per_chunk, 0, 24);
    EXPECT_EQ(steps.count(), chunks * parts_of_last(steps)) << "all in as many";
    return parts_of_last(steps);
  };
  EXPECT_EQ(parts(1, 4), 64u);
  EXPECT_EQ(parts(6, 4), 64u);   // 24 tiles, in sixteenths
  EXPECT_EQ(parts(12, 4), 32u);  // 48 tiles, in eighths
  EXPECT_EQ(parts(24, 4), 16u);
  EXPECT_EQ(parts(48, 4), 8u);  // 192 tiles, in halves
  EXPECT_EQ(parts(96, 4), 4u);
  EXPECT_EQ(parts(128, 1), 2u);
  EXPECT_EQ(parts(48, 1), 8u);  // within a node a chunk is a tile
}

void expect_runs(const ChunkSteps& steps, const std::vector<ChunkSteps::Run>& wanted) {
  std::size_t at = 0;
  for (const ChunkSteps::Run& run : steps.runs) {
    if (run.chunks == 0) continue;
    ASSERT_LT(at, wanted.size());
    EXPECT_EQ(run.chunks, wanted[at].chunks) << "run " << at;
    EXPECT_EQ(run.parts, wanted[at].parts) << "run " << at;
    ++at;
  }
  EXPECT_EQ(at, wanted.size());
}

// Of many chunks the last ones are shared in, of some 96 tiles together.
TEST(GpuGroups, TheEndOfManyChunksIsSummedInParts) {
  expect_runs(cuda::sum_steps(129, 8, 0, 12), {{117, 1}, {12, 8 * 4}});
  expect_runs(cuda::sum_steps(512, 1, 0, 12), {{448, 1}, {64, 4}});  // no more tiles at an end
  expect_runs(cuda::arrival_steps(256, 8, 396), {{244, 1}, {12, 8 * 8}});
  expect_runs(cuda::arrival_steps(256, 8, 50), {{244, 1}, {12, 8 * 2}});
}

// The network takes chunk by chunk, and waits for none of them as long as a group takes for a whole
// one. The first comes in as many parts as there are groups for at a time, the next 96 tiles one by
// one, the others by halves of chunks. What stays here comes in whole ones.
TEST(GpuGroups, WhatGoesToTheNetworkComesSoonAndSteadily) {
  using cuda::sum_steps;
  expect_runs(sum_steps(257, 8, 257, 32), {{1, 32}, {12, 8}, {232, 2}, {12, 32}});
  expect_runs(sum_steps(257, 8, 257, 25), {{1, 16}, {12, 8}, {232, 2}, {12, 32}});
  expect_runs(sum_steps(257, 8, 257, 3), {{1, 8}, {12, 8}, {232, 2}, {12, 32}});
  expect_runs(sum_steps(257, 8, 128, 48), {{1, 32}, {12, 8}, {115, 2}, {117, 1}, {12, 32}});
  expect_runs(sum_steps(257, 8, 5, 32), {{1, 32}, {4, 8}, {240, 1}, {12, 32}});
  expect_runs(sum_steps(129, 2, 129, 13), {{1, 8}, {48, 2}, {32, 2}, {48, 8}});
  // Of few chunks each tile is summed by itself already.
  expect_runs(sum_steps(128, 4, 128, 25), {{1, 16}, {127, 4}});
  expect_runs(sum_steps(64, 4, 32, 13), {{1, 8}, {63, 4}});
  expect_runs(sum_steps(64, 4, 32, 7), {{64, 4}});
  expect_runs(sum_steps(128, 4, 0, 25), {{128, 4}});
  // Too many to be counted apart.
  expect_runs(sum_steps(4000, 200, 4000, 24), {{1, 200}, {1, 200}, {3997, 1}, {1, 200}});
}

// What comes over the network: whole tiles at least, eighths at most, halved until every group has
// four parts or fewer.
TEST(GpuGroups, ChunksThatArriveAreSummedInPartsByAllGroups) {
  const auto parts = [](std::uint32_t chunks, std::uint32_t per_chunk, std::uint32_t groups) {
    return parts_of_last(cuda::arrival_steps(chunks, per_chunk, groups));
  };
  EXPECT_EQ(parts(16, 8, 396), 8u * 8) << "128 tiles, a whole GPU";
  EXPECT_EQ(parts(16, 8, 198), 8u * 4) << "half of one";
  EXPECT_EQ(parts(16, 8, 99), 8u * 2);
  EXPECT_EQ(parts(16, 8, 12), 8u);
  EXPECT_EQ(parts(1, 1, 1), 4u);
  for (std::uint32_t chunks = 1; chunks <= cuda::kFewChunks; ++chunks) {
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
  EXPECT_EQ(copy_parts(65, 256 << 10, 16, false, 7), 1u);
  EXPECT_EQ(copy_parts(65, 256 << 10, 16, true, 7), 4u) << "of 64 KiB at most";
  EXPECT_EQ(copy_parts(3, 8 << 10, 96, true, 7), 1u);
  EXPECT_EQ(copy_parts(3, 8 << 10, 96, false, 1), 1u);
  EXPECT_EQ(copy_parts(0, 256 << 10, 96, true, 7), 1u);
  EXPECT_EQ(copy_parts(cuda::kFewChunks + 1, 128 << 10, 100000, false, 7), 1u);
}

// What is on its way at one time is then a few chunks, not as many as there are groups.
TEST(GpuGroups, OverNodesLargeChunksAreCopiedInPartsHoweverMany) {
  using cuda::copy_parts;
  EXPECT_EQ(copy_parts(129, 512 << 10, 49, true, 3), 8u) << "of 64 KiB";
  EXPECT_EQ(copy_parts(129, 512 << 10, 49, true, 1), 2u) << "of 256 KiB: they go to one rank only";
  EXPECT_EQ(copy_parts(513, 512 << 10, 49, true, 0), 2u);
  EXPECT_EQ(copy_parts(129, 256 << 10, 49, true, 3), 4u);
  EXPECT_EQ(copy_parts(cuda::kPartPlaces, 512 << 10, 49, true, 3), 8u);
  EXPECT_EQ(copy_parts(cuda::kPartPlaces + 1, 512 << 10, 49, true, 3), 1u);
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
