/// \file
/// A loopback endpoint's service that answers as a test wants: late, twice, or nonsense.
#pragma once

#include <poll.h>

#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>

#include "daemon/fabric/loopback/connection.h"
#include "daemon/fabric/loopback/region.h"
#include "shm/host/buffer_file.h"

namespace mk::fabric::loopback {

/// Greets one peer after the other, and lets `answer` do what it likes with all further questions.
/// Both run on the fake's thread.
class FakePeer {
 public:
  using Answer = std::function<void(shm::FrameSocket&, const shm::Frame&)>;

  explicit FakePeer(Answer answer)
      : answer_(std::move(answer)),
        id_(need(make_token())),
        listener_(need(shm::FrameListener::listen(socket_name(id_)))),
        thread_([this] { run(); }) {}
  ~FakePeer() {
    stop_ = true;
    thread_.join();
  }

  Bytes address() const {
    Address address;
    address.endpoint = id_;
    return to_blob(address);
  }
  /// A key of this endpoint for all of `file`.
  Key key_for(const shm::BufferFile& file) {
    Key key;
    key.endpoint = id_;
    key.token = need(make_token());
    key.region = next_region_++;
    key.bytes = file.bytes();
    return key;
  }
  /// Questions after the greeting that have been dealt with.
  int answered() const { return answered_; }

  template <class T>
  static T need(Result<T> result) {
    if (!result) throw std::runtime_error(result.error().message);
    return std::move(*result);
  }

 private:
  void run() {
    while (!stop_) {
      pollfd waiting{listener_.fd(), POLLIN, 0};
      ::poll(&waiting, 1, 10);
      auto accepted = listener_.try_accept();
      if (accepted && *accepted) serve(**accepted);
    }
  }
  void serve(shm::FrameSocket& socket) {
    while (!stop_) {
      const auto frame =
          socket.receive(std::chrono::steady_clock::now() + std::chrono::milliseconds(10));
      if (!frame && frame.error().code == ErrorCode::kTimeout) continue;
      if (!frame) return;
      if (frame->type == static_cast<std::uint16_t>(Message::kHello)) {
        (void)socket.queue_send(static_cast<std::uint16_t>(Message::kWelcome), frame->request, {},
                                {});
        continue;
      }
      answer_(socket, *frame);
      ++answered_;
    }
  }

  const Answer answer_;
  const Token id_;
  shm::FrameListener listener_;
  std::atomic<bool> stop_{false};
  std::atomic<int> answered_{0};
  std::uint64_t next_region_ = 1;
  std::thread thread_;
};

}  // namespace mk::fabric::loopback
