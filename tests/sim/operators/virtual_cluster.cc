#include "tests/sim/operators/virtual_cluster.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "shm/flag.h"

namespace mk::sim {
namespace {

using kernels::FlagMap;

constexpr std::uint32_t kHeaderBytesMax = 256;
constexpr std::uint64_t kPageBytes = 4096;

/// A node's number as node `by` would have it, were it node 0.
std::uint32_t turned(std::uint32_t node, std::uint32_t by, std::uint32_t nodes) {
  return (node + nodes - by) % nodes;
}
/// The node that peer_index(at, node) stands for.
std::uint32_t node_of_peer(std::uint32_t at, std::uint32_t index) {
  return index < at ? index : index + 1;
}

double us_of(double bytes, double gb_s) { return gb_s > 0 ? bytes / (gb_s * 1e3) : 0; }

}  // namespace

VirtualCluster::VirtualCluster(VirtualThreads& threads, const ClusterOptions& options,
                               const Costs& costs, NodeNumbers numbers)
    : threads_(threads), options_(options), costs_(costs), numbers_(std::move(numbers)) {
  const std::uint32_t nodes = options.mirrored ? 1 : options.nodes;
  const std::size_t slots = std::size_t{1} << options.slot_count_log2;
  for (std::uint32_t index = 0; index < nodes * options.locals; ++index) {
    auto rank = std::make_unique<Rank>();
    rank->world = {options.nodes, options.locals, index / options.locals, index % options.locals};
    // Zeroed, and there only where it is touched: a workspace may be larger than this machine.
    void* const memory =
        mmap(nullptr, kernels::round_up_to(options.workspace_bytes, kPageBytes),
             PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    rank->workspace = static_cast<std::byte*>(memory);
    rank->flags.assign(options.flag_count, options.ended);
    rank->slots.resize(options.lanes * slots);
    rank->controls.resize(options.lanes);
    rank->producers.resize(options.lanes);
    rank->consumers.resize(options.lanes);
    for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
      rank->producers[lane].ring = {rank->slots.data() + lane * slots, &rank->controls[lane],
                                    options.slot_count_log2};
      rank->consumers[lane].ring = rank->producers[lane].ring;
    }
    for (std::uint32_t node = 0; node < options.nodes; ++node) {
      rank->rail_peers.push_back(
          {static_cast<std::uint16_t>(rank->world.rail_peer(node)), std::uint16_t{1}, 0});
    }
    ranks_.push_back(std::move(rank));
  }
}

VirtualCluster::~VirtualCluster() {
  for (const auto& rank : ranks_)
    munmap(rank->workspace, kernels::round_up_to(options_.workspace_bytes, kPageBytes));
}

kernels::RankContext VirtualCluster::context(std::uint32_t index) {
  Rank& rank = *ranks_[index];
  kernels::RankContext context;
  context.world = rank.world;
  for (std::uint32_t local = 0; local < options_.locals; ++local)
    context.workspaces[local] = ranks_[rank.world.node * options_.locals + local]->workspace;
  context.workspace_handle = 1;
  context.rail_peers = rank.rail_peers.data();
  context.lanes = rank.producers.data();
  context.lane_count = options_.lanes;
  context.arrival_flags = rank.flags.data();
  context.flag_count = options_.flag_count;
  context.session_abort = &rank.abort;
  context.process_abort = &rank.abort;
  return context;
}

void VirtualCluster::take(std::uint32_t index) {
  Rank& rank = *ranks_[index];
  // Lanes in turn, as the proxy does it.
  for (bool any = true; any;) {
    any = false;
    for (std::uint32_t lane = 0; lane < options_.lanes; ++lane) {
      std::uint64_t words[shm::kCommandWords];
      if (!rank.consumers[lane].try_take(words)) continue;
      any = true;
      rank.consumers[lane].publish_consumed();
      send(rank, lane, shm::decode(words));
    }
  }
}

std::uint32_t VirtualCluster::turned_flag(std::uint32_t flag, std::uint32_t at) const {
  for (const FlagMap& map : numbers_.flags) {
    if (flag < map.first || flag >= map.first + map.count()) continue;
    const std::uint32_t index = flag - map.first;
    if (index >= map.banks * map.bank_arrivals()) {
      const std::uint32_t from = node_of_peer(at, index - map.banks * map.bank_arrivals());
      return map.release(0, turned(from, at, map.nodes));
    }
    const std::uint32_t bank = index / map.bank_arrivals();
    const std::uint32_t within = index % map.bank_arrivals();
    const std::uint32_t from = node_of_peer(at, within / map.stride());
    return map.arrival(bank, 0, turned(from, at, map.nodes), within % map.stride());
  }
  return flag;
}

std::uint64_t VirtualCluster::planes_of(const ReceiveRegion& region) const {
  switch (region.planes) {
    case ReceiveRegion::Planes::kPeers:
      return options_.nodes - 1;
    case ReceiveRegion::Planes::kNodes:
      return options_.nodes;
    case ReceiveRegion::Planes::kRanks:
      break;
  }
  return std::uint64_t{options_.nodes} * options_.locals;
}

VirtualCluster::Place VirtualCluster::place_of(std::uint64_t offset) const {
  for (const ReceiveRegion& region : numbers_.regions) {
    const std::uint64_t planes = planes_of(region);
    if (offset < region.begin ||
        offset >= region.begin + region.banks * planes * region.plane_bytes)
      continue;
    const std::uint64_t index = (offset - region.begin) / region.plane_bytes;
    return {&region, index / planes, static_cast<std::uint32_t>(index % planes),
            (offset - region.begin) % region.plane_bytes};
  }
  return {};
}

std::uint64_t VirtualCluster::turned_offset(const Place& place, std::uint32_t at) const {
  const std::uint32_t nodes = options_.nodes;
  const ReceiveRegion& region = *place.region;
  std::uint32_t plane = place.plane;
  switch (region.planes) {
    case ReceiveRegion::Planes::kPeers:
      plane = kernels::peer_index(0, turned(node_of_peer(at, plane), at, nodes));
      break;
    case ReceiveRegion::Planes::kNodes:
      plane = turned(plane, at, nodes);
      break;
    case ReceiveRegion::Planes::kRanks:
      plane =
          turned(plane / options_.locals, at, nodes) * options_.locals + plane % options_.locals;
      break;
  }
  return region.begin + (place.bank * planes_of(region) + plane) * region.plane_bytes +
         place.within;
}

std::uint32_t VirtualCluster::meaning_bytes(const Place& place, std::uint32_t bytes) const {
  if (place.region->whole) return bytes;
  return place.within == 0 ? std::min(bytes, kHeaderBytesMax) : 0;
}

void VirtualCluster::send(Rank& rank, std::uint32_t lane, const shm::Command& command) {
  ++rank.commands;
  rank.bytes += command.bytes;
  if (command.peer == rank.world.rank() || command.peer % options_.locals != rank.world.local) {
    complain(fmt::format("rank {} sends to rank {}", rank.world.rank(), command.peer));
    return;
  }
  const std::uint32_t index = options_.mirrored ? rank.world.local : rank.world.rank();
  const double us = costs_.command_us + us_of(command.bytes, costs_.network_gb_s);
  const double read = rank.out.serve(threads_.now_us(), us);
  Delivery delivery;
  const std::uint32_t to = command.peer / options_.locals;
  delivery.to = options_.mirrored ? rank.world.local : command.peer;
  delivery.distance = options_.mirrored ? to : 0;
  delivery.flag = options_.mirrored ? turned_flag(command.flag_index, to) : command.flag_index;
  delivery.epoch = command.epoch;
  if (command.opcode == shm::Opcode::kWrite) {
    const Place place = place_of(command.dst_offset);
    if (place.region == nullptr) {
      complain(fmt::format("rank {} writes where nobody receives", rank.world.rank()));
      return;
    }
    delivery.offset = options_.mirrored ? turned_offset(place, to) : command.dst_offset;
    const std::byte* const source = rank.workspace + command.src_offset;
    delivery.payload.assign(source, source + meaning_bytes(place, command.bytes));
  }
  threads_.at(read, [this, index, lane] {
    ranks_[index]->consumers[lane].publish_completed(1);
    threads_.wake(index);
  });
  // Its first byte comes a latency after it was sent; then it takes its turn at the receiver.
  threads_.at(read - us + costs_.latency_us, [this, us, delivery = std::move(delivery)] {
    const double arrived = ranks_[delivery.to]->in.serve(threads_.now_us(), us);
    threads_.at(arrived, [this, delivery] { deliver(delivery); });
  });
}

void VirtualCluster::deliver(const Delivery& delivery) {
  Rank& receiver = *ranks_[delivery.to];
  if (!delivery.payload.empty()) {
    std::memcpy(receiver.workspace + delivery.offset, delivery.payload.data(),
                delivery.payload.size());
    if (delivery.distance != 0 && numbers_.turn)
      numbers_.turn(receiver.world.local, receiver.workspace, delivery.offset,
                    delivery.payload.size(), delivery.distance);
  }
  std::uint32_t* const flag = &receiver.flags[delivery.flag];
  if (shm::epoch_reached(shm::load_relaxed(flag), delivery.epoch))
    complain(fmt::format("flag {} of rank {} is set twice", delivery.flag, delivery.to));
  shm::flag_publish(flag, delivery.epoch);
  threads_.wake(delivery.to);
}

void VirtualCluster::complain(std::string text) {
  if (complaint_.empty()) complaint_ = std::move(text);
}

}  // namespace mk::sim
