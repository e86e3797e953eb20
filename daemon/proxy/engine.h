/// \file
/// One pass of the proxy, without its thread: mailbox, completions and arrivals, rings,
/// submissions.
///
/// A pass never waits and, but for messages of the control thread, never allocates. Per command it
/// makes one copy out of the ring, the checks of command_validation.h, an entry in the lane's
/// window, and a place in the link's next submission. When the completion comes, the cookie leads
/// back to the entry.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "daemon/proxy/link_queue.h"
#include "daemon/proxy/mailbox.h"
#include "daemon/proxy/proxy.h"
#include "daemon/proxy/session_table.h"
#include "daemon/proxy/trace.h"

namespace mk::daemon {

/// Commands of one lane in its turn, and of all lanes before completions are polled again.
inline constexpr std::uint32_t kLaneTurnMax = 4 * shm::kBatchMax;
inline constexpr std::uint32_t kPassCommandsMax = 256;
/// A pass reads so many ring slots of a session for the marks of handles that go, and answers for
/// so many handles of one kind.
inline constexpr std::uint32_t kLookAheadMax = 256;
inline constexpr std::size_t kAnswersMax = 16;
/// Events of one poll, and polls of one pass.
inline constexpr std::size_t kPollEvents = 64;
inline constexpr int kPollsMax = 8;

class Engine {
 public:
  Engine(fabric::Endpoint& endpoint, const ProxyOptions& options,
         std::function<void(ProxyEvent)> on_event);

  /// Control thread.
  void apply(const ProxyCommand& command) { mailbox_.put(command); }

  /// Proxy thread: sleeps until a message or `wake` comes, at most `ns`.
  void sleep(std::uint64_t ns) { mailbox_.sleep(ns); }
  void wake() { mailbox_.wake(); }

  /// One pass. Returns whether there was anything to do.
  bool pass();

  /// The clock at the start of the last pass.
  std::uint64_t now_ns() const { return now_ns_; }

  /// When the next pass is due although nothing was to do in this one: at once (0), at that time,
  /// or nullopt when only a ring, the mailbox or a peer can bring work.
  std::optional<std::uint64_t> next_due_ns() const;

  ProxyStats& stats() { return stats_; }
  const ProxyStats& stats() const { return stats_; }
  TraceBuffer& trace() { return trace_; }

 private:
  std::uint64_t read_clock() const { return clock_ ? clock_() : shm::monotonic_ns(); }

  bool read_mail();
  void on_mail(Parcel& parcel, const AddSession& add);
  void on_mail(Parcel& parcel, const BindBuffer& bind);
  void on_mail(Parcel& parcel, const UnbindBuffer& unbind);
  void on_mail(Parcel& parcel, const BindPeer& bind);
  void on_mail(Parcel& parcel, const BindPeerBuffer& bind);
  void on_mail(Parcel& parcel, const UnbindPeerBuffer& unbind);
  void on_mail(Parcel& parcel, const RetirePeer& retire);
  void on_mail(Parcel& parcel, const AdmitPeer& admit);
  void on_mail(Parcel& parcel, const ResetFlags& reset);
  void on_mail(Parcel& parcel, const FenceSession& asked);
  void on_mail(Parcel& parcel, const SetShare& share);
  static void on_mail(Parcel&, const ExpectCommands&) {}

  bool poll_endpoint();
  void on_finished(const fabric::Event& event, bool failed);
  void on_arrival(const fabric::Event& event);
  /// The session whose flag the arrival names, if its writer may raise it; or null.
  Session* arrival_at(const fabric::Event& event) const;
  void on_link_down(const fabric::Event& event);
  void publish_completed();

  /// Goes on with the sweep, as far as one pass may. Whether there may be more to do at once.
  bool take_commands();
  std::uint32_t take_from(Session& session);
  std::uint32_t take_turn(Session& session, Lane& lane);
  bool take_next(Session& session, Lane& lane, std::uint64_t& bytes);
  /// Tells the trace which launch the lane's held command is of, unless it knows.
  void trace_launch(Session& session, const Lane& lane);
  /// Puts the lane's held command into its link's submission; false when there is no room now.
  bool hand_over(Session& session, Lane& lane);
  /// Completes the lane's held command without sending it.
  void complete_unsent(Session& session, Lane& lane);
  /// Whether the session's limit holds the lane up now.
  bool paced(const Session& session, const Lane& lane);
  std::uint32_t post(LinkQueue& link);
  bool finish_links();

  LinkQueue* find_link(fabric::LinkId id) const {
    return id < links_.size() ? links_[id].get() : nullptr;
  }
  LinkQueue& use_link(fabric::LinkId id, std::unique_ptr<LinkQueue> fresh);
  void release_links(const Session& session);
  void fault(Session& session, ErrorCode code, std::string reason,
             std::optional<std::uint32_t> peer_rank = std::nullopt);
  void fence(Session& session);
  /// Whether there is more to do at once.
  bool settle();
  /// Drops those of `most` that are `done`; whether the others may be as well.
  template <class Waiting, class Done>
  bool answer(std::vector<Waiting>& waiting, std::size_t most, Done done);
  // Whether the answer has been given.
  bool released(Session& session, Unbinding& one);
  bool released(Session& session, PeerUnbinding& one);
  bool reset_flags(Session& session, const ResetFlags& reset);

  fabric::Endpoint& endpoint_;
  const std::uint64_t batch_window_ns_;
  const bool publishes_flags_;  ///< the unordered contract
  const bool knows_senders_;    ///< of arrivals
  const std::function<std::uint64_t()> clock_;
  const std::function<void(ProxyEvent)> on_event_;
  Mailbox mailbox_;
  SessionTable sessions_;
  std::vector<std::unique_ptr<LinkQueue>> links_;  ///< by LinkId
  std::vector<LinkQueue*> used_links_;
  std::vector<bool>
      dead_links_;  ///< by LinkId: reported down; an endpoint does not use a number twice

  std::uint64_t now_ns_ = 0;
  std::uint64_t batch_number_ = 0;
  std::uint64_t posted_ = 0;  ///< writes with the fabric
  // A sweep gives each session one turn, in as many passes as that takes: rounds begin between
  // sweeps, so sessions that fill whole passes keep no round from the others.
  std::size_t next_session_ = 0;
  std::size_t swept_ = 0;  ///< sessions that had their turn in this sweep
  bool sweep_ended_ = true;
  bool more_expected_ = false;         ///< a lane's turn ended before its ring was empty
  std::uint32_t answers_waiting_ = 0;  ///< unbinds, resets and fences not yet answered
  bool settle_due_ = false;
  std::uint64_t paced_until_ns_ = 0;  ///< when a session that its limit held up may go on; 0: none

  std::vector<Parcel> parcels_;
  std::array<fabric::Event, kPollEvents> events_;
  std::array<Lane*, kPollEvents> completed_lanes_{};
  std::size_t completed_lane_count_ = 0;
  ProxyStats stats_;
  TraceBuffer trace_;
};

}  // namespace mk::daemon
