/// \file
/// One GPU that plays the other ranks of a node, and of another one, for a rank that has a GPU of
/// its own.
///
/// Ranks of a node do the same with turned numbers: when rank 0 of L shows rank L - p something,
/// rank p shows rank 0 the like, about then. So a program that answers each flag of rank 0 in
/// another rank's memory with the flag of the mirrored rank, and has brought the bytes meanwhile,
/// gives it the traffic of a node of L. It has as many bytes each way, at its own pace. What
/// arrives at rank 0's rail peer says so when the like arrives at rank 0.
///
/// What is not there: skew between ranks, and other ranks' traffic in the switch. What the mirror
/// adds: each flag is later than its cause by a look at it and, where links are full, by what is on
/// its way before its bytes. (Bytes may also come earlier than a rank's would: so many pieces are
/// brought ahead of what was shown.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/comm/tile_grid.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

/// What follows when the rank has shown `seen`: bytes, then a flag, at the rank. Flags hold the
/// launch's epoch.
struct Reflection {
  const std::uint32_t* seen = nullptr;  ///< in the mirror's memory
  const std::byte* source = nullptr;    ///< packed, in the mirror's memory; 16-byte aligned
  std::byte* target = nullptr;          ///< 16-byte aligned
  std::uint64_t target_stride = 0;      ///< bytes from row to row
  std::uint32_t rows = 0;
  std::uint32_t row_bytes = 0;  ///< a multiple of 16; of several rows a power of two
  std::uint32_t pieces = 1;     ///< of one row: brought in so many parts, side by side
  std::uint32_t* flag = nullptr;
  bool has_word = false;  ///< shown with the flag, at once: the word behind it; both in 8 bytes
  std::uint32_t word = 0;
  /// Counted up, in the mirror's memory, when the flag has been shown; and what others' `told` must
  /// have been counted up to, so many in each launch, before bytes are brought: a role that sums,
  /// or passes on, has nothing to bring before.
  std::uint32_t* told = nullptr;
  const std::uint32_t* awaits = nullptr;
  std::uint32_t awaits_count = 0;
  /// Where several have a flag in common: their number, and where they are counted, zero at first.
  std::uint32_t sharers = 1;
  std::uint32_t* counter = nullptr;
};

/// Those of one launch, in the order in which they are to be expected; each list has workers of its
/// own.
struct Reflections {
  std::vector<Reflection> first;
  std::vector<Reflection> later;    ///< what waits for some of the others
  std::vector<Reflection> network;  ///< what is seen in the host's memory: few look there
};

/// What a rank has under way at a time, in answers, before it shows the first of them: as many of
/// a list are brought ahead of what was shown.
struct UnderWay {
  std::uint32_t first = 0;
  std::uint32_t later = 0;
};

/// Of a launch's first, later and network lists, what came with bytes; in ns of the mirror's own
/// clock.
struct MirrorTimes {
  static constexpr int kLists = 3;
  struct List {
    std::uint64_t first_seen_inverted = 0;  ///< bits inverted, as the earliest is the greatest
    std::uint64_t last_seen = 0;
    std::uint64_t sum_of_lags = 0;  ///< from seen to shown
    std::uint64_t count = 0;
  };
  std::uint64_t begin_inverted = 0;
  List lists[kLists];

  double since_begin_us(std::uint64_t ns) const {
    return static_cast<double>(ns - ~begin_inverted) / 1e3;
  }
  double lag_us() const;  ///< mean of all lists
};

class Mirror {
 public:
  /// On `device`, for launches of even and of odd epochs. All of the same number.
  Mirror(int device, const Reflections& even, const Reflections& odd, UnderWay under_way);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  int device() const { return device_; }
  cudaStream_t stream() const { return stream_; }
  /// Queues the answers to the rank's launch `epoch`, which are 1, 2, 3, ... The kernel ends
  /// without them after seconds.
  void launch(std::uint32_t epoch);
  /// Whether the rank has shown all that was awaited, in all launches so far; waits for them.
  bool saw_all();
  /// Of the last launch; waits for it.
  MirrorTimes times();

 private:
  struct Queue {
    std::uint32_t count = 0;
    std::uint32_t move_count = 0;
    unsigned movers = 0;
    std::uint32_t ahead = 0;  ///< moves that may be made before the first of them is shown
    std::unique_ptr<DeviceMemory> items[2];  ///< by epoch % 2
    std::unique_ptr<DeviceMemory> moves, brought, counters;
  };
  Queue make_queue(unsigned of, const std::vector<Reflection>& even,
                   const std::vector<Reflection>& odd, std::uint32_t under_way) const;

  int device_;
  cudaStream_t stream_ = nullptr;
  Queue queues_[MirrorTimes::kLists];
  std::unique_ptr<DeviceMemory> missed_, times_;
};

/// `value` into each of `count` words of the current device.
void fill_words(std::uint32_t* words, std::uint32_t count, std::uint32_t value,
                cudaStream_t stream);

/// Tiles of a partial product of `k` bf16 elements (fp32 sums, rounded once): a [rows, k], b [n,
/// k].
struct PackedPartial {
  const void* a = nullptr;
  const void* b = nullptr;
  int k = 0;
};
/// Puts the tiles behind each other, `tile_bytes` each, rows `tile_columns` elements apart.
void pack_partial(const PackedPartial& partial, const std::vector<kernels::TileRect>& tiles,
                  std::uint64_t tile_bytes, std::uint32_t tile_columns, void* packed,
                  cudaStream_t stream);

}  // namespace mk::test
