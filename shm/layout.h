/// \file
/// The session segment: what lies where in the memfd that one client and its daemon share. ABI.md
/// is the document. The daemon writes the offsets once, before it hands the memory over; readers
/// use the header's offsets, never those of their own build.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shm/command.h"
#include "shm/limits.h"
#include "shm/progress.h"

namespace mk::shm {

/// The bytes 1a 'M' 'K' 'E' 'R' 'N' 'L' '1'.
inline constexpr std::uint64_t kSegmentMagic = 0x314c4e52454b4d1aull;
inline constexpr std::uint16_t kAbiMajor = 1;  ///< differs: incompatible
inline constexpr std::uint16_t kAbiMinor = 5;  ///< grows with compatible additions
/// Since when clients retire their parts of operators.
inline constexpr std::uint16_t kRetireAbiMinor = 3;
/// Since when an Attach may say which GPU the rank has, and which rail it wants.
inline constexpr std::uint16_t kPlaceAbiMinor = 4;

/// Feature bits: what the daemon offers in this segment.
enum Feature : std::uint64_t {
  /// The daemon measures commit-to-post latency from word 4 of a command.
  kFeatureCommitTime = 1u << 0,
  /// The daemon reads SegmentHeader::progress. (A client may write there whatever the daemon: it is
  /// within every version's header.)
  kFeatureProgress = 1u << 1,
};

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kHeaderBytes = 4096;

/// The first page of the segment. Each line has one writer; `d` daemon, `c` client, `i` written
/// once before sharing.
struct SegmentHeader {
  // line 0, i
  std::uint64_t magic;
  std::uint16_t abi_major;
  std::uint16_t abi_minor;
  std::uint32_t header_bytes;
  std::uint64_t features;
  std::uint64_t segment_bytes;
  std::uint64_t generation;  ///< of the daemon: differs after every start
  std::uint32_t session_id;
  std::uint32_t session_slot;
  std::uint64_t reserved0[2];
  // line 1, i
  std::uint64_t lanes_offset;  ///< of LaneControl[lane_count]
  std::uint64_t slots_offset;  ///< of CommandSlot[lane_count][1 << slot_count_log2]
  std::uint64_t flags_offset;  ///< of uint32_t[flag_count]
  std::uint32_t lane_count;
  std::uint32_t slot_count_log2;
  std::uint32_t flag_count;
  std::uint32_t reserved1;
  std::uint64_t reserved2[3];
  // line 2, d: alive and well?
  std::uint64_t heartbeat_ns;  ///< CLOCK_MONOTONIC of the daemon's last beat
  std::uint32_t error_word;    ///< ErrorCode of the first failure, 0 while well; after `reason`
  std::uint32_t abort_flag;    ///< non-zero: every wait of this session leaves
  std::uint64_t network_bytes_per_s;  ///< that the session's links are known to carry; 0: not told
  std::uint64_t reserved3[5];
  // line 3, c: what the client says of itself
  std::uint64_t client_pid;
  std::uint64_t launches;  ///< launches begun plus launches ended: odd while one is under way
  std::uint64_t beats;     ///< counted up four times a second while the process runs; 0: not told
  std::uint64_t reserved4[5];
  // lines 4..11, d: the sentence behind error_word, zero-terminated UTF-8
  char reason[kReasonBytesMax];
  // lines 12..14, c: the launch that it is in
  Progress progress;
};
static_assert(sizeof(SegmentHeader) == 4 * kCacheLine + kReasonBytesMax + sizeof(Progress));
static_assert(sizeof(SegmentHeader) <= kHeaderBytes);
static_assert(offsetof(SegmentHeader, lanes_offset) == kCacheLine);
static_assert(offsetof(SegmentHeader, heartbeat_ns) == 2 * kCacheLine);
static_assert(offsetof(SegmentHeader, client_pid) == 3 * kCacheLine);
static_assert(offsetof(SegmentHeader, reason) == 4 * kCacheLine);
static_assert(offsetof(SegmentHeader, progress) == 12 * kCacheLine);

/// One lane's counters, all monotone since the ring was made, each on a line of its own. The
/// producer keeps its own index on its own side (registers, device memory) and saves it in
/// `produced` between launches.
struct LaneControl {
  /// d: commands taken; their slots are free again (credits).
  alignas(kCacheLine) std::uint64_t consumed;
  /// d: commands whose source bytes may be reused.
  alignas(kCacheLine) std::uint64_t completed;
  /// c: commands committed; the daemon reads it only to report depth.
  alignas(kCacheLine) std::uint64_t produced;
};
static_assert(sizeof(LaneControl) == 3 * kCacheLine);

/// Sizes of a segment, chosen at attach.
struct SegmentShape {
  std::uint32_t lane_count = 1;
  std::uint32_t slot_count_log2 = 10;
  std::uint32_t flag_count = kFlagsDefault;

  friend constexpr bool operator==(const SegmentShape&, const SegmentShape&) = default;
};

/// Where the parts of a segment of that shape lie.
struct SegmentLayout {
  std::uint64_t lanes_offset;
  std::uint64_t slots_offset;
  std::uint64_t flags_offset;
  std::uint64_t segment_bytes;  ///< a multiple of the page size
};

constexpr bool valid(const SegmentShape& shape) {
  return shape.lane_count >= 1 && shape.lane_count <= kLanesMax && shape.slot_count_log2 < 32 &&
         (1u << shape.slot_count_log2) >= kRingSlotsMin &&
         (1u << shape.slot_count_log2) <= kRingSlotsMax && shape.flag_count >= kFlagGranule &&
         shape.flag_count <= kFlagsMax && shape.flag_count % kFlagGranule == 0;
}

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// The layout this build gives a new segment. The flags begin on a page of their own: a fabric
/// registers just them.
constexpr SegmentLayout layout_of(const SegmentShape& shape) {
  SegmentLayout layout{};
  layout.lanes_offset = kHeaderBytes;
  layout.slots_offset =
      round_up(layout.lanes_offset + shape.lane_count * sizeof(LaneControl), 4096);
  layout.flags_offset =
      round_up(layout.slots_offset +
                   (std::uint64_t{shape.lane_count} << shape.slot_count_log2) * kCommandBytes,
               4096);
  layout.segment_bytes = round_up(layout.flags_offset + std::uint64_t{shape.flag_count} * 4, 4096);
  return layout;
}

}  // namespace mk::shm
