#include "tests/kernels/support/network.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "shm/flag.h"

namespace mk::kernels::testing {

Network::Network(Cluster& cluster, std::uint64_t seed, const NetworkOptions& options)
    : cluster_(cluster),
      options_(options),
      random_(seed),
      bytes_(cluster.size()),
      commands_(cluster.size()) {
  for (std::uint32_t rank = 0; rank < cluster.size(); ++rank) {
    RankMemory& memory = cluster.rank(rank);
    granule_epochs_.emplace_back(memory.flags.size() / shm::kFlagGranule, 0);
    for (const shm::RingProducer& producer : memory.producers) {
      Lane lane;
      lane.rank = rank;
      lane.consumer.ring = producer.ring;
      lanes_.push_back(lane);
    }
  }
}

bool Network::busy() const {
  if (!pending_.empty()) return true;
  for (const Lane& lane : lanes_) {
    shm::RingConsumer look = lane.consumer;
    std::uint64_t words[shm::kCommandWords];
    if (look.try_take(words)) return true;
  }
  return false;
}

bool Network::step() {
  // Delivering is a little likelier than taking, so that neither rings nor the way fill up for
  // good.
  if (!pending_.empty() && random_() % 8 < 5) {
    deliver(std::next(pending_.begin(), static_cast<std::ptrdiff_t>(random_() % pending_.size())));
    return true;
  }
  const std::size_t first = random_() % lanes_.size();
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (take((first + i) % lanes_.size())) return true;
  }
  if (pending_.empty()) return false;
  deliver(std::next(pending_.begin(), static_cast<std::ptrdiff_t>(random_() % pending_.size())));
  return true;
}

bool Network::take_all() {
  bool any = false;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    while (take(lane)) any = true;
  }
  return any;
}

bool Network::take(std::size_t index) {
  Lane& lane = lanes_[index];
  std::uint64_t words[shm::kCommandWords];
  if (!lane.consumer.try_take(words)) return false;
  if (!lane.consumer.sequence_matches(words)) complain("a command out of sequence");
  const shm::Command command = shm::decode(words);
  check(lane.rank, words, command);
  lane.consumer.publish_consumed();
  bytes_[lane.rank] += command.bytes;
  ++commands_[lane.rank];
  lane.done.push_back(false);
  pending_.push_back({index, lane.first_pending + lane.done.size() - 1, command, false, 0, {}});
  if (options_.complete_early) complete(pending_.back());
  if (shows_first(command)) show(command);
  return true;
}

void Network::check(std::uint32_t rank, const std::uint64_t* words, const shm::Command& command) {
  const RankMemory& own = cluster_.rank(rank);
  if (!shm::reserved_bits_clear(words)) complain("reserved bits are set");
  if (command.peer >= cluster_.size() || command.peer == rank ||
      cluster_.rank(command.peer).world.local != own.world.local) {
    complain(fmt::format("rank {} sends to rank {}, which is no rail peer", rank, command.peer));
    return;
  }
  const RankMemory& peer = cluster_.rank(command.peer);
  if (command.flag_index < peer.flag_base ||
      command.flag_index - peer.flag_base >= cluster_.shape().flag_count) {
    complain(
        fmt::format("rank {} names flag {} of rank {}", rank, command.flag_index, command.peer));
  }
  if (command.opcode == shm::Opcode::kWriteFlag) {
    if (command.bytes != 0 || command.src_handle != 0 || command.dst_handle != 0)
      complain("a flag with payload");
    return;
  }
  if (command.opcode != shm::Opcode::kWrite || command.bytes == 0) complain("not a write");
  if (command.src_handle != own.workspace_handle || command.dst_handle != peer.workspace_handle) {
    complain(fmt::format("rank {} names wrong handles", rank));
  }
  if (command.src_offset + command.bytes > own.workspace_bytes ||
      command.dst_offset + command.bytes > peer.workspace_bytes) {
    complain(fmt::format("rank {} writes out of bounds", rank));
  }
}

void Network::read(Pending& pending) {
  const RankMemory& own = cluster_.rank(lanes_[pending.lane].rank);
  const std::byte* const source = own.workspace.get() + pending.command.src_offset;
  pending.payload.assign(source, source + pending.command.bytes);
  pending.read = true;
  if (!options_.complete_early) complete(pending);
}

void Network::deliver(std::list<Pending>::iterator which) {
  // What a command says may be wrong: nothing more is read or written.
  if (!complaint_.empty()) {
    pending_.erase(which);
    return;
  }
  if (!which->read) {
    read(*which);
    which->escapes = random_() % 32 == 0 ? 50 : 0;
  }
  if (which->escapes > 0) {
    --which->escapes;
    return;
  }
  const Pending pending = std::move(*which);
  pending_.erase(which);
  const shm::Command& command = pending.command;
  RankMemory& peer = cluster_.rank(command.peer);
  if (command.opcode == shm::Opcode::kWrite) {
    const bool truncate = options_.truncate_one_chunk && !truncated_ && command.bytes > 64;
    truncated_ = truncated_ || truncate;
    std::memcpy(peer.workspace.get() + command.dst_offset, pending.payload.data(),
                truncate ? std::min<std::uint32_t>(command.bytes, 64) : command.bytes);
    if (options_.swap_in_one_chunk && !swapped_ && command.bytes > 64) {
      swapped_ = true;
      std::byte* data = peer.workspace.get() + command.dst_offset + 64;
      const std::uint32_t half = (command.bytes - 64) / 2;
      std::swap_ranges(data, data + half, data + half);
    }
  }
  if (!shows_first(command)) show(command);
}

void Network::show(const shm::Command& command) {
  RankMemory& peer = cluster_.rank(command.peer);
  std::uint32_t epoch = command.epoch;
  if (options_.immediates) {
    std::uint32_t& last = granule_epochs_[command.peer][command.flag_index / shm::kFlagGranule];
    epoch = shm::immediate_epoch(shm::make_immediate(0, command.flag_index, command.epoch), last);
    last = epoch;
  }
  if (epoch != command.epoch) complain(fmt::format("epoch {} arrived as {}", command.epoch, epoch));
  std::uint32_t* flag = &peer.flags[command.flag_index];
  if (options_.keep_forged_flags && shm::load_relaxed(flag) == kForged) epoch = kForged;
  if (epoch != kForged && shm::epoch_reached(shm::load_relaxed(flag), epoch)) {
    complain(fmt::format("flag {} of rank {} would go back to {}", command.flag_index, command.peer,
                         epoch));
  }
  shm::flag_publish(flag, epoch);
}

void Network::complete(const Pending& pending) {
  Lane& lane = lanes_[pending.lane];
  lane.done[pending.sequence - lane.first_pending] = true;
  std::uint64_t count = 0;
  while (!lane.done.empty() && lane.done.front()) {
    lane.done.pop_front();
    ++lane.first_pending;
    ++count;
  }
  if (count != 0) lane.consumer.publish_completed(count);
}

void Network::complain(std::string text) {
  if (complaint_.empty()) complaint_ = std::move(text);
}

NetworkThread::NetworkThread(Cluster& cluster, std::uint64_t seed, const NetworkOptions& options)
    : network_(cluster, seed, options) {
  thread_ = std::thread([this, seed] {
    std::mt19937_64 random(seed ^ 0x9e3779b97f4a7c15ull);
    while (!quit_.load(std::memory_order_relaxed)) {
      if (!network_.step()) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      } else if (random() % 64 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      }
    }
  });
}

NetworkThread::~NetworkThread() { stop(); }

Network& NetworkThread::stop() {
  quit_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
  return network_;
}

}  // namespace mk::kernels::testing
