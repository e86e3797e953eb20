#include "tests/gpu/host_proxy.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>

#include "shm/command.h"
#include "shm/flag.h"

namespace mk::test {
namespace {

constexpr std::uint32_t kSlotsLog2 = 6;  ///< small, so that credits run out
constexpr std::uint32_t kBatch = 16;

}  // namespace

HostProxy::HostProxy(std::uint32_t nodes, std::uint32_t locals, std::uint32_t flags,
                     const std::vector<int>& devices, const std::vector<std::byte*>& workspaces)
    : nodes_(nodes),
      locals_(locals),
      flag_count_(static_cast<std::uint32_t>(shm::round_up(flags, shm::kFlagGranule))) {
  const std::size_t slots_bytes = sizeof(shm::CommandSlot) << kSlotsLog2;
  const std::size_t bytes =
      kLanes * (sizeof(shm::LaneControl) + slots_bytes) + std::size_t{flag_count_} * 4;
  for (std::uint32_t r = 0; r < nodes * locals; ++r) {
    auto rank = std::make_unique<Rank>();
    rank->device = devices[r];
    rank->workspace = workspaces[r];
    require(cudaSetDevice(rank->device), "cudaSetDevice");
    require(cudaHostAlloc(&rank->host, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
            "segment");
    std::memset(rank->host, 0, bytes);
    auto* at = static_cast<std::byte*>(rank->host);
    shm::RingProducer producers[kLanes];
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      shm::RingView ring;
      ring.control = reinterpret_cast<shm::LaneControl*>(at);
      at += sizeof(shm::LaneControl);
      ring.slots = reinterpret_cast<shm::CommandSlot*>(at);
      at += slots_bytes;
      ring.slot_count_log2 = kSlotsLog2;
      rank->consumers[lane].ring = ring;
      producers[lane].ring = ring;
    }
    for (std::uint32_t node = 0; node < nodes; ++node)
      rank->rail_peers.push_back({static_cast<std::uint16_t>(node * locals + r % locals), 1, 0});
    rank->flags = reinterpret_cast<std::uint32_t*>(at);
    rank->lanes = std::make_unique<DeviceMemory>(sizeof producers);
    require(cudaMemcpy(rank->lanes->data(), producers, sizeof producers, cudaMemcpyDefault),
            "lanes");
    require(cudaDeviceSynchronize(), "lanes");
    ranks_.push_back(std::move(rank));
  }
  for (std::uint32_t r = 0; r < ranks_.size(); ++r)
    ranks_[r]->thread = std::thread([this, r] { serve(r); });
}

HostProxy::~HostProxy() {
  stop_ = true;
  for (auto& rank : ranks_) {
    rank->thread.join();
    cudaFreeHost(rank->host);
  }
}

void HostProxy::fill_in(std::uint32_t rank, kernels::RankContext& context) const {
  const Rank& own = *ranks_[rank];
  context.workspace_handle = 1;
  context.rail_peers = own.rail_peers.data();
  context.lanes = static_cast<shm::RingProducer*>(own.lanes->data());
  context.lane_count = kLanes;
  context.arrival_flags = own.flags;
  context.flag_count = flag_count_;
}

std::string HostProxy::slowest_copy() const {
  std::size_t worst = 0;
  for (std::size_t r = 1; r < ranks_.size(); ++r)
    if (ranks_[r]->slowest_copy_us > ranks_[worst]->slowest_copy_us) worst = r;
  return fmt::format("the slowest copy took the proxy of rank {} {:.3f} s", worst,
                     static_cast<double>(ranks_[worst]->slowest_copy_us) / 1e6);
}

void HostProxy::serve(std::uint32_t r) {
  Rank& own = *ranks_[r];
  require(cudaSetDevice(own.device), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::mt19937 random(r);
  const auto refuse = [&](const char* what) {
    fmt::print(stderr, "proxy of rank {}: {}\n", r, what);
    std::abort();
  };
  while (!stop_) {
    for (shm::RingConsumer& lane : own.consumers) {
      shm::Command batch[kBatch];
      std::uint32_t count = 0;
      std::uint64_t words[shm::kCommandWords];
      const auto began = std::chrono::steady_clock::now();
      while (count < kBatch && lane.try_take(words)) {
        if (!lane.sequence_matches(words)) refuse("a command with another's sequence");
        if (!shm::reserved_bits_clear(words)) refuse("reserved bits are set");
        const shm::Command command = shm::decode(words);
        if (command.peer % locals_ != r % locals_ || command.peer / locals_ >= nodes_ ||
            command.peer == r)
          refuse("the peer is no rail peer");
        if (command.flag_index >= flag_count_) refuse("a flag beyond the operator's");
        if (command.opcode == shm::Opcode::kWrite) {
          const Rank& to = *ranks_[command.peer];
          require(
              cudaMemcpyAsync(to.workspace + command.dst_offset, own.workspace + command.src_offset,
                              command.bytes, cudaMemcpyDefault, stream),
              "payload");
          own.payload += command.bytes;
        }
        batch[count++] = command;
      }
      if (count == 0) continue;
      lane.publish_consumed();
      require(cudaStreamSynchronize(stream), "payload");
      const auto took = std::chrono::duration_cast<std::chrono::microseconds>(
          std::chrono::steady_clock::now() - began);
      own.slowest_copy_us = std::max(own.slowest_copy_us.load(), std::int64_t{took.count()});
      if (dawdles_ && random() % 8 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      for (std::uint32_t i = 0; i < count; ++i)
        shm::flag_publish(ranks_[batch[i].peer]->flags + batch[i].flag_index, batch[i].epoch);
      lane.publish_completed(count);
    }
  }
  cudaStreamDestroy(stream);
}

kernels::RankContext rank_context(std::uint32_t nodes, std::uint32_t locals, std::uint32_t rank,
                                  const std::vector<std::byte*>& workspaces,
                                  const std::uint32_t* abort, const HostProxy* proxy) {
  kernels::RankContext context;
  context.world = {nodes, locals, rank / locals, rank % locals};
  context.session_abort = abort;
  for (std::uint32_t local = 0; local < locals; ++local)
    context.workspaces[local] = workspaces[rank / locals * locals + local];
  if (proxy != nullptr) proxy->fill_in(rank, context);
  return context;
}

}  // namespace mk::test
