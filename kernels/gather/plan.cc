#include "kernels/gather/plan.h"

#include <algorithm>

#include "kernels/comm/banks.h"
#include "shm/limits.h"

namespace mk::kernels {
namespace {

constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kChunkRows = 128;
constexpr std::uint64_t kChunkBytesMin = 32 * 1024;
constexpr std::uint64_t kChunkBytesMax = 4 * 1024 * 1024;  ///< of those chosen here
constexpr std::uint64_t kChunksWanted = 4;                 ///< of one rank

/// Rows begin at a multiple of it: a line of L2, and of NVLink's packets.
constexpr std::uint64_t kRowsAlign = 128;

static_assert(kGatherHeaderBytes == kLine);

std::uint64_t count_chunks(const GatherGeometry& plan, std::uint64_t chunk_bytes) {
  const std::uint64_t bytes = std::uint64_t{plan.rows_max} * plan.row_bytes;
  return (bytes + chunk_bytes - 1) / chunk_bytes;
}

bool too_many(const GatherGeometry& plan, std::uint32_t flags_max, std::uint64_t chunk_bytes) {
  const std::uint64_t chunks = 1 + count_chunks(plan, chunk_bytes);
  if (chunks > kGatherChunksMax) return true;
  const FlagMap flags{plan.nodes, plan.banks, static_cast<std::uint32_t>(chunks)};
  return flags.count() > flags_max && chunks > kSenderFlagsLeast;
}

std::uint64_t choose_chunk_bytes(const GatherGeometry& plan, std::uint32_t flags_max,
                                 std::uint32_t asked) {
  std::uint64_t bytes = asked;
  if (asked == 0) {
    bytes = std::clamp(kChunkRows * plan.row_bytes, kChunkBytesMin, kChunkBytesMax);
    while (count_chunks(plan, bytes) < kChunksWanted && bytes / 2 >= kChunkBytesMin) bytes /= 2;
  }
  bytes = round_up_to(bytes, kLine);
  while (too_many(plan, flags_max, bytes)) bytes *= 2;
  return bytes;
}

}  // namespace

Result<GatherPlan> GatherPlan::make(std::string_view op, std::uint32_t nodes, std::uint32_t locals,
                                    const GatherShape& shape, GatherKind kind,
                                    std::uint32_t chunk_bytes, std::uint32_t banks,
                                    std::uint32_t local_banks) {
  MK_RETURN_IF_ERROR(check_world(op, nodes, locals));
  if (shape.rows_max < 1 || shape.rows_max > kGatherRowsMax) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} rows of one rank cannot be gathered; 1 to {} can", op, shape.rows_max,
                kGatherRowsMax);
  }
  MK_RETURN_IF_ERROR(check_tiling(op, {0, 0, chunk_bytes, banks, local_banks}));
  if (shape.row_bytes < 1 || shape.row_bytes > kGatherRowBytesMax) {
    return fail(ErrorCode::kInvalidArgument, "{}: rows of {} bytes cannot be gathered; 1 to {} can",
                op, shape.row_bytes, kGatherRowBytesMax);
  }
  GatherPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.kind = kind;
  plan.rows_max = shape.rows_max;
  plan.row_bytes = shape.row_bytes;
  plan.banks = banks != 0 ? banks : kBanksMax;
  plan.local_banks = local_banks != 0 ? std::min(local_banks, plan.banks) : plan.banks;
  if (nodes == 1) plan.banks = plan.local_banks;
  const std::uint64_t shard_bytes = std::uint64_t{plan.rows_max} * plan.row_bytes;
  if (shard_bytes > kGatherShardBytesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} rows of {} bytes per rank are {} bytes; at most {} can be gathered", op,
                shape.rows_max, shape.row_bytes, shard_bytes, kGatherShardBytesMax);
  }
  const std::uint64_t bytes = choose_chunk_bytes(plan, shape.flags_max, chunk_bytes);
  if (bytes > shm::kCommandPayloadBytesMax / 2) {
    return fail(
        ErrorCode::kLimitExceeded,
        "{}: {} rows of {} bytes per rank over {} nodes need chunks of {} bytes; at most {}", op,
        shape.rows_max, shape.row_bytes, nodes, bytes, shm::kCommandPayloadBytesMax / 2);
  }
  plan.chunk_bytes = static_cast<std::uint32_t>(bytes);
  plan.chunks_max = static_cast<std::uint32_t>(1 + count_chunks(plan, bytes));
  plan.layout.slot_bytes =
      round_up_to(kGatherHeaderBytes + std::uint64_t{plan.rows_max} * plan.row_bytes, kRowsAlign);
  return plan;
}

void GatherPlan::place(WorkspaceLayout& workspace, std::uint32_t first) {
  first_flag = first;
  const std::uint64_t world = std::uint64_t{nodes} * locals;
  const bool pulled = kind == GatherKind::kPull && nodes > 1;
  layout.ready = workspace.place(world == 1 ? 0 : world * chunks_max * 4, kLine);
  layout.drained = workspace.place(pulled ? locals * kLine : 0, kLine);
  layout.sent = workspace.place(nodes > 1 ? locals * kLine : 0, kLine);
}

void GatherPlan::place_rows(WorkspaceLayout& workspace) {
  const std::uint64_t world = std::uint64_t{nodes} * locals;
  const std::uint64_t slots = world == 1 ? 0 : kind == GatherKind::kBroadcast ? world : nodes;
  constexpr std::uint64_t kBeforeHeader = kRowsAlign - kGatherHeaderBytes;
  const std::uint64_t bytes = slots == 0 ? 0 : kBeforeHeader + banks * slots * layout.slot_bytes;
  layout.slots = workspace.place(bytes, kPage) + kBeforeHeader;
}

std::uint32_t GatherPlan::flag_count() const {
  const FlagMap flags{nodes, banks, chunks_max};
  return static_cast<std::uint32_t>(round_up_to(flags.count(), shm::kFlagGranule));
}

std::uint64_t GatherPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 6;
  return fingerprint_of({FlagMap{nodes, banks, chunks_max}.rules(kRules), nodes, locals,
                         static_cast<std::uint64_t>(kind), rows_max, row_bytes, chunk_bytes,
                         turn_chunks, banks, local_banks, first_flag, layout.slots});
}

}  // namespace mk::kernels
