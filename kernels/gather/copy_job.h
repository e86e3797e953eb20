/// \file
/// A bulk copy, as a role asks its executor for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shm/limits.h"
#include "shm/platform.h"

namespace mk::kernels {

/// `rows` rows of `row_bytes` bytes from `source` to every target. Strides are in bytes.
struct CopyJob {
  const std::byte* source = nullptr;
  std::uint64_t source_stride = 0;
  std::byte* targets[shm::kLocalRanksMax];  ///< the first target_count
  std::uint64_t target_stride = 0;
  std::uint32_t target_count = 0;
  std::uint32_t rows = 0;
  std::uint32_t row_bytes = 0;

  MK_HOST_DEVICE void add_target(std::byte* target) { targets[target_count++] = target; }
  MK_HOST_DEVICE void move_targets(std::int64_t bytes) {
    for (std::uint32_t t = 0; t < target_count; ++t) targets[t] += bytes;
  }
};

/// A part of each of this rank's own rows, in the caller's memory.
struct RowPiece {
  const std::byte* base = nullptr;  ///< of row 0
  std::uint64_t stride = 0;         ///< in bytes, from row to row
  std::uint32_t bytes = 0;
};

/// This rank's own rows: each is its pieces one after the other, row_bytes in all (K and V of a
/// token, say).
struct GatherSource {
  static constexpr std::uint32_t kPiecesMax = 4;
  RowPiece pieces[kPiecesMax];
  std::uint32_t count = 0;
  std::uint32_t rows = 0;  ///< in this launch

  /// Rows of one piece.
  MK_HOST_DEVICE static GatherSource of(const void* base, std::uint64_t stride, std::uint32_t bytes,
                                        std::uint32_t rows) {
    GatherSource source;
    source.add(base, stride, bytes);
    source.rows = rows;
    return source;
  }
  MK_HOST_DEVICE void add(const void* base, std::uint64_t stride, std::uint32_t bytes) {
    pieces[count++] = {static_cast<const std::byte*>(base), stride, bytes};
  }

  /// Calls `copy(job)` with the jobs that bring bytes [begin, end) of the packed rows to the
  /// targets of `job`, which point to where byte `begin` goes; `job` is used up. (A copy of it is
  /// fifty instructions of a GPU's thread.)
  template <class Copy>
  MK_HOST_DEVICE void copy_packed(std::uint64_t begin, std::uint64_t end, CopyJob& job,
                                  Copy&& copy) const {
    // Rows that follow each other are one run. (The arithmetic below takes a GPU's thread, which
    // comes to it for the first time in each launch, up to 9 µs.)
    if (count == 1 && pieces[0].stride == pieces[0].bytes) {
      job.source = pieces[0].base + begin;
      job.rows = 1;
      job.row_bytes = static_cast<std::uint32_t>(end - begin);
      if (begin < end) copy(job);
      return;
    }
    std::uint64_t row_bytes = 0;
    for (std::uint32_t i = 0; i < count; ++i) row_bytes += pieces[i].bytes;
    while (begin < end) {
      const std::uint64_t row = begin / row_bytes;
      const std::uint64_t from = begin % row_bytes;
      // As many whole rows as there are; else the end of a row, or its beginning, or its middle.
      const std::uint64_t whole = from == 0 ? (end - begin) / row_bytes : 0;
      const std::uint64_t left = row_bytes - from < end - begin ? row_bytes - from : end - begin;
      const std::uint64_t to = whole != 0 ? row_bytes : from + left;
      std::uint64_t piece_at = 0;
      for (std::uint32_t i = 0; i < count; ++i) {
        const RowPiece& piece = pieces[i];
        const std::uint64_t first = from > piece_at ? from : piece_at;
        const std::uint64_t last = to < piece_at + piece.bytes ? to : piece_at + piece.bytes;
        if (first < last) {
          job.source = piece.base + row * piece.stride + (first - piece_at);
          job.source_stride = piece.stride;
          job.target_stride = row_bytes;
          job.rows = whole != 0 ? static_cast<std::uint32_t>(whole) : 1;
          job.row_bytes = static_cast<std::uint32_t>(last - first);
          job.move_targets(static_cast<std::int64_t>(first - from));
          copy(job);
          job.move_targets(-static_cast<std::int64_t>(first - from));
        }
        piece_at += piece.bytes;
      }
      const std::uint64_t done = whole != 0 ? whole * row_bytes : left;
      job.move_targets(static_cast<std::int64_t>(done));
      begin += done;
    }
  }
};

}  // namespace mk::kernels
