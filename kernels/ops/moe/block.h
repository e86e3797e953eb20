/// \file
/// A block of MoE Dispatch+GEMM: where its arrays and rows lie, and what its flags mean. The
/// roles themselves are in roles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/operator_block.h"
#include "kernels/gather/block.h"
#include "kernels/gather/copy_job.h"
#include "kernels/ops/moe/launch.h"
#include "kernels/ops/moe/schedule.h"

namespace mk::kernels {

/// WaitSite::hops of waits for blocks of this rank, which may be waiting for rows in turn.
inline constexpr std::uint32_t kMoeDispatchHops = kGatherHopsMax + 1;

/// This rank's routing plan of the launch, in its workspace.
MK_HOST_DEVICE inline RoutingPlan routing_plan_of(const MoeDispatchLaunch& launch) {
  const World& world = launch.context.world;
  const MoeDispatchLayout& layout = launch.plan.layout;
  std::byte* const workspace = launch.context.workspaces[world.local];
  RoutingPlan::Arrays arrays;
  arrays.counts = reinterpret_cast<std::uint32_t*>(workspace + layout.counts);
  arrays.places = reinterpret_cast<std::uint32_t*>(workspace + layout.places);
  arrays.offsets = reinterpret_cast<std::uint32_t*>(workspace + layout.offsets);
  arrays.tiles = reinterpret_cast<RowTile*>(workspace + layout.tiles);
  arrays.rows = reinterpret_cast<MoeRow*>(workspace + layout.rows);
  arrays.summary = &reinterpret_cast<MoePlanWords*>(workspace + layout.words)->summary;
  return RoutingPlan(routing_shape(launch.plan, world), arrays);
}

template <class Executor>
class MoeDispatchBlock : public OperatorBlock<Executor> {
 public:
  using OperatorBlock<Executor>::at;
  using OperatorBlock<Executor>::await;
  using OperatorBlock<Executor>::await_blocks;
  using OperatorBlock<Executor>::epoch;
  using OperatorBlock<Executor>::index;
  using OperatorBlock<Executor>::publish;
  using OperatorBlock<Executor>::site;
  using OperatorBlock<Executor>::word;
  using OperatorBlock<Executor>::world;

  MK_HOST_DEVICE MoeDispatchBlock(Executor& executor_in, const MoeDispatchLaunch& launch_in,
                                  Role role_in, std::uint32_t index_in, BlockTotals& totals_in)
      : OperatorBlock<Executor>(executor_in, launch_in, role_in, index_in, totals_in),
        launch(launch_in),
        schedule(launch_in.plan, launch_in.context.world),
        plan(routing_plan_of(launch_in)),
        routing(*this, schedule.routing(), launch_in.routing.tokens),
        tokens(*this, schedule.tokens(), launch_in.routing.tokens),
        words_(reinterpret_cast<MoePlanWords*>(at(launch_in.plan.layout.words))) {}
  MoeDispatchBlock(const MoeDispatchBlock&) = delete;  // the gathers point to this
  MoeDispatchBlock& operator=(const MoeDispatchBlock&) = delete;

  const MoeDispatchLaunch& launch;
  const MoeDispatchSchedule schedule;
  const RoutingPlan plan;
  GatherBlock<Executor> routing;  ///< the gather of the routing tables
  GatherBlock<Executor> tokens;   ///< the gather of the tokens

  // --- What this rank shares ---

  MK_HOST_DEVICE GatherSource own_routing() const {
    const std::uint32_t bytes = launch.routing.stride * 4;
    GatherSource source;
    source.add(launch.routing.ids, bytes, bytes);
    source.add(launch.routing.weights, bytes, bytes);
    source.rows = launch.routing.tokens;
    return source;
  }
  MK_HOST_DEVICE GatherSource own_tokens() const {
    return GatherSource::of(launch.tokens, schedule.token_bytes(), schedule.token_bytes(),
                            launch.routing.tokens);
  }

  // --- The routing plan ---

  /// The whole table of that rank, when it is here.
  MK_HOST_DEVICE bool await_table(std::uint32_t rank, RoutingTable* table) {
    *table = launch.routing;
    if (rank == world.rank()) return true;
    if (!routing.await_row_count(rank, &table->tokens) ||
        !routing.await_rows(rank, 0, table->tokens))
      return false;
    const std::byte* rows = routing.rows(rank);
    const std::uint32_t top_k = launch.plan.shape.top_k;
    table->stride = 2 * top_k;
    table->ids = reinterpret_cast<const std::int32_t*>(rows);
    table->weights = reinterpret_cast<const float*>(rows) + top_k;
    return true;
  }
  MK_HOST_DEVICE void publish_counted() { this->publish_within_rank(&words_->counted[index]); }
  /// Blocks that have no part to count are not waited for.
  MK_HOST_DEVICE bool await_counted() {
    const std::uint32_t parts = plan.shape().parts();
    const std::uint32_t all = launch.blocks.plan;
    const std::uint32_t blocks = all < parts ? all : parts;
    return this->await_each(blocks, epoch, FlagRow{words_->counted}, [&](std::uint32_t block) {
      const auto plan_role = static_cast<std::uint32_t>(Role::kPlan);
      return site(FlagKind::kBlockDone, world.rank(), plan_role, block, kMoeDispatchHops);
    });
  }
  MK_HOST_DEVICE void publish_arranged() { this->publish_within_rank(&words_->arranged); }
  MK_HOST_DEVICE bool await_arranged() {
    return await(site(FlagKind::kPlanReady, world.rank(), 0, 0, kMoeDispatchHops),
                 &words_->arranged, epoch);
  }
  /// After a plan without tiles, by one block.
  MK_HOST_DEVICE void note_refusal() const {
    MoeRefusals& refusals = *launch.refusals;
    refusals.epoch = epoch;
    refusals.capacity = launch.capacity;
    refusals.summary = plan.summary();
    shm::store_release(&refusals.count, shm::load_relaxed(&refusals.count) + 1);
  }
  /// The plan is made.
  MK_HOST_DEVICE bool await_plan() {
    return await_blocks(Role::kPlan, launch.blocks.plan, kMoeDispatchHops);
  }
  /// Row tiles to compute: none where the rows do not fit.
  MK_HOST_DEVICE std::uint32_t row_tiles() const { return plan.summary().tiles; }

  // --- Rows ---

  /// The token of that output row, when it is here; null: the launch has failed.
  MK_HOST_DEVICE const std::byte* await_token(const MoeRow& row) {
    const std::uint64_t offset = std::uint64_t{row.token} * schedule.token_bytes();
    if (row.rank == world.rank()) return launch.tokens + offset;
    if (!tokens.await_rows(row.rank, row.token, row.token + 1)) return nullptr;
    return tokens.rows(row.rank) + offset;
  }
  /// The rank whose tokens the tile needs last.
  MK_HOST_DEVICE std::uint32_t last_source(const RowTile& tile) const {
    return plan.rows()[tile.row + tile.rows - 1].rank;
  }
  MK_HOST_DEVICE std::byte* packed(const RowTile& tile) const {
    return at(schedule.packed_row(tile.packed_row));
  }
  /// This rank's pull blocks have read the last row.
  MK_HOST_DEVICE bool await_pulled() {
    return await_blocks(Role::kPull, launch.blocks.pull, kMoeDispatchHops);
  }
  MK_HOST_DEVICE void publish_packed(std::uint32_t row_tile) {
    publish(word(at(schedule.rows_packed(row_tile))));
  }
  MK_HOST_DEVICE bool await_packed(std::uint32_t row_tile) {
    return await(site(FlagKind::kRowsPacked, world.rank(), row_tile, 0, kMoeDispatchHops),
                 word(at(schedule.rows_packed(row_tile))), epoch);
  }

 private:
  MoePlanWords* const words_;
};

}  // namespace mk::kernels
