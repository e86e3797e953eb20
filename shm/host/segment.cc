#include "shm/host/segment.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <iterator>
#include <string>

#include "shm/atomic.h"
#include "shm/host/memfd.h"
#include "shm/host/text.h"

namespace mk::shm {

namespace {

constexpr int kSegmentSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr const char* kReceived = "the received session segment";

/// A part of the segment, as the header states it.
struct Part {
  const char* name;
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint64_t alignment;
};

Status check_part(const Part& part, std::uint64_t first, std::uint64_t limit) {
  // `bytes` comes from a checked shape and is far below 2^64; the subtraction cannot wrap after the
  // comparison.
  if (part.offset % part.alignment != 0 || part.offset < first || part.offset > limit ||
      part.bytes > limit - part.offset) {
    return fail(ErrorCode::kProtocol,
                "the session segment's {} ({} bytes at offset {}) do not lie inside its {} bytes, "
                "aligned to {}",
                part.name, part.bytes, part.offset, limit, part.alignment);
  }
  return {};
}

/// The layout a received header states, if it holds together. `header` is our own copy.
Result<SegmentLayout> check_header(const SegmentHeader& header, const SegmentShape& shape,
                                   std::uint64_t file_size) {
  if (header.magic != kSegmentMagic) {
    return fail(ErrorCode::kProtocol, "{} is none of mkernel's: magic {:#018x} instead of {:#018x}",
                kReceived, header.magic, kSegmentMagic);
  }
  if (header.abi_major != kAbiMajor) {
    return fail(ErrorCode::kAbiMismatch,
                "the daemon speaks ABI {}.{} and this library {}.{}: install the same major "
                "version of both",
                header.abi_major, header.abi_minor, kAbiMajor, kAbiMinor);
  }
  if (header.header_bytes < sizeof(SegmentHeader) || header.header_bytes > header.segment_bytes ||
      header.segment_bytes > file_size) {
    return fail(ErrorCode::kProtocol,
                "{} states {} header bytes and {} bytes in all, but the file has {}", kReceived,
                header.header_bytes, header.segment_bytes, file_size);
  }
  if (!valid(shape)) {
    return fail(ErrorCode::kProtocol, "{} states {} lanes of 2^{} slots and {} flags: out of range",
                kReceived, shape.lane_count, shape.slot_count_log2, shape.flag_count);
  }
  const SegmentLayout layout{header.lanes_offset, header.slots_offset, header.flags_offset,
                             header.segment_bytes};
  Part parts[] = {
      {"lanes", layout.lanes_offset, shape.lane_count * sizeof(LaneControl), alignof(LaneControl)},
      {"slots", layout.slots_offset,
       (std::uint64_t{shape.lane_count} << shape.slot_count_log2) * kCommandBytes,
       alignof(CommandSlot)},
      {"flags", layout.flags_offset, std::uint64_t{shape.flag_count} * 4, kCacheLine},
  };
  for (const Part& part : parts)
    MK_RETURN_IF_ERROR(check_part(part, header.header_bytes, layout.segment_bytes));
  std::sort(std::begin(parts), std::end(parts),
            [](const Part& a, const Part& b) { return a.offset < b.offset; });
  for (std::size_t i = 1; i < std::size(parts); ++i) {
    const Part& before = parts[i - 1];
    if (parts[i].offset - before.offset < before.bytes) {
      return fail(ErrorCode::kProtocol, "{} states {} and {} that overlap", kReceived, before.name,
                  parts[i].name);
    }
  }
  return layout;
}

}  // namespace

Segment::Segment(UniqueFd fd, boost::interprocess::mapped_region region, const SegmentShape& shape,
                 const SegmentLayout& layout)
    : fd_(std::move(fd)),
      region_(std::move(region)),
      shape_(shape),
      layout_(layout),
      failed_(std::make_unique<std::atomic_flag>()) {}

Result<Segment> Segment::create(const SegmentShape& shape, std::uint64_t generation,
                                std::uint32_t session_id, std::uint32_t session_slot,
                                std::uint64_t features) {
  if (!valid(shape)) {
    return fail(ErrorCode::kInvalidArgument,
                "a session has 1 to {} lanes of {} to {} slots (a power of two) and {} to {} flags "
                "(in steps of {}); "
                "{} lanes of 2^{} slots and {} flags were asked for",
                kLanesMax, kRingSlotsMin, kRingSlotsMax, kFlagGranule, kFlagsMax, kFlagGranule,
                shape.lane_count, shape.slot_count_log2, shape.flag_count);
  }
  const SegmentLayout layout = layout_of(shape);
  const std::string name = fmt::format("mkernel-session-{}", session_id);
  MK_ASSIGN_OR_RETURN(UniqueFd fd, make_memfd(name, layout.segment_bytes));
  MK_ASSIGN_OR_RETURN(auto region, map_shared(fd.get(), layout.segment_bytes, name));
  auto& header = *static_cast<SegmentHeader*>(region.get_address());
  header.magic = kSegmentMagic;
  header.abi_major = kAbiMajor;
  header.abi_minor = kAbiMinor;
  header.header_bytes = kHeaderBytes;
  header.features = features;
  header.segment_bytes = layout.segment_bytes;
  header.generation = generation;
  header.session_id = session_id;
  header.session_slot = session_slot;
  header.lanes_offset = layout.lanes_offset;
  header.slots_offset = layout.slots_offset;
  header.flags_offset = layout.flags_offset;
  header.lane_count = shape.lane_count;
  header.slot_count_log2 = shape.slot_count_log2;
  header.flag_count = shape.flag_count;
  store_relaxed(&header.heartbeat_ns, monotonic_ns());
  MK_RETURN_IF_ERROR(add_seals(fd.get(), kSegmentSeals));
  return Segment(std::move(fd), std::move(region), shape, layout);
}

Result<Segment> Segment::map(UniqueFd fd) {
  MK_RETURN_IF_ERROR(require_seals(fd.get(), kSegmentSeals, kReceived));
  MK_ASSIGN_OR_RETURN(const std::uint64_t bytes, file_bytes(fd.get(), kReceived));
  // Checked on a private copy: another process that maps this memory cannot change it between check
  // and use.
  SegmentHeader header;
  const ssize_t got = ::pread(fd.get(), &header, sizeof header, 0);
  if (got < 0) return fail_errno(errno, "cannot read the header of {}", kReceived);
  if (static_cast<std::size_t>(got) < sizeof header) {
    return fail(ErrorCode::kProtocol, "{} has {} bytes, less than its header", kReceived, bytes);
  }
  const SegmentShape shape{header.lane_count, header.slot_count_log2, header.flag_count};
  MK_ASSIGN_OR_RETURN(const SegmentLayout layout, check_header(header, shape, bytes));
  MK_ASSIGN_OR_RETURN(auto region, map_shared(fd.get(), layout.segment_bytes, kReceived));
  return Segment(std::move(fd), std::move(region), shape, layout);
}

RingView Segment::ring(std::uint32_t lane) const {
  auto* base = static_cast<std::byte*>(region_.get_address());
  return RingView{reinterpret_cast<CommandSlot*>(base + layout_.slots_offset) +
                      (std::size_t{lane} << shape_.slot_count_log2),
                  reinterpret_cast<LaneControl*>(base + layout_.lanes_offset) + lane,
                  shape_.slot_count_log2};
}

std::uint32_t* Segment::flags() const {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(region_.get_address()) +
                                          layout_.flags_offset);
}

void Segment::publish_failure(ErrorCode code, std::string_view reason) const {
  // Decided on our own side, not by the error word: the other side can write that one too.
  if (code == ErrorCode::kOk || failed_->test_and_set()) return;
  const std::string_view text = clip_utf8(reason, kReasonBytesMax - 1);
  std::memcpy(header().reason, text.data(), text.size());
  header().reason[text.size()] = '\0';
  store_release(&header().error_word, static_cast<std::uint32_t>(code));
  store_release(&header().abort_flag, 1u);
}

Status Segment::failure() const {
  const auto code = static_cast<ErrorCode>(load_acquire(&header().error_word));
  if (code == ErrorCode::kOk) return {};
  return tl::unexpected<Error>(
      Error{code, std::string(header().reason, ::strnlen(header().reason, kReasonBytesMax))});
}

std::uint64_t monotonic_ns() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace mk::shm
