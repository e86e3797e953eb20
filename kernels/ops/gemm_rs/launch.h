/// \file
/// What the blocks of one GEMM+ReduceScatter launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/ops/gemm_rs/schedule.h"

namespace mk::kernels {

struct GemmRsLaunch : Launch {
  GemmRsGeometry plan;
  GemmRsSchedule schedule;  ///< make_schedule()
  /// This rank's compute blocks add up the tiles of its own shard as they compute them, where a
  /// launch is fused and the world one node of two ranks; nobody reduces then. Ranks may differ.
  bool accumulates_own = false;
  const std::uint16_t* bias = nullptr;  ///< the caller's, of all columns; or null
  /// Over several nodes of several ranks: what this rank's node has of its shard is not summed by
  /// itself, to be kept (reduce). It is summed together with what has come from the other nodes
  /// (receive), in one pass. For launches whose product takes longer than the network, so that the
  /// others' sums are there first. The bits are the same; ranks may differ.
  bool sums_once = false;
  /// The nodes' sums are added in node order for all owners; else the owner's node comes
  /// first. Not together with sums_once. Ranks that differ give bits of both kinds.
  bool in_node_order = false;

  /// When m is settled, before the blocks begin.
  void make_schedule() { schedule = GemmRsSchedule(plan, m); }
  /// Chunks that this rank sends to other nodes.
  std::uint32_t chunks_sent() const {
    return schedule.pieces_sent(context.world.node, context.world.local);
  }
  MK_HOST_DEVICE bool accumulates_own_tiles() const {
    return accumulates_own && plan.adds_in_place() && mode != Mode::kUnfused && plan.nodes == 1 &&
           plan.locals == 2;
  }
  MK_HOST_DEVICE bool sums_shard_once() const {
    const std::uint32_t sources = plan.locals + plan.nodes - 1;
    return sums_once && plan.nodes > 1 && plan.locals > 1 && sources <= shm::kLocalRanksMax;
  }
  /// Of schedule.pieces() those that this rank's reduce role sums, the first ones.
  MK_HOST_DEVICE std::uint32_t pieces_reduced() const {
    const World& world = context.world;
    return sums_shard_once() ? schedule.pieces_sent(world.node, world.local)
                             : schedule.pieces(world.node, world.local);
  }
};

}  // namespace mk::kernels
