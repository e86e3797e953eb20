#include "kernels/ops/ring/packed.h"

#include <algorithm>

#include "kernels/ops/ring/schedule.h"

namespace mk::kernels {
namespace {

constexpr const char* kOp = "ring_attention";

std::uint32_t digest_of(std::span<const std::uint32_t> starts) {
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i + 1 < starts.size(); ++i) sum += LengthsDigest::of(i, starts[i + 1]);
  return LengthsDigest::finish(sum);
}

}  // namespace

PackedTables::PackedTables(const RingAttentionGeometry& plan, const World& world,
                           std::span<const std::uint32_t> starts)
    : items_{0}, rank_rows_(world.size()), digest_(digest_of(starts)) {
  const auto count = static_cast<std::uint32_t>(starts.size() - 1);
  first_rows_.resize(std::size_t{world.size()} * count);
  double pairs = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    rows_.push_back(starts[i + 1] - starts[i]);
    const RingAttentionSchedule schedule(plan, world, rows_.back(), Mode::kFused);
    items_.push_back(items_.back() + schedule.items());
    pairs += static_cast<double>(schedule.pairs());
    for (std::uint32_t rank = 0; rank < world.size(); ++rank) {
      first_rows_[std::size_t{rank} * count + i] = rank_rows_[rank];
      rank_rows_[rank] += schedule.rows(rank);
    }
    work_.steps = std::max(work_.steps, plan.nodes > 1 ? schedule.passes() : plan.locals);
  }
  const GatherSchedule gather(plan.gather, world);
  const auto rows_of = [&](std::uint32_t rank) { return plan.gathered_rows(rank_rows_[rank]); };
  work_.flops = 4.0 * plan.head_dim * plan.query_heads * pairs;
  work_.local_bytes = static_cast<double>(gather.local_bytes(rows_of));
  work_.network_bytes = static_cast<double>(gather.network_bytes(rows_of));
  work_.commands = gather.commands(rows_of);
}

PackedSequences PackedTables::view() const {
  return {static_cast<std::uint32_t>(rows_.size()), rows_.data(), items_.data(), first_rows_.data(),
          rank_rows_.data()};
}

Status check_starts(const RingAttentionPlan& plan, std::span<const std::uint32_t> starts) {
  if (plan.sequences_max == 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: sequences of different lengths need an operator that was made for them "
                "(sequences_max)",
                kOp);
  }
  if (starts.size() < 2 || starts.size() - 1 > plan.sequences_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} sequences; the operator was made for 1 to {} of them, with as many starts "
                "and one more",
                kOp, starts.empty() ? 0 : starts.size() - 1, plan.sequences_max);
  }
  if (starts[0] != 0) {
    return fail(ErrorCode::kInvalidArgument, "{}: the first sequence starts at row {}, not at 0",
                kOp, starts[0]);
  }
  const auto end = std::ranges::adjacent_find(starts, std::greater<>{});
  if (end != starts.end()) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: sequence {} starts at row {} and ends at row {}: none may end before it starts", kOp,
        end - starts.begin(), end[0], end[1]);
  }
  if (starts.back() > plan.seq_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} rows in all; the operator was made for {} at most", kOp, starts.back(),
                plan.seq_max);
  }
  return {};
}

}  // namespace mk::kernels
