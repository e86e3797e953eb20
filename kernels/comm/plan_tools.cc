#include "kernels/comm/plan_tools.h"

#include <bit>

#include "kernels/comm/workspace_head.h"
#include "shm/limits.h"

namespace mk::kernels {

Status check_world(std::string_view op, std::uint32_t nodes, std::uint32_t locals) {
  if (nodes >= 1 && nodes <= shm::kNodesMax && locals >= 1 && locals <= shm::kLocalRanksMax &&
      nodes * locals <= shm::kWorldMax) {
    return {};
  }
  return fail(
      ErrorCode::kInvalidArgument,
      "{}: a world of {} nodes x {} local ranks is not possible; allowed are 1 to {} nodes, "
      "1 to {} local ranks, at most {} ranks",
      op, nodes, locals, shm::kNodesMax, shm::kLocalRanksMax, shm::kWorldMax);
}

Status check_dtype(std::string_view op, DType dtype) {
  if (dtype == DType::kBf16 || dtype == DType::kF16) return {};
  return fail(ErrorCode::kInvalidArgument, "{}: element type {} is neither bf16 nor f16", op,
              static_cast<unsigned>(dtype));
}

Status check_side(std::string_view op, std::string_view name, std::uint64_t side) {
  if (side >= 1 && side <= kSideMax) return {};
  return fail(ErrorCode::kInvalidArgument, "{}: {} = {} must be 1 to {}", op, name, side, kSideMax);
}

Status check_result(std::string_view op, const GemmResult& result, std::uint32_t n) {
  if (result.epilogue.activation > Activation::kGatedSilu) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: activation {} is none; there are none (0), ReLU (1), GELU (2), SiLU (3), gated "
        "SiLU (4)",
        op, static_cast<unsigned>(result.epilogue.activation));
  }
  if (result.partials > Partials::kF32) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: partial sums travel as elements (0) or in fp32 (1), not as {}", op,
                static_cast<unsigned>(result.partials));
  }
  if (result.epilogue.gated() && n % 2 != 0) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: gated SiLU makes one column of two, a gate and its up projection; n = {} is odd", op,
        n);
  }
  return {};
}

Status check_bias(std::string_view op, const Epilogue& epilogue, const void* bias) {
  if (epilogue.bias == (bias != nullptr)) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: bias is {}, but the operator was created with{} one", op,
              epilogue.bias ? "null" : "given", epilogue.bias ? "" : "out");
}

Status check_tiling(std::string_view op, const Tiling& tiling) {
  if (tiling.tile_m > 1024 || tiling.tile_n > 1024 || tiling.tile_n % 8 != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: tiles of {} x {} are not possible; a side is at most 1024 (0: chosen), tile_n "
                "a multiple of 8",
                op, tiling.tile_m, tiling.tile_n);
  }
  if (tiling.chunk_bytes > shm::kCommandPayloadBytesMax / 2) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: chunks of {} bytes are too large; at most {} (0: chosen)", op,
                tiling.chunk_bytes, shm::kCommandPayloadBytesMax / 2);
  }
  if (tiling.exchange > Exchange::kTwoShot) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: exchange {} is none; there are chosen (0), one-shot (1), two-shot (2)", op,
                static_cast<unsigned>(tiling.exchange));
  }
  for (const std::uint32_t banks : {tiling.banks, tiling.local_banks}) {
    if (banks > kBanksMax) {
      return fail(ErrorCode::kInvalidArgument, "{}: {} banks are not possible; 1 or {} are", op,
                  banks, kBanksMax);
    }
  }
  return {};
}

Status check_context(std::string_view op, std::uint32_t nodes, std::uint32_t locals,
                     std::uint32_t flag_count, std::uint32_t send_blocks,
                     const RankContext& context) {
  const World& world = context.world;
  if (world.nodes != nodes || world.locals != locals) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: the plan is for {} nodes x {} local ranks, the context for {} x {}", op, nodes,
                locals, world.nodes, world.locals);
  }
  if (world.node >= world.nodes || world.local >= world.locals) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: node {}, local rank {} is not in a world of {} x {}", op, world.node,
                world.local, world.nodes, world.locals);
  }
  for (std::uint32_t local = 0; local < world.locals; ++local) {
    if (context.workspaces[local] == nullptr ||
        reinterpret_cast<std::uintptr_t>(context.workspaces[local]) % 64 != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: the workspace of local rank {} is missing or not aligned to 64 bytes", op,
                  local);
    }
  }
  if (world.nodes == 1) return {};
  if (context.lanes == nullptr || context.lane_count < send_blocks) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} send blocks need as many lanes; the context has {}", op, send_blocks,
                context.lane_count);
  }
  if (context.arrival_flags == nullptr || context.flag_count < flag_count ||
      context.flag_base % shm::kFlagGranule != 0) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: needs {} arrival flags from a multiple of {} on; the context has {} from {} on", op,
        flag_count, shm::kFlagGranule, context.flag_count, context.flag_base);
  }
  if (context.rail_peers == nullptr)
    return fail(ErrorCode::kInvalidArgument, "{}: the context names no rail peers", op);
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node || context.rail_peers[node].rank == world.rail_peer(node)) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}: the rail peer on node {} is rank {}, the context says {}", op, node,
                world.rail_peer(node), context.rail_peers[node].rank);
  }
  return {};
}

Status check_row_tiles(std::string_view op, std::uint32_t tile_m) {
  constexpr std::uint32_t kLeast = 8;
  constexpr std::uint32_t kMost = 256;
  if (tile_m == 0 || (tile_m >= kLeast && tile_m <= kMost && std::has_single_bit(tile_m)))
    return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: tiles of {} rows are not possible; a power of two from {} to {} is (0: chosen)",
              op, tile_m, kLeast, kMost);
}

WorkspaceLayout::WorkspaceLayout(std::uint32_t locals) : end_(WorkspaceHead{locals}.bytes()) {}

std::uint64_t WorkspaceLayout::place(std::uint64_t bytes, std::uint64_t alignment) {
  const std::uint64_t offset = round_up_to(end_, alignment);
  end_ = offset + bytes;
  return offset;
}

void WorkspaceLayout::begin_data() { end_ = words_ = round_up_to(end_, kPage); }

WorkspaceParts WorkspaceLayout::parts() const {
  return {words_, round_up_to(end_, kPage) - words_, words_};
}

Status check_workspace(std::string_view op, std::uint64_t bytes) {
  if (bytes < shm::kBufferBytesMax) return {};
  return fail(ErrorCode::kLimitExceeded, "{}: needs a workspace of {} bytes; at most {}", op, bytes,
              shm::kBufferBytesMax);
}

std::uint64_t fingerprint_of(std::initializer_list<std::uint64_t> parts) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (std::uint64_t part : parts) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash ^= (part >> shift) & 0xff;
      hash *= 0x100000001b3ull;
    }
  }
  return hash;
}

}  // namespace mk::kernels
