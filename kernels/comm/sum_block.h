/// \file
/// What blocks of the operators that sum (sum_geometry.h) have in common: the launch and its
/// schedule, the product before the sums, and the other nodes' sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/operator_block.h"
#include "kernels/comm/sum_job.h"

namespace mk::kernels {

/// `OperatorLaunch`: the operator's, with its schedule.
template <class Executor, class OperatorLaunch>
class SumBlock : public OperatorBlock<Executor> {
  using Base = OperatorBlock<Executor>;
  using Schedule = decltype(OperatorLaunch::schedule);

 public:
  using Base::await_arrival_flag;
  using Base::await_blocks;
  using Base::bank;
  using Base::site;
  using Base::world;

  MK_HOST_DEVICE SumBlock(Executor& executor_in, const OperatorLaunch& launch_in, Role role_in,
                          std::uint32_t index_in, BlockTotals& totals_in)
      : Base(executor_in, launch_in, role_in, index_in, totals_in),
        launch(launch_in),
        schedule(launch_in.schedule) {}

  const OperatorLaunch& launch;
  const Schedule& schedule;

  /// Where the sums of the node's rank of this rail arrive; a BankHeader is in front.
  MK_HOST_DEVICE std::byte* receive_bank(std::uint32_t from) const {
    return this->at(schedule.receive_bank(bank, world.node, from));
  }

  /// In front of what this rank sends.
  MK_HOST_DEVICE void write_header(std::uint64_t staging) const {
    auto* header = reinterpret_cast<BankHeader*>(this->at(staging));
    header->epoch = this->epoch;
    header->m = launch.m;
  }

  /// The job's last sources: what lies `offset` bytes into each node's receive bank, in node order;
  /// in this node's place `own`, or, of null, nothing.
  MK_HOST_DEVICE void add_node_sums(SumJob& job, std::uint64_t offset, const std::byte* own) const {
    const std::uint32_t first = world.node == 0 ? 1 : 0;
    const BankedSources sums{receive_bank(first) + offset, launch.plan.layout.bank_bytes, own,
                             own == nullptr ? BankedSources::kNowhere : world.node};
    job.add_banks(sums, own == nullptr ? world.nodes - 1 : world.nodes);
  }

  /// Has the job make the result of the product's tile at `rect`.
  MK_HOST_DEVICE void finish(SumJob& job, const TileRect& rect) const {
    job.target_type = Partials::kElement;
    job.activation = launch.plan.epilogue.activation;
    if (launch.bias != nullptr) job.bias = launch.bias + rect.column;
  }

  // --- Awaited by this block; false: the launch has failed ---

  /// The node's sum of the chunk is in its receive bank here, made with the same m. `number`: of
  /// the chunk among those of that bank, the first of which brings the header.
  MK_HOST_DEVICE bool await_arrival(std::uint32_t node, std::uint32_t chunk, std::uint32_t number) {
    const std::uint32_t flag = schedule.flags().arrival(bank, world.node, node, number);
    if (!await_arrival_flag(node, flag, chunk)) return false;
    if (number != 0) return true;
    const auto* header = reinterpret_cast<const BankHeader*>(receive_bank(node));
    return this->check_m(this->arrival_site(node, chunk), header->m);
  }
  /// The local ranks' partials of this owner's tile are where their flags say, which are `flags`.
  MK_HOST_DEVICE bool await_partials(std::uint32_t tile, const FlagRow& flags) {
    return this->await_each(world.locals, this->epoch, flags,
                            [&](std::uint32_t source) { return partial_site(source, tile); });
  }
  /// Those of the others.
  MK_HOST_DEVICE bool await_other_partials(std::uint32_t tile, const FlagRow& flags) {
    const auto source_of = [&](std::uint32_t i) { return i >= world.local ? i + 1 : i; };
    return this->await_each(
        world.locals - 1, this->epoch, [&](std::uint32_t i) { return flags(source_of(i)); },
        [&](std::uint32_t i) { return partial_site(source_of(i), tile); });
  }
  /// In unfused mode: this rank's product is done.
  MK_HOST_DEVICE bool await_turn() {
    return launch.mode != Mode::kUnfused || await_blocks(Role::kCompute, launch.blocks.compute, 0);
  }

 private:
  MK_HOST_DEVICE WaitSite partial_site(std::uint32_t source, std::uint32_t tile) const {
    return site(FlagKind::kTileReady, this->rank_of(source), source, tile, 0);
  }

 protected:
  /// Of a node with one rank: where it waits for its own tile, as await_own_tiles wants it.
  MK_HOST_DEVICE auto own_tile_site() const {
    return
        [this](std::uint32_t tile) { return site(FlagKind::kTileReady, world.rank(), 0, tile, 0); };
  }
};

}  // namespace mk::kernels
