/// \file
/// What one session's commands may name: its own buffers, its rail peers and their buffers. The
/// control thread fills it by messages; the proxy reads it for every command, so each lookup is one
/// index into a flat table.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "daemon/proxy/stats.h"
#include "shm/limits.h"

namespace mk::daemon {

class LinkQueue;

/// Buffers by handle. A handle is bound while its region is not null; kNoHandle never is.
template <class Region>
class BufferTable {
 public:
  struct Entry {
    const Region* region = nullptr;
    std::uint64_t bytes = 0;
  };

  /// Null when the handle names nothing.
  const Entry* find(std::uint16_t handle) const {
    if (handle >= entries_.size()) return nullptr;
    const Entry& entry = entries_[handle];
    return entry.region != nullptr ? &entry : nullptr;
  }

  void bind(std::uint16_t handle, const Region* region, std::uint64_t bytes) {
    if (handle == shm::kNoHandle) return;
    // Handles are dense and small in practice. Room for all of them, of all peers of a session in a
    // large job, would be 16 MB.
    if (handle >= entries_.size()) entries_.resize(2 * std::size_t{handle} + 1);
    entries_[handle] = Entry{region, bytes};
  }

  void unbind(std::uint16_t handle) {
    if (handle < entries_.size()) entries_[handle] = Entry{};
  }

 private:
  static constexpr std::size_t kFew = 64;

  std::vector<Entry> entries_ = std::vector<Entry>(kFew);
};

/// One session's share of one link (deficit round robin, link_queue.h).
struct Flow {
  std::int64_t deficit =
      0;  ///< bytes it may still send in `round`; at or below zero: it waits for the next
  std::int64_t quantum = 0;  ///< bytes a round adds: the session's weight times kRoundBytes
  std::uint64_t round = 0;   ///< the link's round it was last credited for
};

/// A rail peer of one session.
struct Peer {
  std::uint16_t rank = 0;
  LinkQueue* link = nullptr;
  std::uint32_t slot = 0;                       ///< its session slot at its own daemon
  const fabric::RemoteRegion* flags = nullptr;  ///< ordered fabrics
  std::uint32_t flag_count = 0;
  Counter* arrivals_sent = nullptr;  ///< by granule of its flags; null: not counted
  bool retired = false;              ///< gone in order: nothing is sent to it any more
  Flow flow;
  BufferTable<fabric::RemoteRegion> buffers;
};

/// All of one session. The peer table is indexed by rank, so that a hostile rank costs one bounds
/// check.
class Bindings {
 public:
  /// Room for `nodes` rail peers among `world` ranks, and for some that come again.
  Bindings(std::uint32_t world, std::uint32_t nodes) : index_of_rank_(world, kNoPeer) {
    constexpr std::size_t kAgain = 64;
    peers_.reserve(nodes + kAgain);
  }

  BufferTable<fabric::LocalRegion> buffers;

  /// Null when `rank` is no bound rail peer.
  Peer* peer(std::uint16_t rank) const {
    if (rank >= index_of_rank_.size()) return nullptr;
    const std::uint16_t index = index_of_rank_[rank];
    return index != kNoPeer ? peers_[index].get() : nullptr;
  }

  /// Binds a rail peer; one of the same rank that was there is no longer found, but lives on for
  /// what names it.
  void bind_peer(std::unique_ptr<Peer> peer) {
    if (peer->rank >= index_of_rank_.size()) return;
    index_of_rank_[peer->rank] = static_cast<std::uint16_t>(peers_.size());
    peers_.push_back(std::move(peer));
  }

  const std::vector<std::unique_ptr<Peer>>& peers() const { return peers_; }

 private:
  static constexpr std::uint16_t kNoPeer = 0xffff;

  std::vector<std::uint16_t> index_of_rank_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace mk::daemon
