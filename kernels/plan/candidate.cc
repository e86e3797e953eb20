#include "kernels/plan/candidate.h"

#include <tuple>
#include <utility>

#include "kernels/ops/ring/spec.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {
namespace {

constexpr std::pair<Op, std::string_view> kOps[] = {
    {Op::kAgGemm, "ag_gemm"}, {Op::kGemmRs, "gemm_rs"}, {Op::kGemmAr, "gemm_ar"},
    {Op::kRing, "ring"},      {Op::kMoe, "moe"},        {Op::kCombine, "combine"}};

auto fields(const Candidate& c) {
  return std::tuple(c.form, c.sums, c.engines, c.heads_together, c.turn_chunks, c.tiling.tile_m,
                    c.tiling.tile_n, c.tiling.chunk_bytes, c.tiling.banks, c.tiling.local_banks,
                    c.tiling.exchange, c.stream_warpgroups, c.receive_warpgroups, c.send_warpgroups,
                    c.compute_blocks);
}

std::string bytes_text(std::uint32_t bytes) {
  return bytes % 1024 == 0 ? fmt::format("{} KiB", bytes / 1024) : fmt::format("{} bytes", bytes);
}

}  // namespace

std::string_view name_of(Op op) { return kOps[static_cast<std::size_t>(op)].second; }

Result<Op> op_named(std::string_view name) {
  std::string names;
  for (const auto& [op, its_name] : kOps) {
    if (name == its_name) return op;
    names += names.empty() ? its_name : fmt::format(", {}", its_name);
  }
  return fail(ErrorCode::kInvalidArgument, "no operator is called '{}'; there are {}", name, names);
}

bool operator==(const Candidate& one, const Candidate& other) {
  return fields(one) == fields(other);
}

std::string describe(const Problem& problem, const Candidate& candidate) {
  const Tiling& tiling = candidate.tiling;
  std::string text = fmt::format("{}, ", name_of(candidate.form));
  text += tiling.tile_m == 0 ? "the plan's tiles"
                             : fmt::format("tiles {}x{}", tiling.tile_m, tiling.tile_n);
  text += tiling.chunk_bytes == 0 ? " and chunks"
                                  : fmt::format(", chunks of {}", bytes_text(tiling.chunk_bytes));
  text += fmt::format(", {} SMs multiply", candidate.compute_blocks);
  const bool sums =
      problem.op == Op::kGemmRs || problem.op == Op::kGemmAr || problem.op == Op::kCombine;
  if (has_exchanges(problem))
    text += tiling.exchange == Exchange::kTwoShot ? ", two-shot exchange" : ", one-shot exchange";
  if (candidate.engines) text += ", copy engines share";
  if (candidate.heads_together > 1)
    text += fmt::format(" {} heads together", candidate.heads_together);
  if (candidate.turn_chunks == RingAttentionTiling::kWholeShards)
    text += ", shard after shard";
  else if (candidate.turn_chunks != 0)
    text += fmt::format(", shards take turns of {} chunks", candidate.turn_chunks);
  if (candidate.sums == Sums::kOwn) text += ", math sums own tiles";
  if (candidate.sums == Sums::kOnce) text += ", own shard summed once";
  if (candidate.stream_warpgroups > 0)
    text +=
        fmt::format(", {} warpgroups {}", candidate.stream_warpgroups, sums ? "reduce" : "share");
  if (candidate.receive_warpgroups > 0)
    text += fmt::format(", {} receive", candidate.receive_warpgroups);
  return text;
}

}  // namespace mk::kernels::plan
