#include "daemon/tls/peer_watch.h"

#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "daemon/tls/handshake.h"

namespace mk::daemon {
namespace {

constexpr std::chrono::milliseconds kPatience(2000);  ///< with one peer

}  // namespace

struct CertificateWatch::State {
  TlsFiles own;
  Callbacks callbacks;
  std::chrono::milliseconds interval;
  std::mutex mutex;  ///< held while a callback runs, so that none runs after the stop
  std::condition_variable changed;
  bool stopping = false;
  std::size_t turn = 0;
  int shaking_hands = -1;  ///< the connection of a handshake under way
};

CertificateWatch::CertificateWatch(TlsFiles own, Callbacks callbacks,
                                   std::chrono::milliseconds interval)
    : state_(std::make_shared<State>()) {
  state_->own = std::move(own);
  state_->callbacks = std::move(callbacks);
  state_->interval = interval;
  // Not joined: the system's resolver may keep it for half a minute, and a mount that hangs for
  // ever. It owns what it uses.
  std::thread([state = state_] { run(state); }).detach();
}

void CertificateWatch::stop() {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->callbacks = {};
  state_->changed.notify_all();
  // OpenSSL must not be at work when the process ends: that handshake is over at once.
  if (state_->shaking_hands >= 0) ::shutdown(state_->shaking_hands, SHUT_RDWR);
  state_->changed.wait(lock, [this] { return state_->shaking_hands < 0; });
}

void CertificateWatch::run(const std::shared_ptr<State>& state) {
  ::pthread_setname_np(::pthread_self(), "mk-certificates");
  std::unique_lock lock(state->mutex);
  while (!state->stopping) {
    // The files' mount may hang, and `stop` must not.
    lock.unlock();
    const TlsContents contents = read_contents(state->own);
    lock.lock();
    if (state->stopping) return;
    state->callbacks.own(look_at(state->own, contents, unix_now()));
    const std::vector<Target> targets = state->callbacks.targets();
    if (!targets.empty()) {
      const Target& target = targets[state->turn++ % targets.size()];
      lock.unlock();
      const auto connection = connect_to(target.address, kPatience);
      lock.lock();
      if (state->stopping) return;
      std::string trouble;
      if (connection) {
        state->shaking_hands = connection->get();
        lock.unlock();
        const Status seen =
            try_handshake(state->own, contents, *connection, target.name, kPatience);
        lock.lock();
        state->shaking_hands = -1;
        state->changed.notify_all();
        if (state->stopping) return;
        if (!seen && seen.error().code == ErrorCode::kPermission) trouble = seen.error().message;
      }
      state->callbacks.peer(target.node, trouble);
    }
    state->changed.wait_for(lock, state->interval, [&state] { return state->stopping; });
  }
}

}  // namespace mk::daemon
