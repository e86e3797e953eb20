#include "daemon/fabric/loopback/service.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace mk::fabric::loopback {
namespace {

/// Links and region requests of all daemons of this host; more is a leak somewhere.
constexpr std::size_t kPeersMax = 4096;
constexpr int kAcceptsPerTurn = 16;  ///< anybody may connect, and peers' questions go on
constexpr std::chrono::milliseconds kAcceptPause{200};  ///< after accept has failed

}  // namespace

Service::Service(const Token& endpoint, std::shared_ptr<RegionTable> regions,
                 shm::FrameListener listener, UniqueFd wake,
                 std::function<void(const std::string&)> notice)
    : endpoint_(endpoint),
      regions_(std::move(regions)),
      listener_(std::move(listener)),
      wake_(std::move(wake)),
      notice_(std::move(notice)) {}

Result<std::unique_ptr<Service>> Service::start(const Token& endpoint,
                                                std::shared_ptr<RegionTable> regions,
                                                std::function<void(const std::string&)> notice) {
  MK_ASSIGN_OR_RETURN(shm::FrameListener listener,
                      shm::FrameListener::listen(socket_name(endpoint)));
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return fail_errno(errno, "cannot create the loopback endpoint's eventfd");
  std::unique_ptr<Service> service(new Service(endpoint, std::move(regions), std::move(listener),
                                               std::move(wake), std::move(notice)));
  try {
    service->thread_ = std::thread([raw = service.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    return fail_errno(error.code().value(), "cannot start the loopback endpoint's service thread");
  }
  return service;
}

Service::~Service() {
  stop_.store(true, std::memory_order_release);
  wake();
  if (thread_.joinable()) thread_.join();
}

void Service::wake() {
  const std::uint64_t one = 1;
  // It can only fail when the counter is full, and then the thread is awake anyway.
  [[maybe_unused]] const ssize_t ignored = ::write(wake_.get(), &one, sizeof(one));
}

std::uint64_t Service::watch(int fd, std::function<void()> on_gone) {
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(watches_mutex_);
    id = next_watch_++;
    watches_.push_back({id, fd, std::move(on_gone)});
  }
  wake();
  return id;
}

void Service::unwatch(std::uint64_t id) {
  {
    const std::lock_guard lock(watches_mutex_);
    std::erase_if(watches_, [id](const Watch& watch) { return watch.id == id; });
  }
  wake();
}

void Service::run() {
  std::vector<pollfd> fds;
  std::vector<std::uint64_t> watched;
  while (!stop_.load(std::memory_order_acquire)) {
    const auto pause =
        std::chrono::ceil<std::chrono::milliseconds>(accepts_from_ - Clock::now()).count();
    const bool accepts = pause <= 0;
    fds.assign({{wake_.get(), POLLIN, 0}, {accepts ? listener_.fd() : -1, POLLIN, 0}});
    for (const auto& peer : peers_) {
      fds.push_back(
          {peer->fd(), static_cast<short>(POLLIN | (peer->has_queued() ? POLLOUT : 0)), 0});
    }
    watched.clear();
    {
      const std::lock_guard lock(watches_mutex_);
      for (const Watch& watch : watches_) {
        fds.push_back({watch.fd, POLLRDHUP, 0});
        watched.push_back(watch.id);
      }
    }
    const int timeout = accepts ? -1 : static_cast<int>(pause);
    if (::poll(fds.data(), fds.size(), timeout) < 0) continue;  // EINTR

    if (fds[0].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t ignored = ::read(wake_.get(), &count, sizeof(count));
    }
    std::size_t at = 2;
    for (auto& peer : peers_) {
      if (fds[at++].revents != 0 && !serve(*peer)) peer.reset();
    }
    std::erase(peers_, nullptr);
    {
      // A watch that was removed meanwhile is not found: its descriptor may be somebody else's by
      // now.
      const std::lock_guard lock(watches_mutex_);
      for (const std::uint64_t id : watched) {
        if (fds[at++].revents == 0) continue;
        const auto watch = std::find_if(watches_.begin(), watches_.end(),
                                        [id](const Watch& w) { return w.id == id; });
        if (watch == watches_.end()) continue;
        watch->on_gone();
        watches_.erase(watch);
      }
    }
    if (fds[1].revents != 0) accept_some();
  }
  peers_.clear();
}

void Service::accept_some() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    auto accepted = listener_.try_accept();
    if (!accepted) {
      // The connection stays in the queue, and the listener readable.
      accepts_from_ = Clock::now() + kAcceptPause;
      if (!std::exchange(accept_failing_, true) && notice_) notice_(accepted.error().message);
      return;
    }
    accept_failing_ = false;
    if (!*accepted) return;
    shm::FrameSocket peer = std::move(**accepted);
    const auto credentials = peer.credentials();
    if (!credentials || credentials->uid != ::geteuid() || peers_.size() >= kPeersMax)
      continue;  // closes it
    peers_.push_back(std::make_unique<shm::FrameSocket>(std::move(peer)));
  }
}

bool Service::serve(shm::FrameSocket& peer) {
  if (peer.has_queued() && !peer.flush()) return false;
  for (;;) {
    auto frame = peer.try_receive();
    if (!frame) return false;
    if (!*frame) return true;
    if (!answer(peer, **frame)) return false;
  }
}

Status Service::answer(shm::FrameSocket& peer, const shm::Frame& question) {
  const auto reply = [&](Message type, std::span<const std::byte> payload,
                         std::span<const int> fds) {
    return peer.queue_send(static_cast<std::uint16_t>(type), question.request, payload, fds);
  };
  const auto refuse = [&](const Error& error) {
    return reply(Message::kRefused, refusal(error), {});
  };

  if (question.type == static_cast<std::uint16_t>(Message::kHello)) {
    const auto expected = from_blob<Address>(question.payload);
    if (!expected || !same_token(expected->endpoint, endpoint_)) {
      return refuse(
          {ErrorCode::kProtocol,
           "this is not the loopback endpoint that the peer expects, or another version"});
    }
    return reply(Message::kWelcome, {}, {});
  }
  if (question.type == static_cast<std::uint16_t>(Message::kGetRegion)) {
    const auto key = from_blob<Key>(question.payload);
    if (!key || !same_token(key->endpoint, endpoint_)) {
      return refuse({ErrorCode::kPermission, "the region's key is not one this endpoint gave out"});
    }
    const auto region = regions_->find(*key);
    if (!region) return refuse(region.error());
    // The descriptor is the owner's until it deregisters.
    const std::shared_lock lock((*region)->lock);
    if (!(*region)->alive) return refuse({ErrorCode::kPermission, "the region was deregistered"});
    if ((*region)->memory.device) {
      Bytes payload = to_blob(key_of(**region, endpoint_));
      const Bytes device = to_blob(*(*region)->memory.device);
      payload.insert(payload.end(), device.begin(), device.end());
      return reply(Message::kRegion, payload, {});
    }
    const int fd = (*region)->memory.fd;
    if (fd < 0) {
      return refuse({ErrorCode::kUnsupported,
                     "the region is not backed by a memory file, so only links within its process "
                     "can write to it"});
    }
    return reply(Message::kRegion, to_blob(key_of(**region, endpoint_)), std::span(&fd, 1));
  }
  return fail(ErrorCode::kProtocol, "unknown message {}", question.type);
}

}  // namespace mk::fabric::loopback
