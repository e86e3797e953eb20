#include "kernels/gemm_ar/plan.h"

#include <algorithm>

#include "kernels/comm/banks.h"
#include "kernels/comm/launch_record.h"
#include "shm/limits.h"

namespace mk::kernels {
namespace {

constexpr std::uint32_t kSideMax = 1u << 24;  ///< of m and n
constexpr std::uint64_t kTilesMax = 1u << 30;
constexpr std::uint32_t kChunkBytesDefault = 256 * 1024;
constexpr std::uint32_t kChunkBytesMin = 32 * 1024;
constexpr std::uint32_t kTilesWanted = 16;  ///< of one owner
constexpr std::uint32_t kChunksWanted = 8;  ///< of one owner
constexpr std::uint64_t kPage = 4096;

static_assert(sizeof(LaunchRecord) == 64 && sizeof(BankHeader) == kBankHeaderBytes);

std::uint64_t tile_count(const GemmArPlan& plan) {
  return std::uint64_t{div_up(plan.max.m, plan.tile_m)} * div_up(plan.max.n, plan.tile_n);
}

/// The largest packed tile of any launch. Launches with smaller m may have larger tiles than the
/// largest launch (m = 129 gives two tiles of 65 rows, m = 128 one of 128), so this is the tile's
/// limit, not the largest launch's tile.
std::uint64_t slot_bytes_max(const GemmArPlan& plan) {
  const std::uint64_t cols = round_up_to(div_up(plan.max.n, div_up(plan.max.n, plan.tile_n)), 8);
  return std::min(plan.tile_m, plan.max.m) * cols * kElementBytes;
}

void choose_tiles(GemmArPlan& plan, const GemmArTiling& tiling) {
  plan.tile_m = tiling.tile_m != 0 ? tiling.tile_m : 128;
  plan.tile_n = tiling.tile_n != 0 ? tiling.tile_n : 256;
  const auto too_few = [&] { return tile_count(plan) < std::uint64_t{kTilesWanted} * plan.locals; };
  while (too_few()) {
    const bool can_m = tiling.tile_m == 0 && plan.tile_m > 32;
    const bool can_n = tiling.tile_n == 0 && plan.tile_n > 64;
    if (can_n && (plan.tile_n > plan.tile_m || !can_m)) {
      plan.tile_n /= 2;
    } else if (can_m) {
      plan.tile_m /= 2;
    } else {
      return;
    }
  }
}

void choose_chunks(GemmArPlan& plan, const GemmArTiling& tiling) {
  const std::uint64_t slot = slot_bytes_max(plan);
  plan.owned_max = static_cast<std::uint32_t>((tile_count(plan) + plan.locals - 1) / plan.locals);
  plan.chunk_bytes = tiling.chunk_bytes != 0 ? tiling.chunk_bytes : kChunkBytesDefault;
  const auto count = [&] {
    const auto tiles =
        static_cast<std::uint32_t>(std::max<std::uint64_t>(1, plan.chunk_bytes / slot));
    return div_up(plan.owned_max, tiles);
  };
  if (tiling.chunk_bytes == 0) {
    while (count() < kChunksWanted && plan.chunk_bytes > kChunkBytesMin) plan.chunk_bytes /= 2;
  }
  // One granule per sender and bank is the least; with very many nodes that alone may pass
  // kGemmArFlagsMax.
  while (FlagMap{plan.nodes, plan.banks, count()}.count() > kGemmArFlagsMax &&
         count() > shm::kFlagGranule) {
    plan.chunk_bytes =
        static_cast<std::uint32_t>(std::max<std::uint64_t>(plan.chunk_bytes, slot) * 2);
  }
  // Launches with smaller m have no larger tiles and no more of them, hence no more chunks.
  plan.chunks_max = count();
}

void lay_out(GemmArPlan& plan) {
  GemmArLayout& layout = plan.layout;
  layout = {};
  const auto place = [&](std::uint64_t bytes, std::uint64_t alignment) {
    const std::uint64_t offset = round_up_to(layout.bytes, alignment);
    layout.bytes = offset + bytes;
    return offset;
  };
  const std::uint64_t locals = plan.locals;
  const std::uint64_t tiles_bytes = plan.owned_max * slot_bytes_max(plan);
  layout.failed = place(64, 64);
  layout.records = place(kLaunchRecordBanks * locals * sizeof(LaunchRecord), 64);
  layout.tile_ready = place(locals * plan.owned_max * 4, 64);
  layout.chunk_reduced = place(std::uint64_t{plan.chunks_max} * 4, 64);
  layout.out_ready = place(locals * plan.chunks_max * 4, 64);
  layout.slot_region_bytes = round_up_to(tiles_bytes, 64);
  layout.slots = place(locals > 1 ? locals * layout.slot_region_bytes : 0, kPage);
  layout.bank_bytes = round_up_to(kBankHeaderBytes + tiles_bytes, kPage);
  layout.staging = place(plan.nodes > 1 ? plan.banks * layout.bank_bytes : 0, kPage);
  layout.receive = place(std::uint64_t{plan.banks} * (plan.nodes - 1) * layout.bank_bytes, kPage);
  layout.out = place(std::uint64_t{plan.max.m} * plan.max.n * kElementBytes, kPage);
  layout.bytes = round_up_to(layout.bytes, kPage);
}

}  // namespace

Result<GemmArPlan> GemmArPlan::make(std::uint32_t nodes, std::uint32_t locals, Shape max,
                                    DType dtype, const GemmArTiling& tiling) {
  if (nodes < 1 || nodes > shm::kNodesMax || locals < 1 || locals > shm::kLocalRanksMax ||
      nodes * locals > shm::kWorldMax) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: a world of {} nodes x {} local ranks is not possible; allowed are 1 to "
                "{} nodes, 1 to {} local "
                "ranks, at most {} ranks",
                nodes, locals, shm::kNodesMax, shm::kLocalRanksMax, shm::kWorldMax);
  }
  if (max.m < 1 || max.m > kSideMax || max.n < 1 || max.n > kSideMax) {
    return fail(ErrorCode::kInvalidArgument, "gemm_ar: m = {} and n = {} must each be 1 to {}",
                max.m, max.n, kSideMax);
  }
  if (dtype != DType::kBf16 && dtype != DType::kF16) {
    return fail(ErrorCode::kInvalidArgument, "gemm_ar: element type {} is neither bf16 nor f16",
                static_cast<unsigned>(dtype));
  }
  if (tiling.tile_m > 1024 || tiling.tile_n > 1024 || tiling.tile_n % 8 != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: tiles of {} x {} are not possible; a side is at most 1024 (0: chosen), "
                "tile_n a multiple of 8",
                tiling.tile_m, tiling.tile_n);
  }
  if (tiling.chunk_bytes > shm::kCommandPayloadBytesMax / 2) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: chunks of {} bytes are too large; at most {} (0: chosen)",
                tiling.chunk_bytes, shm::kCommandPayloadBytesMax / 2);
  }
  if (tiling.banks > kBanksMax) {
    return fail(ErrorCode::kInvalidArgument, "gemm_ar: {} banks are not possible; 1 or {} are",
                tiling.banks, kBanksMax);
  }
  GemmArPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.max = {max.m, max.n, 0};
  plan.dtype = dtype;
  plan.banks = tiling.banks != 0 ? tiling.banks : kBanksMax;
  choose_tiles(plan, tiling);
  if (tile_count(plan) > kTilesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "gemm_ar: {} x {} in tiles of {} x {} are {} tiles; at most {}: use larger tiles",
                max.m, max.n, plan.tile_m, plan.tile_n, tile_count(plan), kTilesMax);
  }
  choose_chunks(plan, tiling);
  if (plan.chunk_bytes > shm::kCommandPayloadBytesMax / 2) {
    return fail(ErrorCode::kLimitExceeded,
                "gemm_ar: {} x {} over {} nodes needs chunks of {} bytes; at most {}", max.m, max.n,
                nodes, plan.chunk_bytes, shm::kCommandPayloadBytesMax / 2);
  }
  lay_out(plan);
  if (plan.layout.bytes >= shm::kBufferBytesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "gemm_ar: {} x {} needs a workspace of {} bytes; at most {}", max.m, max.n,
                plan.layout.bytes, shm::kBufferBytesMax);
  }
  return plan;
}

std::uint32_t GemmArPlan::flag_count() const { return FlagMap{nodes, banks, chunks_max}.count(); }

std::uint64_t GemmArPlan::fingerprint() const {
  // FNV-1a over everything the rest follows from, and the version of the rules by which it follows.
  constexpr std::uint64_t kRules = 1;
  std::uint64_t hash = 0xcbf29ce484222325ull;
  const std::uint64_t parts[] = {
      kRules, nodes,  locals,      max.m, max.n,       static_cast<std::uint64_t>(dtype),
      tile_m, tile_n, chunk_bytes, banks, layout.bytes};
  for (std::uint64_t part : parts) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash ^= (part >> shift) & 0xff;
      hash *= 0x100000001b3ull;
    }
  }
  return hash;
}

}  // namespace mk::kernels
