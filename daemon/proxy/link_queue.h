/// \file
/// One link's next submission: commands of all sessions and lanes, in the order they were taken,
/// and whose turn it is when there are more of them than the link can carry.
///
/// Fairness is per link, deficit round robin over sessions: a round credits each session with its
/// weight times kRoundBytes. A command costs its bytes plus kCommandCostBytes; a session without
/// credit waits for the next round, which begins when nobody with credit is left waiting. The queue
/// holds one submission and no more: what does not fit stays with its lane, so that the order of
/// service is decided when the link has room and not long before.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "daemon/fabric/fabric.h"
#include "daemon/plant.h"
#include "daemon/proxy/bindings.h"
#include "daemon/proxy/link_rate.h"
#include "daemon/proxy/session_table.h"
#include "daemon/proxy/stats.h"
#include "daemon/proxy/trace.h"

namespace mk::daemon {

/// What one round gives a session of weight 1 on one link, and what a command costs beyond its
/// bytes.
inline constexpr std::int64_t kRoundBytes = 2 << 20;
inline constexpr std::int64_t kCommandCostBytes = 8 << 10;

/// Writes in flight on a link that several sessions use: enough to keep a network busy, and little
/// enough that nobody's command waits behind a crowd of another's. Within it the round robin
/// decides.
inline constexpr std::uint32_t kSharedDepth = 64;

class LinkQueue {
 public:
  LinkQueue(fabric::LinkId id, std::uint32_t depth) : id_(id), depth_(std::max(depth, 1u)) {}

  fabric::LinkId id() const { return id_; }
  std::uint32_t queued() const { return count_; }
  std::uint32_t in_flight() const { return in_flight_; }
  bool full() const { return count_ == shm::kBatchMax; }
  void set_stats(LinkStats* stats) {
    if (stats != nullptr) stats_ = stats;
  }
  /// Sessions bound to the link keep it; the engine frees it with the last.
  std::uint32_t users = 0;

  // -- whose turn
  // ---------------------------------------------------------------------------------------------------

  void start_flow(Flow& flow, std::uint32_t weight) const {
    flow.quantum = kRoundBytes * weight;
    flow.deficit = flow.quantum;
    flow.round = round_;
  }

  /// From the flow's next round on; credit beyond it is lost.
  static void set_weight(Flow& flow, std::uint32_t weight) {
    flow.quantum = kRoundBytes * weight;
    flow.deficit = std::min(flow.deficit, flow.quantum);
  }

  /// Whether the queue takes a command of `flow` now. If not, the link remembers in what way it was
  /// refused.
  bool admits(Flow& flow) {
    credit(flow);
    if (flow.deficit <= 0) {
      const auto rounds = static_cast<std::uint64_t>(-flow.deficit / flow.quantum) + 1;
      rounds_wanted_ = rounds_wanted_ == 0 ? rounds : std::min(rounds_wanted_, rounds);
      return false;
    }
    crowded_ = crowded_ || full();
    return !full();
  }

  /// After every session had its turn: begins a round when only sessions without credit wait.
  /// Returns whether it did.
  bool end_sweep() {
    const bool advance = rounds_wanted_ != 0 && !crowded_;
    if (advance) round_ += rounds_wanted_;
    rounds_wanted_ = 0;
    crowded_ = false;
    return advance;
  }

  // -- the submission
  // -----------------------------------------------------------------------------------------------

  /// Appends the lane's held command. Only when `admits` said so. `now_ns`: the pass's clock.
  void push(Lane& lane, Flow& flow, std::uint64_t now_ns);

  /// Submits what is queued, as far as the link's depth and the endpoint allow; returns how many
  /// were taken. After a refusal, does nothing until the next pass. `trace`: null when off.
  std::uint32_t post(fabric::Endpoint& endpoint, std::uint64_t batch_number, std::uint64_t now_ns,
                     TraceBuffer* trace = nullptr);
  bool refused() const { return refused_; }
  void end_pass() { refused_ = refused_ && MK_PLANT(refused_for_ever); }
  std::uint64_t oldest_queued_ns() const { return oldest_queued_ns_; }

  /// Takes the session's commands out; the others keep their order.
  void drop(const Session& session);

  void on_completion(bool failed) {
    --in_flight_;
    ++newly_completed_;
    newly_failed_ += failed ? 1 : 0;
  }
  /// Brings the shared counters up to date. `now_ns`: the pass's clock.
  void publish_stats(std::uint64_t now_ns);

 private:
  struct Origin {
    Lane* lane = nullptr;
    InFlight* entry = nullptr;
    std::uint32_t commit_time_ns = 0;
  };

  void credit(Flow& flow) const {
    if (flow.round == round_) return;
    // What was not used does not add up: an idle session comes back with one round's credit, not
    // with an hour's.
    const auto rounds =
        static_cast<std::int64_t>(std::min<std::uint64_t>(round_ - flow.round, 1u << 20));
    flow.deficit = std::min(flow.deficit + rounds * flow.quantum, flow.quantum);
    flow.round = round_;
  }
  /// Returns how long the command has waited since its commit; 0: unknown.
  static std::uint32_t record_posted(const Origin& origin, std::uint64_t batch_number,
                                     std::uint64_t now_ns);
  void remove_front(std::uint32_t count);

  std::uint32_t depth() const { return users > 1 ? std::min(depth_, kSharedDepth) : depth_; }

  fabric::LinkId id_;
  std::uint32_t depth_;
  std::uint32_t count_ = 0;
  std::uint32_t in_flight_ = 0;
  bool refused_ = false;  ///< the endpoint or the depth took less than offered in this pass
  bool crowded_ = false;  ///< a session with credit found the queue full in this sweep
  std::uint64_t rounds_wanted_ =
      0;  ///< the fewest rounds after which a waiting session without credit has some
  std::uint64_t round_ = 0;
  std::uint64_t oldest_queued_ns_ = 0;
  std::uint32_t newly_completed_ = 0;
  std::uint32_t newly_failed_ = 0;
  LinkRate rate_;
  LinkStats* stats_ = nullptr;
  std::array<fabric::Write, shm::kBatchMax> writes_;
  std::array<Origin, shm::kBatchMax> origins_;
};

}  // namespace mk::daemon
