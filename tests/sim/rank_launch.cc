#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "shm/flag.h"
#include "tests/sim/rank.h"

namespace mk::sim {

namespace {

/// Within this a launch has to end, well or with an error.
constexpr std::uint64_t kLaunchNs = 30 * kSecond;
/// When all ranks of a node have left, a launch that waits for them ends within this: the engine's
/// ten seconds of grace, and its tick.
constexpr std::uint64_t kLeaveSeenNs = 12 * kSecond;

/// The 8-byte words of one chunk, which no other chunk of any run has.
class Pattern {
 public:
  Pattern(std::uint64_t run, std::uint32_t from, std::uint32_t to, std::uint32_t epoch,
          std::uint32_t chunk)
      : word_(mix(mix(run << 32 | epoch) ^
                  (std::uint64_t{from} << 40 | std::uint64_t{to} << 20 | chunk))) {}
  std::uint64_t next() { return word_ += 0x9e3779b97f4a7c15ull; }

 private:
  std::uint64_t word_;
};

}  // namespace

std::uint32_t Rank::peer_rank(std::uint32_t peer) const {
  const std::uint32_t node = peer < node_rank_ ? peer : peer + 1;
  return node * job_.local_size + local_rank_;
}

std::uint32_t Rank::index_at(std::uint32_t peer) const {
  const std::uint32_t node = peer < node_rank_ ? peer : peer + 1;
  return node_rank_ < node ? node_rank_ : node_rank_ - 1;
}

std::uint32_t Rank::flag(std::uint32_t index) const {
  return shm::load_acquire(segment_->flags() + flag_base_ + index);
}

void Rank::poke(std::uint64_t delay_ns) {
  const std::uint64_t when = world_.now() + delay_ns;
  if (over() || (next_poll_ns_ != 0 && next_poll_ns_ <= when)) return;
  next_poll_ns_ = when;
  world_.at(when, shared_from_this(), [when](Rank& rank) {
    if (rank.next_poll_ns_ != when) return;
    rank.next_poll_ns_ = 0;
    rank.run_on();
  });
}

void Rank::look() {
  if (stage_ != Stage::kRun && stage_ != Stage::kFarewell) return;
  check_flags();
  if (stage_ == Stage::kRun) poke(world_.random.scaled(50, 10 * kMicrosecond));
}

/// As far as it goes now. What it waits for then brings it back: `look`, or an answer.
void Rank::run_on() {
  if (stage_ != Stage::kRun || !failure_.empty()) return;
  if (const Status well = segment_->failure(); !well) return fail(well.error().message);
  if (!launching_) {
    if (world_.now() < resumes_at_ns_) return;
    if (epoch_ == job_.launches + extra_launches_) {
      if (act()) return;
      if (scratch_request_ != 0) return;
      stage_ = Stage::kFarewell;
      return next_request();
    }
    if (act()) return;
    begin_launch();
    if (over() || stage_ != Stage::kRun) return;
  }
  const bool all_sent = send_chunks();
  if (over() || stage_ != Stage::kRun) return;
  const bool all_received = receive_chunks();
  if (all_sent && all_received) end_launch();
}

void Rank::begin_launch() {
  ++epoch_;
  launching_ = true;
  if (world_.random.chance(50'000)) use_scratch();
  for (std::uint32_t peer = 0; peer < job_.peers(); ++peer) {
    for (std::uint32_t chunk = 0; chunk < job_.chunks; ++chunk) unsent_.emplace_back(peer, chunk);
  }
  for (std::size_t i = unsent_.size(); i > 1; --i) {
    std::swap(unsent_[i - 1], unsent_[world_.random.below(i)]);
  }
  auto& launches = segment_->header().launches;
  shm::store_relaxed(&launches, launches + 1);
  world_.trace([&] { return fmt::format("{} begins launch {}", describe(), epoch_); });
  world_.at(world_.now() + kLaunchNs, shared_from_this(), [epoch = epoch_](Rank& rank) {
    if (rank.over() || !rank.launching_ || rank.epoch_ != epoch) return;
    if (rank.waits_for_a_leaver() && rank.failure_.empty()) {
      return rank.fail(fmt::format("launch {} took too long", epoch));
    }
    rank.violate(fmt::format("launch {} did not end within its deadline ({} chunks unsent)", epoch,
                             rank.unsent_.size()));
  });
}

bool Rank::lately() const { return !over() || world_.now() < over_at_ns_ + kLeaveSeenNs; }

/// In every operator the ranks of one node wait for each other, so that one that leaves early holds
/// its neighbours up, and its daemon sees that. Here they are independent: as long as they go on,
/// nobody but a client on another node can know that it waits for nothing.
bool Rank::waits_for_a_leaver() const {
  if (!run_.leaver || *run_.leaver / job_.local_size == node_rank_) return false;
  const std::uint32_t first = *run_.leaver / job_.local_size * job_.local_size;
  for (std::uint32_t rank = first; rank < first + job_.local_size; ++rank) {
    if (rank != *run_.leaver && run_.ranks[rank]->lately()) return true;
  }
  return false;
}

bool Rank::push(const shm::Command& command) {
  shm::RingProducer& lane = lanes_[command.flag_index % job_.lanes];
  if (!lane.try_push(command)) return false;
  daemon_->ring(local_rank_ % daemon_->plan().rails);
  return true;
}

bool Rank::send_chunks() {
  for (std::size_t i = 0; i < unsent_.size();) {
    const auto [peer, chunk] = unsent_[i];
    // From a place that the network has let go of, into a bank that its receiver has given back.
    const std::uint64_t stage = next_stage_ % job_.stages;
    Place& place = staging_[stage];
    if (lanes_[place.lane].completed() < place.until) return false;
    const bool free =
        epoch_ <= job_.banks || shm::epoch_reached(flag(release_index(peer)), epoch_ - job_.banks);
    shm::Command command;
    command.opcode = shm::Opcode::kWrite;
    command.peer = static_cast<std::uint16_t>(peer_rank(peer));
    command.src_handle = send_handle_;
    command.src_offset = stage * job_.chunk_bytes;
    command.dst_handle = known_[peer_rank(peer)].handle;
    command.dst_offset = slot_offset(index_at(peer), epoch_, chunk);
    command.bytes = job_.chunk_bytes;
    command.flag_index =
        known_[peer_rank(peer)].flag_base + arrival_index(index_at(peer), epoch_, chunk);
    command.epoch = epoch_;
    if (free) {
      Pattern pattern(run_.number, rank_, peer_rank(peer), epoch_, chunk);
      auto* words = reinterpret_cast<std::uint64_t*>(send_->data() + command.src_offset);
      for (std::uint32_t k = 0; k < job_.chunk_bytes / 8; ++k) words[k] = pattern.next();
    }
    if (!free || !push(command)) {
      ++i;
      continue;
    }
    const std::uint32_t lane = command.flag_index % job_.lanes;
    place = {lane, lanes_[lane].produced};
    ++next_stage_;
    unsent_.erase(unsent_.begin() + static_cast<std::ptrdiff_t>(i));
    if (act()) return false;
  }
  return unsent_.empty();
}

bool Rank::receive_chunks() {
  bool all = true;
  for (std::uint32_t peer = 0; peer < job_.peers(); ++peer) {
    if (released_[peer] != epoch_) {
      bool here = true;
      for (std::uint32_t chunk = 0; chunk < job_.chunks; ++chunk) {
        here = here && shm::epoch_reached(flag(arrival_index(peer, epoch_, chunk)), epoch_);
      }
      if (!here) {
        all = false;
        continue;
      }
      for (std::uint32_t chunk = 0; chunk < job_.chunks; ++chunk) {
        (void)check_payload(peer, chunk, epoch_);
      }
      released_[peer] = epoch_;
    }
    if (told_[peer] == epoch_) continue;
    shm::Command release;
    release.opcode = shm::Opcode::kWriteFlag;
    release.peer = static_cast<std::uint16_t>(peer_rank(peer));
    release.flag_index = known_[peer_rank(peer)].flag_base + release_index(index_at(peer));
    release.epoch = epoch_;
    if (push(release)) {
      told_[peer] = epoch_;
    } else {
      all = false;
    }
  }
  return all;
}

void Rank::end_launch() {
  launching_ = false;
  auto& launches = segment_->header().launches;
  shm::store_relaxed(&launches, launches + 1);
  world_.trace([&] { return fmt::format("{} ends launch {}", describe(), epoch_); });
  poke(world_.random.scaled(100, job_.think_ns_max));
}

/// One of the commands that a broken or malicious client might write.
void Rank::push_garbage() {
  Random& random = world_.random;
  const std::uint32_t peer = static_cast<std::uint32_t>(random.below(job_.peers()));
  const std::uint32_t over = 8u << random.below(6);
  shm::Command command;
  command.opcode = shm::Opcode::kWrite;
  command.peer = static_cast<std::uint16_t>(peer_rank(peer));
  command.src_handle = send_handle_;
  command.dst_handle = known_[peer_rank(peer)].handle;
  command.bytes = std::min(job_.chunk_bytes, over);
  command.flag_index = known_[peer_rank(peer)].flag_base;
  command.epoch = epoch_;
  switch (random.below(6)) {
    case 0:
      command.dst_offset = buffer_bytes() - command.bytes + random.between(1, command.bytes);
      break;
    case 1:
      command.src_offset = staging_bytes() - command.bytes + random.between(1, command.bytes);
      break;
    case 2:
      command.bytes = static_cast<std::uint32_t>(std::max(buffer_bytes(), staging_bytes()) +
                                                 random.between(1, 64));
      break;
    case 3:
      command.dst_handle = static_cast<std::uint16_t>(random.between(600, 65'535));
      break;
    case 4:
      command.peer = static_cast<std::uint16_t>(random.between(job_.world(), 65'535));
      break;
    default:
      command.flag_index = static_cast<std::uint32_t>(random.between(job_.flag_count, 1u << 20));
      break;
  }
  if (!push(command)) poke(kMillisecond);  // the ring is full: its peers wait for ever, and it dies
  unsent_.clear();
  world_.at(world_.now() + kSecond, shared_from_this(), [](Rank& rank) {
    if (rank.failure_.empty()) rank.exit("it gave up");
  });
}

/// Every flag that has changed since the last look, and what must be true then.
void Rank::check_flags() {
  const std::uint32_t* flags = segment_->flags();
  if (std::memcmp(flags, shadow_.data(), shadow_.size() * sizeof *flags) == 0) return;
  for (std::uint32_t i = 0; i < shadow_.size(); ++i) {
    const std::uint32_t before = shadow_[i];
    const std::uint32_t shown = shm::load_acquire(flags + i);
    if (shown == before) continue;
    shadow_[i] = shown;
    world_.trace([&] { return fmt::format("{} sees flag {}: {}", describe(), i, shown); });
    if (run_.tainted) continue;
    if (!shm::epoch_reached(shown, before)) {
      return violate(fmt::format("flag {} went back from {} to {}", i, before, shown));
    }
    const std::uint32_t index = i - flag_base_;
    if (i < flag_base_ || index >= job_.flag_words()) {
      return violate(fmt::format("flag {} shows {}, and nobody was given it", i, shown));
    }
    if (index < release_index(0)) {
      const std::uint32_t peer = index / job_.chunks / job_.banks;
      if (index / job_.chunks % job_.banks != shown % job_.banks) {
        return violate(fmt::format("flag {} is of another bank than epoch {}", i, shown));
      }
      if (!check_payload(peer, index % job_.chunks, shown)) return;
      continue;
    }
    const std::uint32_t peer = index - release_index(0);
    const Rank& receiver = *run_.ranks[peer_rank(peer)];
    if (!shm::epoch_reached(receiver.released_[index_at(peer)], shown)) {
      return violate(fmt::format("rank {} seems to have released epoch {}, and has released {}",
                                 peer_rank(peer), shown, receiver.released_[index_at(peer)]));
    }
  }
}

bool Rank::check_payload(std::uint32_t peer, std::uint32_t chunk, std::uint32_t epoch) {
  Pattern pattern(run_.number, peer_rank(peer), rank_, epoch, chunk);
  const auto* words =
      reinterpret_cast<const std::uint64_t*>(receive_->data() + slot_offset(peer, epoch, chunk));
  for (std::uint32_t i = 0; i < job_.chunk_bytes / 8; ++i) {
    if (words[i] == pattern.next() || run_.tainted) continue;
    std::string instead = "something else";
    for (std::uint32_t other = 0; other <= epoch + job_.banks; ++other) {
      Pattern of_other(run_.number, peer_rank(peer), rank_, other, chunk);
      std::uint64_t word = 0;
      for (std::uint32_t k = 0; k <= i; ++k) word = of_other.next();
      if (word == words[i]) instead = fmt::format("that of epoch {}", other);
    }
    if (words[i] == 0) instead = "nothing yet";
    violate(
        fmt::format("the arrival of epoch {} of chunk {} from rank {} shows, and at byte {} "
                    "there is {}",
                    epoch, chunk, peer_rank(peer), 8 * i, instead));
    return false;
  }
  return true;
}

void Rank::on_data(const Landing& landing) {
  if (over() || run_.tainted) return;
  if (!receive_ || landing.file != receive_file_) {
    return violate("bytes came into memory that none of its peers was told of");
  }
  const std::uint64_t slot = landing.offset / job_.share();
  const auto peer = static_cast<std::uint32_t>(slot / job_.banks);
  const std::uint64_t within = landing.offset % job_.share() % job_.chunk_bytes;
  if (peer >= job_.peers() || within + landing.bytes > job_.chunk_bytes ||
      slot % job_.banks != landing.epoch % job_.banks) {
    return violate(fmt::format("{} bytes of epoch {} came to offset {}", landing.bytes,
                               landing.epoch, landing.offset));
  }
  if (landing.epoch > job_.banks &&
      !shm::epoch_reached(released_[peer], landing.epoch - job_.banks)) {
    violate(
        fmt::format("rank {} writes epoch {} into a bank of which epoch {} is not released (the "
                    "last that is: {})",
                    peer_rank(peer), landing.epoch, landing.epoch - job_.banks, released_[peer]));
  }
}

}  // namespace mk::sim
