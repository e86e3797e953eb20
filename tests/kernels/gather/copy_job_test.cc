// GatherSource::copy_packed: whatever a rank's rows are made of, the jobs it asks for bring the
// bytes of a range of the packed rows, all of them once, each to its place at every target.
#include "kernels/gather/copy_job.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/comm/tile_grid.h"

namespace mk::kernels {
namespace {

constexpr std::uint32_t kRows = 5;
constexpr std::byte kUntouched{0xee};

/// A source of pieces of so many bytes, each row `gap` bytes behind the one before; and the packed
/// rows.
struct Rows {
  Rows(const std::vector<std::uint32_t>& piece_bytes, std::uint32_t gap) {
    std::uint8_t next = 1;
    for (const std::uint32_t bytes : piece_bytes) {
      memory.emplace_back((bytes + gap) * kRows);
      for (std::byte& byte : memory.back()) byte = std::byte{next++};
    }
    for (std::size_t i = 0; i < piece_bytes.size(); ++i)
      source.add(memory[i].data(), piece_bytes[i] + gap, piece_bytes[i]);
    source.rows = kRows;
    for (std::uint32_t row = 0; row < kRows; ++row) {
      for (std::size_t i = 0; i < piece_bytes.size(); ++i) {
        const auto begin = memory[i].begin() + row * (piece_bytes[i] + gap);
        packed.insert(packed.end(), begin, begin + piece_bytes[i]);
      }
    }
  }
  std::vector<std::vector<std::byte>> memory;
  GatherSource source;
  std::vector<std::byte> packed;
};

void run(const CopyJob& job, std::vector<int>& touched, const std::byte* first_target) {
  for (std::uint32_t row = 0; row < job.rows; ++row) {
    for (std::uint32_t t = 0; t < job.target_count; ++t) {
      std::byte* to = job.targets[t] + row * job.target_stride;
      std::memcpy(to, job.source + row * job.source_stride, job.row_bytes);
      if (t != 0) continue;
      for (std::uint32_t i = 0; i < job.row_bytes; ++i)
        ++touched.at(static_cast<std::size_t>(to - first_target) + i);
    }
  }
}

TEST(CopyPacked, BringsEveryByteOfARangeOnceToEveryTarget) {
  for (const auto& pieces : std::vector<std::vector<std::uint32_t>>{{8}, {1}, {3, 5}, {2, 7, 4}}) {
    for (const std::uint32_t gap : {0u, 3u}) {
      const Rows rows(pieces, gap);
      const auto bytes = rows.packed.size();
      for (std::size_t begin = 0; begin <= bytes; ++begin) {
        for (std::size_t end = begin; end <= bytes; ++end) {
          std::vector<std::byte> there[2];
          CopyJob job;
          for (auto& target : there) {
            target.assign(bytes, kUntouched);
            job.add_target(target.data() + begin);
          }
          std::vector<int> touched(bytes, 0);
          rows.source.copy_packed(begin, end, job, [&](const CopyJob& part) {
            ASSERT_EQ(part.target_count, 2u);
            run(part, touched, there[0].data());
          });
          for (std::size_t i = 0; i < bytes; ++i) {
            const bool inside = i >= begin && i < end;
            ASSERT_EQ(touched[i], inside ? 1 : 0) << begin << " to " << end << ", byte " << i;
            for (const auto& target : there)
              ASSERT_EQ(target[i], inside ? rows.packed[i] : kUntouched) << begin << " to " << end;
          }
        }
      }
    }
  }
}

// What makes it quick: rows that follow each other are one job, wherever the range begins and ends.
TEST(CopyPacked, RowsThatFollowEachOtherAreOneJob) {
  const Rows rows({8}, 0);
  for (const ByteRange& range : {ByteRange{0, 40}, {3, 26}, {8, 8}, {5, 1}}) {
    int jobs = 0;
    CopyJob all;
    rows.source.copy_packed(range.begin, range.begin + range.bytes, all, [&](const CopyJob& job) {
      ++jobs;
      EXPECT_EQ(job.rows, 1u);
      EXPECT_EQ(job.row_bytes, range.bytes);
    });
    EXPECT_EQ(jobs, 1) << range.begin << ", " << range.bytes << " bytes";
  }
}

}  // namespace
}  // namespace mk::kernels
