#include "daemon/fabric/verbs/service.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "daemon/fabric/verbs/events.h"

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

ErrorCode refusal_code(std::uint32_t code) {
  for (const ErrorCode known : {ErrorCode::kInvalidArgument, ErrorCode::kNotFound,
                                ErrorCode::kLimitExceeded, ErrorCode::kProtocol}) {
    if (code == static_cast<std::uint32_t>(known)) return known;
  }
  return ErrorCode::kUnavailable;
}

}  // namespace

Result<std::unique_ptr<Service>> Service::start(const Parts& parts) {
  std::unique_ptr<Service> service(new Service(parts));
  service->stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!service->stop_.valid()) return fail_errno(errno, "cannot create an eventfd");
  service->thread_ = std::thread([raw = service.get()] { raw->run(); });
  return service;
}

Service::~Service() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
  say_goodbye();
}

void Service::say_goodbye() {
  std::vector<Address> peers = parts_.acceptor.peers();
  for (const auto& entry : watched_) {
    const Address& peer = entry.second.peer;
    const bool known = std::any_of(peers.begin(), peers.end(), [&](const Address& other) {
      return same_token(other.endpoint, peer.endpoint);
    });
    if (!known) peers.push_back(peer);
  }
  const auto until = steady_clock::now() + kGoodbye;
  for (const Address& peer : peers) {
    if (steady_clock::now() > until) return;
    Datagram gone;
    gone.kind = DatagramKind::kGone;
    tell(peer, gone);
  }
}

void Service::run() {
  std::array<pollfd, 3> files{{{stop_.get(), POLLIN, 0},
                               {parts_.contact.fd(), POLLIN, 0},
                               {parts_.device.context()->async_fd, POLLIN, 0}}};
  auto next_probe = steady_clock::now() + kKeepAlive;
  for (;;) {
    const auto wait = std::chrono::ceil<milliseconds>(next_probe - steady_clock::now());
    ::poll(files.data(), files.size(), static_cast<int>(std::max<long>(wait.count(), 0)));
    if (files[0].revents != 0) return;
    parts_.contact.rearm();
    take_datagrams();
    take_events();
    parts_.tend();
    if (steady_clock::now() < next_probe) continue;
    parts_.acceptor.keep_alive();
    if (announcements_left_ > 0) announce();
    next_probe = steady_clock::now() + kKeepAlive;
  }
}

// -- datagrams --------------------------------------------------------------------------------

void Service::take_datagrams() {
  // A question that came again while it waited is answered once: answering every repetition would
  // put a machine that is slow further behind.
  std::vector<Datagram> waiting;
  do {
    waiting.clear();
    while (std::optional<Datagram> datagram = parts_.contact.receive()) {
      if (!same_token(datagram->to, token_)) continue;  // not from anybody who knows us
      const bool repeated = std::any_of(waiting.begin(), waiting.end(), [&](const Datagram& other) {
        return std::memcmp(&other, &*datagram, sizeof other) == 0;
      });
      if (!repeated) waiting.push_back(*datagram);
      if (waiting.size() == kDatagramsAtOnce) break;
    }
    for (const Datagram& datagram : waiting) take(datagram);
  } while (waiting.size() == kDatagramsAtOnce);
}

void Service::take(const Datagram& datagram) {
  switch (datagram.kind) {
    case DatagramKind::kConnect:
    case DatagramKind::kRegion:
      answer(datagram);
      break;
    case DatagramKind::kAccept:
    case DatagramKind::kRefuse: {
      const std::lock_guard lock(mutex_);
      if (datagram.number != asked_) break;  // answered before, or too late
      answer_ = datagram;
      answered_.notify_all();
      break;
    }
    case DatagramKind::kDisconnect:
      parts_.acceptor.release(datagram.from, datagram.number);
      break;
    case DatagramKind::kGone:
      parts_.acceptor.release_all(datagram.from);
      trouble([&](const Watched& one) { return same_token(one.peer.endpoint, datagram.from); },
              "closed its endpoint: its daemon ended");
      break;
    case DatagramKind::kMoved: {
      const auto address = datagram.get<Address>();
      if (address.magic == Address::kMagic && same_token(address.endpoint, datagram.from))
        learn(address);
      break;
    }
  }
}

void Service::learn(const Address& address) {
  if (!parts_.directory.learn(address)) return;
  trouble(
      [&](const Watched& one) {
        return same_token(one.peer.endpoint, address.endpoint) &&
               one.peer.version < address.version;
      },
      "got another address, where it is to be connected to anew");
}

void Service::answer(const Datagram& question) {
  Datagram answer;
  answer.kind = DatagramKind::kAccept;
  const auto body = question.get<ConnectBody>();
  if (question.kind == DatagramKind::kConnect) {
    if (body.from.magic != Address::kMagic || !same_token(body.from.endpoint, question.from))
      return;
    learn(body.from);
    auto accepted = parts_.acceptor.accept(question.number, body);
    if (!accepted) return reply(body.from, question, propagate(accepted));
    answer.put(*accepted);
    return reply(body.from, question, answer);
  }
  const auto asked = question.get<RegionBody>();
  if (asked.from.magic != Address::kMagic || !same_token(asked.from.endpoint, question.from))
    return;
  if (!parts_.keys.valid(asked.region, asked.digest)) {
    return reply(asked.from, question,
                 fail(ErrorCode::kNotFound, "it has no region of that key (any more)"));
  }
  answer.put(asked.region);
  reply(asked.from, question, answer);
}

void Service::reply(const Address& to, const Datagram& question, Result<Datagram> answer) {
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

void Service::tell(const Address& to, Datagram message) {
  message.to = to.endpoint;
  message.from = token_;
  // What gets lost is asked for again, or found out by who waits for it.
  [[maybe_unused]] const Status sent = parts_.contact.send(to, message);
}

Result<Datagram> Service::ask(const Address& to, Datagram question, Deadline deadline) {
  question.to = to.endpoint;
  question.from = token_;
  {
    const std::lock_guard lock(mutex_);
    asked_ = question.number;
    answer_.reset();
  }
  Status sent;
  auto patience = kAskAgainMin;
  for (;;) {
    sent = parts_.contact.send(to, question);
    std::unique_lock lock(mutex_);
    const auto until = std::min(deadline, steady_clock::now() + patience);
    if (answered_.wait_until(lock, until, [&] { return answer_.has_value(); })) break;
    if (steady_clock::now() >= deadline) {
      asked_ = 0;
      if (!sent) return propagate(sent);
      return fail(ErrorCode::kTimeout, "nobody answered at GID {}",
                  fmt::format("{:02x}", fmt::join(to.gid, "")));
    }
    patience = std::min(2 * patience, kAskAgainMax);
  }
  const std::lock_guard lock(mutex_);
  asked_ = 0;
  if (answer_->kind == DatagramKind::kRefuse)
    return fail(refusal_code(answer_->code), "{}", answer_->text());
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

void Service::trouble(const std::function<bool(const Watched&)>& of, std::string_view reason) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, watched] : watched_) {
    if (of(watched)) watched.trouble(reason);
  }
}

std::string Service::move() {
  const Result<bool> moved = parts_.device.relocate();
  if (!moved) return ": " + moved.error().message;
  if (*moved) {
    announcements_left_ = kAnnouncements;
    announce();
  }
  return "; now it is " + parts_.device.explanation();
}

void Service::announce() {
  --announcements_left_;
  Datagram moved;
  moved.kind = DatagramKind::kMoved;
  moved.put(parts_.self());
  const auto until = steady_clock::now() + kGoodbye;
  for (const Address& peer : parts_.directory.all()) {
    if (steady_clock::now() > until) return;
    tell(peer, moved);
  }
}

void Service::take_events() {
  ibv_async_event event{};
  while (::ibv_get_async_event(parts_.device.context(), &event) == 0) {
    const EventMeaning meaning = meaning_of(event.event_type);
    const std::uint32_t queue =
        meaning.scope == EventMeaning::Scope::kQueue ? event.element.qp->qp_num : 0;
    const int port = event.element.port_num;
    // Before anything is closed: closing a queue pair waits for its events.
    ::ibv_ack_async_event(&event);
    std::string reason = fmt::format("({}) {}", parts_.device.name(), meaning.what);
    switch (meaning.scope) {
      case EventMeaning::Scope::kNothing:
        break;
      case EventMeaning::Scope::kQueue:
        parts_.acceptor.release_queue(queue);
        trouble(
            [queue](const Watched& one) {
              return std::find(one.queues.begin(), one.queues.end(), queue) != one.queues.end();
            },
            reason);
        break;
      case EventMeaning::Scope::kGidTable:
        if (parts_.device.located() && parts_.device.gid_unchanged()) break;
        [[fallthrough]];
      case EventMeaning::Scope::kPlace:
        if (port != parts_.device.port()) break;
        reason += move();
        trouble([](const Watched&) { return true; }, reason);
        break;
      case EventMeaning::Scope::kPkeyTable:
        if (parts_.device.pkey_unchanged()) break;
        [[fallthrough]];
      case EventMeaning::Scope::kPort:
        if (port != parts_.device.port()) break;
        [[fallthrough]];
      case EventMeaning::Scope::kDevice:
        trouble([](const Watched&) { return true; }, reason);
        break;
    }
  }
}

}  // namespace mk::fabric::verbs
