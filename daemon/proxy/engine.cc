#include "daemon/proxy/engine.h"

#include <algorithm>
#include <utility>

#include "shm/flag.h"

namespace mk::daemon {

Engine::Engine(fabric::Endpoint& endpoint, const ProxyOptions& options,
               std::function<void(ProxyEvent)> on_event)
    : endpoint_(endpoint),
      batch_window_ns_(options.batch_window_ns),
      publishes_flags_(endpoint.capabilities().contract == fabric::DeliveryContract::kUnordered),
      knows_senders_(endpoint.capabilities().arrivals_named),
      clock_(options.clock_ns),
      on_event_(std::move(on_event)),
      mailbox_(endpoint.capabilities().link_depth) {
  parcels_.reserve(Mailbox::kReserved);
  links_.reserve(2 * shm::kNodesMax);
  used_links_.reserve(2 * shm::kNodesMax);
}

bool Engine::pass() {
  now_ns_ = read_clock();
  bool worked = read_mail();
  worked = poll_endpoint() || worked;
  worked = take_commands() || worked;
  worked = finish_links() || worked;
  if (settle_due_) worked = settle() || worked;
  stats_.passes.add(1);
  if (worked) stats_.busy_passes.add(1);
  return worked;
}

std::optional<std::uint64_t> Engine::next_due_ns() const {
  std::optional<std::uint64_t> due;
  if (paced_until_ns_ != 0) due = paced_until_ns_;
  for (const LinkQueue* link : used_links_) {
    if (link->queued() == 0) continue;
    // A submission that waits for company has its window; one the endpoint did not take waits for
    // the endpoint.
    const std::uint64_t link_due = link->oldest_queued_ns() + batch_window_ns_;
    if (link_due > now_ns_) {
      due = std::min(due.value_or(link_due), link_due);
    } else if (posted_ == 0) {
      return 0;
    }
  }
  if (posted_ != 0) {
    const std::optional<std::uint64_t> endpoint_due = endpoint_.next_due_ns();
    if (!endpoint_due) return 0;
    due = std::min(due.value_or(*endpoint_due), *endpoint_due);
  }
  return due;
}

// -- completions and arrivals
// ---------------------------------------------------------------------------------------

bool Engine::poll_endpoint() {
  bool any = false;
  for (int i = 0; i < kPollsMax; ++i) {
    const std::size_t count = std::min(endpoint_.poll(events_), events_.size());
    const std::uint64_t polled_ns = publishes_flags_ && count != 0 ? read_clock() : 0;
    std::uint64_t arrivals = 0;
    for (std::size_t k = 0; k < count; ++k) {
      const fabric::Event& event = events_[k];
      switch (event.kind) {
        case fabric::Event::Kind::kCompleted:
          on_finished(event, false);
          break;
        case fabric::Event::Kind::kFailed:
          on_finished(event, true);
          break;
        case fabric::Event::Kind::kArrival:
          on_arrival(event);
          ++arrivals;
          break;
        case fabric::Event::Kind::kLinkDown:
          on_link_down(event);
          break;
        case fabric::Event::Kind::kFlushed:  // nobody here asks for one
          break;
      }
    }
    if (arrivals != 0 && publishes_flags_) {
      stats_.arrival_to_flag.record(read_clock() - polled_ns, arrivals);
    }
    publish_completed();
    any = any || count != 0;
    if (count < events_.size()) break;
  }
  return any;
}

void Engine::on_finished(const fabric::Event& event, bool failed) {
  const Cookie cookie = Cookie::unpack(event.cookie);
  Session* session = sessions_.find(cookie);
  Lane* lane = session != nullptr && cookie.lane < session->lanes.size()
                   ? &session->lanes[cookie.lane]
                   : nullptr;
  InFlight* entry = lane != nullptr ? lane->window.find_posted(cookie.sequence) : nullptr;
  if (entry == nullptr) {
    // Twice, or after its session: nothing it could stand for is there any more.
    stats_.bad_completions.add(1);
    return;
  }
  entry->peer->link->on_completion(failed);
  if (trace_.on()) {
    trace_.record({now_ns_,
                   event.cookie,
                   0,
                   entry->peer->link->id(),
                   0,
                   0,
                   failed ? TraceRecord::Kind::kFailed : TraceRecord::Kind::kCompleted,
                   {}});
  }
  --posted_;
  --session->posted;
  --session->outstanding;
  settle_due_ = settle_due_ || answers_waiting_ != 0;
  if (failed) {
    entry->state = InFlight::State::kGone;
    fault(*session, ErrorCode::kLinkDown,
          fmt::format(
              "the write of lane {}, command {} to rank {} failed ({}): the link to that rank's "
              "node is in error",
              cookie.lane, cookie.sequence, entry->peer->rank,
              error_code_name(event.code == ErrorCode::kOk ? ErrorCode::kLinkDown : event.code)),
          entry->peer->rank);
    return;
  }
  lane->stats->post_to_completion.record(now_ns_ - std::min(now_ns_, entry->posted_ns));
  if (Counter* sent = entry->peer->arrivals_sent) sent[entry->granule].add(1);
  const std::uint32_t in_order = lane->window.complete(*entry);
  if (in_order == 0) return;
  if (lane->newly_completed == 0) completed_lanes_[completed_lane_count_++] = lane;
  lane->newly_completed += in_order;
}

void Engine::publish_completed() {
  for (std::size_t i = 0; i < completed_lane_count_; ++i) {
    Lane& lane = *completed_lanes_[i];
    lane.consumer.publish_completed(lane.newly_completed);
    lane.stats->completed.add(lane.newly_completed);
    lane.newly_completed = 0;
  }
  completed_lane_count_ = 0;
}

Session* Engine::arrival_at(const fabric::Event& event) const {
  Session* const session = sessions_.find(shm::immediate_slot(event.immediate));
  if (session == nullptr || !knows_senders_) return session;
  return event.peer < session->admitted.size() && session->admitted[event.peer] ? session : nullptr;
}

void Engine::on_arrival(const fabric::Event& event) {
  const std::uint32_t immediate = event.immediate;
  Session* session = arrival_at(event);
  if (session == nullptr && read_mail()) {
    // The peer may be quicker than this pass: its write came in after the session was added, and
    // the peer admitted, but before we looked.
    session = arrival_at(event);
  }
  if (session != nullptr && session->arrivals.publish(immediate)) {
    stats_.arrivals.add(1);
    if (trace_.on()) {
      trace_.record({read_clock(), immediate, 0, 0, 0, 0, TraceRecord::Kind::kArrived, {}});
    }
  } else {
    stats_.bad_arrivals.add(1);
  }
  settle_due_ = settle_due_ || answers_waiting_ != 0;
}

void Engine::on_link_down(const fabric::Event& event) {
  if (event.link >= dead_links_.size()) dead_links_.resize(std::size_t{event.link} + 1);
  if (dead_links_[event.link]) return;
  dead_links_[event.link] = true;
  const ErrorCode code = event.code == ErrorCode::kOk ? ErrorCode::kLinkDown : event.code;
  const LinkQueue* link = find_link(event.link);
  for (Session* session : sessions_.all()) {
    for (const auto& peer : session->bindings.peers()) {
      if (link == nullptr || peer->link != link) continue;
      fault(*session, ErrorCode::kLinkDown,
            fmt::format("the link to rank {}'s node went down ({})", peer->rank,
                        error_code_name(code)),
            peer->rank);
    }
  }
  on_event_(LinkDown{event.link, code});
}

// -- rings
// ----------------------------------------------------------------------------------------------------------

bool Engine::take_commands() {
  const std::span<Session* const> sessions = sessions_.all();
  const bool resumed = swept_ != 0;
  more_expected_ = false;
  sweep_ended_ = false;
  paced_until_ns_ = 0;
  std::uint32_t moved = 0;
  for (; swept_ < sessions.size(); ++swept_) {
    if (moved >= kPassCommandsMax) {
      more_expected_ = true;
      return true;
    }
    if (next_session_ >= sessions.size()) next_session_ = 0;
    Session& session = *sessions[next_session_++];
    if (!session.fenced) moved += take_from(session);
  }
  sweep_ended_ = true;
  swept_ = 0;
  // The pass knows nothing of the sessions that had their turn in the passes before.
  return moved != 0 || resumed;
}

std::uint32_t Engine::take_from(Session& session) {
  const auto lane_count = static_cast<std::uint32_t>(session.lanes.size());
  std::uint32_t moved = 0;
  std::uint32_t index = session.next_lane;
  for (std::uint32_t i = 0; i < lane_count && !session.fenced; ++i) {
    Lane& lane = session.lanes[index];
    index = index + 1 == lane_count ? 0 : index + 1;
    const std::uint32_t lane_moved = take_turn(session, lane);
    moved += lane_moved;
    // The next turn begins behind the last lane that got something, so that none is always too
    // late.
    if (lane_moved != 0) session.next_lane = index;
  }
  return moved;
}

std::uint32_t Engine::take_turn(Session& session, Lane& lane) {
  const std::uint64_t consumed_before = lane.consumer.consumed;
  std::uint64_t bytes = 0;
  std::uint32_t moved = 0;
  while (!paced(session, lane) && (lane.holds || take_next(session, lane, bytes))) {
    if (lane.held.peer->retired) {
      complete_unsent(session, lane);
    } else if (!hand_over(session, lane)) {
      break;
    }
    if (++moved == kLaneTurnMax) {
      more_expected_ = true;
      break;
    }
  }
  const std::uint64_t taken = lane.consumer.consumed - consumed_before;
  if (taken != 0) {
    // The copies were made: the slots are the producer's again, even while a command still waits
    // here.
    lane.consumer.publish_consumed();
    lane.stats->commands.add(taken - (session.fenced ? 1 : 0));
    lane.stats->bytes.add(bytes);
    settle_due_ = settle_due_ || answers_waiting_ != 0;
  }
  return moved;
}

bool Engine::hand_over(Session& session, Lane& lane) {
  Peer& peer = *lane.held.peer;
  LinkQueue& link = *peer.link;
  if (!link.admits(peer.flow)) {
    if (link.full()) lane.stats->credit_stalls.add(1);
    return false;
  }
  session.pacer.take(now_ns_, lane.held.command.bytes);
  link.push(lane, peer.flow, now_ns_);
  if (link.full()) post(link);
  return true;
}

void Engine::complete_unsent(Session& session, Lane& lane) {
  lane.holds = false;
  --session.outstanding;
  settle_due_ = settle_due_ || answers_waiting_ != 0;
  const std::uint32_t in_order = lane.window.complete(*lane.held_entry);
  if (in_order == 0) return;
  lane.consumer.publish_completed(in_order);
  lane.stats->completed.add(in_order);
}

bool Engine::paced(const Session& session, const Lane& lane) {
  if (!session.pacer.limited() || session.pacer.admits(now_ns_)) return false;
  if (lane.holds || lane.ready()) {
    const std::uint64_t due = session.pacer.due_ns();
    paced_until_ns_ = paced_until_ns_ == 0 ? due : std::min(paced_until_ns_, due);
    lane.stats->credit_stalls.add(1);
  }
  return true;
}

bool Engine::take_next(Session& session, Lane& lane, std::uint64_t& bytes) {
  if (session.outstanding >= session.outstanding_max || lane.window.full()) {
    if (lane.ready()) lane.stats->credit_stalls.add(1);
    return false;
  }
  std::uint64_t words[shm::kCommandWords];
  const std::uint64_t sequence = lane.consumer.consumed;
  if (!lane.consumer.try_take(words)) return false;
  Flaw flaw = check_command(words, sequence, session.bindings, lane.held);
  if (flaw != Flaw::kNone) [[unlikely]] {
    // A client may use what it was just given before this pass knows of it: the message is in the
    // mailbox by then.
    if (read_mail()) flaw = check_command(words, sequence, session.bindings, lane.held);
    if (flaw != Flaw::kNone) {
      fault(session, ErrorCode::kBadCommand,
            describe_flaw(flaw, lane.index, sequence, words, session.bindings));
    }
    if (session.fenced) return false;
  }
  const shm::Command& command = lane.held.command;
  InFlight& entry = lane.window.open();
  entry.peer = lane.held.peer;
  entry.src_handle = command.src_handle;
  entry.dst_handle = command.dst_handle;
  entry.granule = static_cast<std::uint16_t>(command.flag_index / shm::kFlagGranule);
  lane.held_entry = &entry;
  lane.held_cookie = lane.cookie_base | static_cast<std::uint32_t>(sequence);
  lane.holds = true;
  if (trace_.on()) trace_launch(session, lane);
  ++session.outstanding;
  bytes += command.bytes;
  return true;
}

void Engine::trace_launch(Session& session, const Lane& lane) {
  const shm::Progress& words = *session.progress;
  const TracedLaunch launch{shm::load_relaxed(&words.tag), shm::load_relaxed(&words.op),
                            shm::load_relaxed(&words.epoch), shm::load_relaxed(&words.m),
                            shm::sizes_of(words)};
  if (session.traced_recording == trace_.recording() && session.traced == launch) return;
  session.traced_recording = trace_.recording();
  session.traced = launch;
  trace_.record({now_ns_, lane.held_cookie, 0, 0, 0, 0, TraceRecord::Kind::kLaunch, launch});
}

// -- links
// ----------------------------------------------------------------------------------------------------------

std::uint32_t Engine::post(LinkQueue& link) {
  if (link.refused()) return 0;
  const std::uint32_t taken =
      link.post(endpoint_, ++batch_number_, read_clock(), trace_.on() ? &trace_ : nullptr);
  posted_ += taken;
  return taken;
}

bool Engine::finish_links() {
  bool worked = false;
  for (LinkQueue* link : used_links_) {
    if (link->queued() != 0) {
      // A partial submission is worth a short wait only when company is on its way, or when the
      // link has enough to do meanwhile. Otherwise it goes at once.
      const bool company = more_expected_ || link->in_flight() >= shm::kBatchMax;
      const bool wait = company && now_ns_ - link->oldest_queued_ns() < batch_window_ns_;
      if (!wait) worked = post(*link) != 0 || worked;
    }
    if (sweep_ended_) worked = link->end_sweep() || worked;
    link->end_pass();
    link->publish_stats(now_ns_);
  }
  return worked;
}

}  // namespace mk::daemon
