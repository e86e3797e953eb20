#include "kernels/plan/candidate.h"

#include <tuple>

#include "shm/host/result.h"

namespace mk::kernels::plan {
namespace {

constexpr Op kOps[] = {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr};

auto fields(const Candidate& c) {
  return std::tuple(c.form, c.sums, c.engines, c.tiling.tile_m, c.tiling.tile_n,
                    c.tiling.chunk_bytes, c.tiling.banks, c.tiling.local_banks, c.stream_warpgroups,
                    c.receive_warpgroups, c.send_warpgroups, c.compute_blocks);
}

std::string bytes_text(std::uint32_t bytes) {
  return bytes % 1024 == 0 ? fmt::format("{} KiB", bytes / 1024) : fmt::format("{} bytes", bytes);
}

}  // namespace

std::string_view name_of(Op op) {
  return op == Op::kAgGemm ? "ag_gemm" : op == Op::kGemmRs ? "gemm_rs" : "gemm_ar";
}

Result<Op> op_named(std::string_view name) {
  for (Op op : kOps) {
    if (name == name_of(op)) return op;
  }
  return fail(ErrorCode::kInvalidArgument, "no operator is called '{}'; ag_gemm, gemm_rs, gemm_ar",
              name);
}

bool operator==(const Candidate& one, const Candidate& other) {
  return fields(one) == fields(other);
}

std::string describe(const Problem& problem, const Candidate& candidate) {
  std::string text =
      fmt::format("{}, tiles {}x{}, chunks of {}, {} SMs multiply", name_of(candidate.form),
                  candidate.tiling.tile_m, candidate.tiling.tile_n,
                  bytes_text(candidate.tiling.chunk_bytes), candidate.compute_blocks);
  const bool gather = problem.op == Op::kAgGemm;
  if (candidate.engines) text += ", copy engines share";
  if (candidate.sums == Sums::kOwn) text += ", math sums own tiles";
  if (candidate.sums == Sums::kOnce) text += ", own shard summed once";
  if (candidate.stream_warpgroups > 0)
    text +=
        fmt::format(", {} warpgroups {}", candidate.stream_warpgroups, gather ? "share" : "reduce");
  if (candidate.receive_warpgroups > 0)
    text += fmt::format(", {} receive", candidate.receive_warpgroups);
  return text;
}

}  // namespace mk::kernels::plan
