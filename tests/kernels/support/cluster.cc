#include "tests/kernels/support/cluster.h"

#include <cstdlib>
#include <cstring>

namespace mk::kernels::testing {

void RankMemory::PageDeleter::operator()(std::byte* memory) const { std::free(memory); }

Cluster::Cluster(const ClusterShape& shape) : shape_(shape) {
  for (std::uint32_t rank = 0; rank < shape.nodes * shape.locals; ++rank) {
    auto memory = std::make_unique<RankMemory>();
    memory->world = {shape.nodes, shape.locals, rank / shape.locals, rank % shape.locals};
    memory->workspace_bytes = round_up_to(shape.workspace_bytes, 4096);
    memory->workspace.reset(
        static_cast<std::byte*>(std::aligned_alloc(4096, memory->workspace_bytes)));
    std::memset(memory->workspace.get(), 0, memory->workspace_bytes);
    // Handles and flag ranges differ from rank to rank, as they do in a session with several
    // buffers.
    memory->workspace_handle = static_cast<std::uint16_t>(3 + 5 * rank);
    memory->flag_base = shm::kFlagGranule * (1 + rank % 3);
    memory->flags.assign(memory->flag_base + round_up_to(shape.flag_count, shm::kFlagGranule), 0);
    const std::size_t slots = std::size_t{1} << shape.slot_count_log2;
    memory->slots.resize(shape.lanes * slots);
    memory->controls.resize(shape.lanes);
    memory->producers.resize(shape.lanes);
    for (std::uint32_t lane = 0; lane < shape.lanes; ++lane) {
      memory->producers[lane].ring = {memory->slots.data() + lane * slots, &memory->controls[lane],
                                      shape.slot_count_log2};
    }
    ranks_.push_back(std::move(memory));
  }
}

RankContext Cluster::context(std::uint32_t rank) {
  RankMemory& own = *ranks_[rank];
  RankContext context;
  context.world = own.world;
  for (std::uint32_t local = 0; local < shape_.locals; ++local) {
    context.workspaces[local] = ranks_[own.world.node * shape_.locals + local]->workspace.get();
  }
  context.workspace_handle = own.workspace_handle;
  own.rail_peers.clear();
  for (std::uint32_t node = 0; node < shape_.nodes; ++node) {
    const RankMemory& peer = *ranks_[own.world.rail_peer(node)];
    own.rail_peers.push_back(
        {static_cast<std::uint16_t>(peer.world.rank()), peer.workspace_handle, peer.flag_base});
  }
  context.rail_peers = own.rail_peers.data();
  context.lanes = own.producers.data();
  context.lane_count = shape_.lanes;
  context.arrival_flags = own.flags.data() + own.flag_base;
  context.flag_base = own.flag_base;
  context.flag_count = shape_.flag_count;
  context.session_abort = &own.session_abort;
  context.process_abort = &own.process_abort;
  return context;
}

}  // namespace mk::kernels::testing
