#include "daemon/rpc/tls_reader.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

namespace mk::daemon {

struct TlsReader::State {
  std::mutex mutex;
  std::condition_variable changed;
  TlsTexts texts;
  bool wanted = false;
  bool stopping = false;
};

TlsReader::TlsReader(TlsTexts first) : state_(std::make_shared<State>()) {
  state_->texts = std::move(first);
  // Not joined: a mount may keep it for ever. It owns what it uses.
  if (!state_->texts.cert_path.empty()) std::thread([state = state_] { run(state); }).detach();
}

TlsReader::~TlsReader() {
  std::lock_guard lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
}

void TlsReader::renew() {
  std::lock_guard lock(state_->mutex);
  state_->wanted = true;
  state_->changed.notify_all();
}

TlsTexts TlsReader::texts() const {
  std::lock_guard lock(state_->mutex);
  return state_->texts;
}

void TlsReader::run(const std::shared_ptr<State>& state) {
  ::pthread_setname_np(::pthread_self(), "mk-tls-files");
  std::unique_lock lock(state->mutex);
  const auto [cert, key, ca] =
      std::tuple(state->texts.cert_path, state->texts.key_path, state->texts.ca_path);
  while (true) {
    state->changed.wait(lock, [&state] { return state->wanted || state->stopping; });
    if (state->stopping) return;
    state->wanted = false;
    lock.unlock();
    auto read = read_tls(cert, key, ca);
    lock.lock();
    // Files that are being replaced: the texts in use serve until the next time.
    if (read) state->texts = std::move(*read);
  }
}

}  // namespace mk::daemon
