/// \file
/// What a block did when, for users: spans of one launch, kept only when asked for. Times are of
/// the executor's clock; on one machine the CPU executor's are comparable between ranks.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

/// What a span shows. The comment says what its two indices and its rank mean.
enum class SpanKind : std::uint8_t {
  kTile = 0,     ///< a tile's arithmetic: tile, -; rank: its owner, or whose rows it needs
  kSum = 1,      ///< sums of one chunk: chunk, node; rank: -
  kCopy = 2,     ///< bytes moved within the node: chunk, node of origin; rank: whose bytes
  kSend = 3,     ///< no length: a command committed: chunk, node of origin; rank: to whom
  kArrival = 4,  ///< no length: a chunk seen to be here: chunk, node of origin; rank: from whom
  kWait = 5,     ///< a wait: FlagKind, the wait's first index; rank: who was waited for
};
inline constexpr std::uint32_t kSpanKinds = 6;

constexpr const char* name_of(SpanKind kind) {
  constexpr const char* kNames[kSpanKinds] = {"tile", "sum", "copy", "send", "arrival", "wait"};
  return kNames[static_cast<std::uint32_t>(kind)];
}

struct TraceSpan {
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
  std::uint32_t index[2] = {};
  std::uint32_t rank = 0;
  SpanKind kind = SpanKind::kTile;
};

/// One block's spans of one launch. The block writes; what does not fit is counted, not kept.
struct TraceLog {
  TraceSpan* spans = nullptr;
  std::uint32_t capacity = 0;
  std::uint32_t count = 0;  ///< of all spans, also of those beyond `capacity`

  MK_HOST_DEVICE void add(const TraceSpan& span) {
    if (count < capacity) spans[count] = span;
    ++count;
  }
};

}  // namespace mk::kernels
