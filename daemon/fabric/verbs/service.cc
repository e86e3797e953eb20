#include "daemon/fabric/verbs/service.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "daemon/fabric/verbs/events.h"
#include "shm/host/text.h"

namespace mk::fabric::verbs {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// An answer takes well under a millisecond; a datagram that got lost is sent again after so long,
/// then after twice as long.
constexpr milliseconds kAskAgainMin(100);
constexpr milliseconds kAskAgainMax(800);
constexpr milliseconds kKeepAlive(5'000);
constexpr milliseconds kGoodbye(500);
constexpr std::size_t kDatagramsAtOnce = 64;
/// Peers are told so often of another address, once at each keep-alive: datagrams get lost.
constexpr int kAnnouncements = 4;
/// How often a port without a place (no GID, not in its partition) looks for one, and datagrams are
/// looked for where the NIC does not tell of them.
constexpr milliseconds kLookAgain(500);
constexpr milliseconds kDeafPoll(10);
/// A lost port is opened again after so long, then after twice as long.
constexpr milliseconds kOpenAgainMin(100);
constexpr milliseconds kOpenAgainMax(5'000);
/// A lost opening, and a connection that ended, are closed as soon as the proxy has let go of them.
constexpr milliseconds kBury(20);

ErrorCode refusal_code(std::uint32_t code) {
  for (const ErrorCode known : {ErrorCode::kInvalidArgument, ErrorCode::kNotFound,
                                ErrorCode::kLimitExceeded, ErrorCode::kProtocol}) {
    if (code == static_cast<std::uint32_t>(known)) return known;
  }
  return ErrorCode::kUnavailable;
}

}  // namespace

Result<std::unique_ptr<Service>> Service::start(Parts parts) {
  std::unique_ptr<Service> service(new Service(std::move(parts)));
  service->wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!service->wake_.valid()) return fail_errno(errno, "cannot create an eventfd");
  service->thread_ = std::thread([raw = service.get()] { raw->run(); });
  return service;
}

Service::~Service() {
  if (!thread_.joinable()) return;
  ending_.store(true, std::memory_order_release);
  wake();
  thread_.join();
  say_goodbye();
}

void Service::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void Service::say_goodbye() {
  const PortPointer port = parts_.ports.get();
  if (port == nullptr) return;
  std::vector<Remote> peers = port->acceptor().peers();
  for (const auto& entry : watched_) {
    const Remote& peer = entry.second.peer;
    const bool known = std::any_of(peers.begin(), peers.end(), [&](const Remote& other) {
      return other.is(peer.peer, peer.address.endpoint);
    });
    if (!known) peers.push_back(peer);
  }
  const auto until = steady_clock::now() + kGoodbye;
  for (const Remote& peer : peers) {
    if (steady_clock::now() > until) return;
    Datagram gone;
    gone.kind = DatagramKind::kGone;
    tell(peer, gone);
  }
}

void Service::run() {
  opened_ = steady_clock::now();
  next_probe_ = opened_ + kKeepAlive;
  for (;;) {
    const PortPointer port = parts_.ports.get();
    Deadline until = port != nullptr ? next_probe_ : next_open_;
    if (port != nullptr && !port->device()->located()) until = std::min(until, next_look_);
    if (port != nullptr && !port->contact().deaf().empty())
      until = std::min(until, steady_clock::now() + kDeafPoll);
    const bool buried = port == nullptr || port->acceptor().bury();
    if (!parts_.ports.bury() || !buried) until = std::min(until, steady_clock::now() + kBury);
    if (!wait(port, until)) return;
    if (port != nullptr) {
      serve(*port);
    } else if (steady_clock::now() >= next_open_) {
      reopen();
    }
  }
}

bool Service::wait(const PortPointer& port, Deadline until) {
  std::array<pollfd, 3> files{{{wake_.get(), POLLIN, 0}, {-1, POLLIN, 0}, {-1, POLLIN, 0}}};
  if (port != nullptr) {
    files[1].fd = port->contact().fd();
    files[2].fd = port->device()->context()->async_fd;
  }
  const auto left = std::chrono::ceil<milliseconds>(until - steady_clock::now());
  ::poll(files.data(), files.size(), static_cast<int>(std::max<long>(left.count(), 0)));
  std::uint64_t wakes = 0;
  if (files[0].revents != 0) [[maybe_unused]]
    const ssize_t taken = ::read(wake_.get(), &wakes, sizeof wakes);
  constexpr short kBroken = POLLERR | POLLHUP | POLLNVAL;
  // A device that is taken away says so by an event; this is for one that cannot any more.
  if (((files[1].revents | files[2].revents) & kBroken) != 0) {
    take_events(*port);
    if (parts_.ports.get() == port) lose(*port, "the device is gone");
  }
  return !ending_.load(std::memory_order_acquire);
}

void Service::serve(OpenPort& port) {
  port.contact().rearm();
  if (!port.contact().deaf().empty() && !std::exchange(deaf_said_, true)) {
    notice(fmt::format(
        "RDMA port {} does not tell of datagrams ({}): they are looked for every {} ms instead",
        port.device()->name(), port.contact().deaf(), kDeafPoll.count()));
  }
  take_datagrams(port);
  take_events(port);
  if (parts_.ports.get().get() != &port) return;
  if (port.contact().broken()) restart_contact(port, "it was found in error");
  if (parts_.ports.get().get() != &port) return;
  if (Flusher* const flusher = port.flusher()) flusher->mend();
  const Deadline now = steady_clock::now();
  if (!port.device()->located() && now >= next_look_) {
    next_look_ = now + kLookAgain;
    if (Result<bool> moved = port.device()->relocate())
      move(port, "it has its place on the network again", std::move(moved));
  }
  if (now < next_probe_) return;
  next_probe_ = now + kKeepAlive;
  if (const Status alive = port.device()->check_alive(); !alive)
    return lose(port, fmt::format("the device is gone ({})", alive.error().message));
  port.acceptor().keep_alive();
  if (announcements_left_ > 0) announce();
}

// -- datagrams --------------------------------------------------------------------------------

void Service::take_datagrams(OpenPort& port) {
  // A question that came again while it waited is answered once: answering every repetition would
  // put a machine that is slow further behind.
  std::vector<std::pair<PeerNumber, Datagram>> waiting;
  do {
    waiting.clear();
    while (std::optional<Datagram> datagram = port.contact().receive()) {
      const std::optional<PeerNumber> peer = parts_.passes.owner(datagram->to);
      if (!peer) continue;  // not from anybody who knows us
      const bool repeated = std::any_of(waiting.begin(), waiting.end(), [&](const auto& other) {
        return std::memcmp(&other.second, &*datagram, sizeof(Datagram)) == 0;
      });
      if (!repeated) waiting.emplace_back(*peer, *datagram);
      if (waiting.size() == kDatagramsAtOnce) break;
    }
    for (const auto& [peer, datagram] : waiting) take(port, peer, datagram);
  } while (waiting.size() == kDatagramsAtOnce);
}

void Service::take(OpenPort& port, PeerNumber peer, const Datagram& datagram) {
  switch (datagram.kind) {
    case DatagramKind::kConnect:
    case DatagramKind::kRegion:
      answer(port, peer, datagram);
      break;
    case DatagramKind::kAccept:
    case DatagramKind::kRefuse: {
      const std::lock_guard lock(mutex_);
      // Answered before, or too late, or not by whom it was put to.
      if (datagram.number != asked_ || peer != asked_peer_) break;
      answer_ = datagram;
      answered_.notify_all();
      break;
    }
    case DatagramKind::kDisconnect:
      port.acceptor().release(peer, datagram.from, datagram.number);
      break;
    case DatagramKind::kGone:
      port.acceptor().release_all(peer, datagram.from);
      trouble([&](const Watched& one) { return one.peer.is(peer, datagram.from); },
              "closed its endpoint: its daemon ended");
      break;
    case DatagramKind::kMoved: {
      const auto address = datagram.get<Address>();
      if (address.magic == Address::kMagic && same_token(address.endpoint, datagram.from))
        learn({peer, address});
      break;
    }
  }
}

Address Service::address_for(PeerNumber peer) const {
  Address address = parts_.ports.address();
  address.pass = parts_.passes.of(peer);
  return address;
}

void Service::learn(const Remote& remote) {
  if (!parts_.directory.learn(remote)) return;
  trouble(
      [&](const Watched& one) {
        return one.peer.is(remote.peer, remote.address.endpoint) &&
               one.peer.address.version < remote.address.version;
      },
      "got another address, where it is to be connected to anew");
}

void Service::answer(OpenPort& port, PeerNumber peer, const Datagram& question) {
  Datagram answer;
  answer.kind = DatagramKind::kAccept;
  const auto body = question.get<ConnectBody>();
  if (question.kind == DatagramKind::kConnect) {
    if (body.from.magic != Address::kMagic || !same_token(body.from.endpoint, question.from))
      return;
    const Remote from{peer, body.from};
    learn(from);
    // Ends made where the port was would be of no use.
    if (const Status here = port.device()->check_located(); !here)
      return reply(from, question, propagate(here));
    Address own = port.address();
    own.pass = parts_.passes.of(peer);
    auto accepted = port.acceptor().accept(peer, question.number, body, own);
    if (!accepted) return reply(from, question, propagate(accepted));
    answer.put(*accepted);
    return reply(from, question, answer);
  }
  const auto asked = question.get<RegionBody>();
  if (asked.from.magic != Address::kMagic || !same_token(asked.from.endpoint, question.from))
    return;
  if (!port.keys()->valid(asked.region, asked.digest)) {
    return reply({peer, asked.from}, question,
                 fail(ErrorCode::kNotFound,
                      "it has no region of that key (any more: {} forgot all of it if it failed)",
                      port.device()->name()));
  }
  answer.put(asked.region);
  reply({peer, asked.from}, question, answer);
}

void Service::reply(const Remote& to, const Datagram& question, Result<Datagram> answer) {
  Datagram message;
  if (answer) {
    message = *answer;
  } else {
    message.kind = DatagramKind::kRefuse;
    message.code = static_cast<std::uint32_t>(answer.error().code);
    message.put_text(answer.error().message);
  }
  message.number = question.number;
  tell(to, message);
}

void Service::tell(const Remote& to, Datagram message) {
  message.to = to.address.pass;
  message.from = token_;
  // What gets lost is asked for again, or found out by who waits for it.
  const PortPointer port = parts_.ports.get();
  if (port == nullptr) return;
  [[maybe_unused]] const Status sent = port->contact().send(parts_.directory.newest(to), message);
  if (port->contact().broken()) wake();
}

Result<Datagram> Service::ask(const Remote& to, Datagram question, Deadline deadline) {
  question.to = to.address.pass;
  question.from = token_;
  MK_ASSIGN_OR_RETURN(const PortPointer port, parts_.ports.need());
  {
    const std::lock_guard lock(mutex_);
    asked_ = question.number;
    asked_peer_ = to.peer;
    answer_.reset();
  }
  Status sent;
  auto patience = kAskAgainMin;
  for (;;) {
    sent = port->contact().send(parts_.directory.newest(to), question);
    if (port->contact().broken()) wake();
    std::unique_lock lock(mutex_);
    const auto until = std::min(deadline, steady_clock::now() + patience);
    const auto lost = [&] { return parts_.ports.get() != port; };
    answered_.wait_until(lock, until, [&] { return answer_.has_value() || lost(); });
    if (answer_.has_value()) break;
    if (lost()) {
      asked_ = 0;
      return fail(ErrorCode::kUnavailable, "RDMA port {} was lost meanwhile",
                  port->device()->name());
    }
    if (steady_clock::now() >= deadline) {
      asked_ = 0;
      if (!sent) return propagate(sent);
      return fail(ErrorCode::kTimeout, "nobody answered at GID {}",
                  fmt::format("{:02x}", fmt::join(to.address.gid, "")));
    }
    patience = std::min(2 * patience, kAskAgainMax);
  }
  const std::lock_guard lock(mutex_);
  asked_ = 0;
  if (answer_->kind == DatagramKind::kRefuse)
    return fail(refusal_code(answer_->code), "{}",
                shm::plain_text(answer_->text(), sizeof(Datagram)));
  return *answer_;
}

// -- trouble ----------------------------------------------------------------------------------

std::uint64_t Service::watch(Watched watched) {
  const std::lock_guard lock(mutex_);
  watched_.emplace_back(++next_watch_, std::move(watched));
  return next_watch_;
}

void Service::unwatch(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(watched_, [id](const auto& one) { return one.first == id; });
}

void Service::trouble(const std::function<bool(const Watched&)>& of, std::string_view reason,
                      bool root) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, watched] : watched_) {
    if (of(watched)) watched.trouble(reason, root);
  }
}

void Service::move(OpenPort& port, const std::string& what, Result<bool> moved) {
  const std::string reason = fmt::format(
      "cannot be reached by RDMA port {} as before: {}; {}", port.device()->name(), what,
      moved ? "now it is " + port.device()->explanation() : moved.error().message);
  if (const Status followed = port.contact().follow(); !followed)
    return lose(port, fmt::format("{}; {}", what, followed.error().message));
  if (moved && *moved) {
    announcements_left_ = kAnnouncements;
    announce();
  }
  trouble([](const Watched&) { return true; }, reason);
  notice("peers " + reason);
}

void Service::announce() {
  --announcements_left_;
  Datagram moved;
  moved.kind = DatagramKind::kMoved;
  const auto until = steady_clock::now() + kGoodbye;
  for (const Remote& peer : parts_.directory.all()) {
    if (steady_clock::now() > until) return;
    moved.put(address_for(peer.peer));
    tell(peer, moved);
  }
}

void Service::restart_contact(OpenPort& port, std::string_view what) {
  const std::string text = fmt::format("the device's queue of datagrams: {}", what);
  if (const Status again = port.contact().restart(); !again)
    return lose(port, fmt::format("{}; {}", text, again.error().message));
  notice(fmt::format("RDMA port {}: {}; it was started anew", port.device()->name(), text));
}

void Service::take_events(OpenPort& port) {
  const Device& device = *port.device();
  ibv_async_event event{};
  while (parts_.ports.get().get() == &port &&
         ::ibv_get_async_event(device.context(), &event) == 0) {
    const EventMeaning meaning = meaning_of(event.event_type);
    const std::uint32_t queue =
        meaning.scope == EventMeaning::Scope::kQueue ? event.element.qp->qp_num : 0;
    const int number = event.element.port_num;
    // Before anything is closed: closing a queue pair waits for its events.
    ::ibv_ack_async_event(&event);
    const std::string reason =
        fmt::format("cannot be reached by RDMA port {}: {}", device.name(), meaning.what);
    switch (meaning.scope) {
      case EventMeaning::Scope::kNothing:
        break;
      case EventMeaning::Scope::kQueue:
        if (queue == port.contact().number()) {
          restart_contact(port, meaning.what);
          break;
        }
        port.acceptor().release_queue(queue);
        trouble(
            [queue](const Watched& one) {
              return std::find(one.queues.begin(), one.queues.end(), queue) != one.queues.end();
            },
            reason);
        break;
      case EventMeaning::Scope::kGidTable:
        if (device.located() && device.gid_unchanged()) break;
        [[fallthrough]];
      case EventMeaning::Scope::kPlace:
        if (number == device.port())
          move(port, std::string(meaning.what), port.device()->relocate());
        break;
      case EventMeaning::Scope::kPkeyTable:
        if (number != device.port() || (device.located() && device.pkey_unchanged())) break;
        move(port, std::string(meaning.what), port.device()->relocate());
        break;
      case EventMeaning::Scope::kPort:
        if (number == device.port()) trouble([](const Watched&) { return true; }, reason);
        break;
      case EventMeaning::Scope::kDevice:
        lose(port, std::string(meaning.what));
        break;
    }
  }
}

// -- a port that is lost --------------------------------------------------------------------------

void Service::lose(OpenPort& port, const std::string& what) {
  const std::string& name = port.device()->name();
  lost_ = fmt::format("RDMA port {} is lost: {}", name, what);
  parts_.ports.lose(lost_ + "; it is opened again as soon as it is back");
  {
    // Who waits for an answer looks under the lock.
    const std::lock_guard lock(mutex_);
    answered_.notify_all();
  }
  trouble([](const Watched&) { return true; },
          fmt::format("cannot be reached by RDMA port {}: {}", name, what), true);
  port.keys()->clear();
  // One that is lost again and again is not opened at once again and again.
  const Deadline now = steady_clock::now();
  if (now - opened_ > kOpenAgainMax || patience_ < kOpenAgainMin) patience_ = kOpenAgainMin;
  next_open_ = now + patience_;
  notice(lost_ + ": its links are down, and it is opened again as soon as it is back");
}

void Service::reopen() {
  patience_ = std::min(std::max(2 * patience_, kOpenAgainMin), kOpenAgainMax);
  Result<PortPointer> opened = parts_.reopen();
  opened_ = steady_clock::now();
  if (!opened) {
    next_open_ = opened_ + patience_;
    parts_.ports.lose(fmt::format("{}; it is not back: {}", lost_, opened.error().message));
    return;
  }
  const std::string explanation = (*opened)->device()->explanation();
  parts_.ports.put(std::move(*opened));
  deaf_said_ = false;
  next_probe_ = opened_ + kKeepAlive;
  announcements_left_ = kAnnouncements;
  announce();
  notice("is back: " + explanation);
}

}  // namespace mk::fabric::verbs
