/// \file
/// A client as a blocking program: requests and replies over a real socket.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "shm/host/buffer_file.h"
#include "shm/host/protocol.h"
#include "shm/host/segment.h"
#include "shm/host/unix_socket.h"
#include "shm/layout.h"
#include "shm/ring.h"

namespace mk::daemon::test {

inline std::chrono::steady_clock::time_point in_time() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

class SocketClient {
 public:
  explicit SocketClient(const std::string& path)
      : socket_(shm::FrameSocket::connect(path, std::chrono::seconds(60)).value()) {}
  explicit SocketClient(shm::FrameSocket socket) : socket_(std::move(socket)) {}

  /// Sends a request and waits for its reply; an ErrorReply is the error.
  template <class Reply, class Request>
  Result<Reply> call(const Request& request, std::span<const int> fds = {},
                     std::vector<UniqueFd>* reply_fds = nullptr) {
    // One that was refused may have been hung up on by now: what it was told comes, then the end,
    // which is the error.
    (void)try_post(request, in_time(), fds);
    const std::uint64_t number = requests_;
    while (true) {
      auto frame = next();
      if (!frame) return propagate(frame);
      if (frame->request != number) {
        unasked_.push_back(std::move(*frame));
        continue;
      }
      if (frame->type == static_cast<std::uint16_t>(shm::MessageType::kError)) {
        const auto error = shm::decode_message<shm::ErrorReply>(frame->payload);
        return tl::unexpected<Error>(Error{error->code, error->message});
      }
      EXPECT_EQ(frame->type, static_cast<std::uint16_t>(Reply::kType));
      if (reply_fds != nullptr) *reply_fds = std::move(frame->fds);
      return shm::decode_message<Reply>(frame->payload);
    }
  }
  template <class Request>
  std::uint64_t post(const Request& request) {
    const Status sent = try_post(request, in_time());
    EXPECT_TRUE(sent) << sent.error().message;
    return requests_;
  }
  /// Sends a request whose reply nobody waits for; the error says why it did not go.
  template <class Request>
  Status try_post(const Request& request, std::chrono::steady_clock::time_point deadline,
                  std::span<const int> fds = {}) {
    return socket_.send(static_cast<std::uint16_t>(Request::kType), ++requests_,
                        shm::encode_message(request), fds, deadline);
  }
  /// Waits for a message of this type that is nobody's reply; or the session's failure, which ends
  /// all waiting.
  template <class Message>
  Result<Message> await() {
    while (true) {
      shm::Frame frame;
      if (!unasked_.empty()) {
        frame = std::move(unasked_.front());
        unasked_.pop_front();
      } else {
        auto received = next();
        if (!received) return propagate(received);
        frame = std::move(*received);
      }
      if (frame.type == static_cast<std::uint16_t>(Message::kType)) {
        return shm::decode_message<Message>(frame.payload);
      }
      if (frame.type == static_cast<std::uint16_t>(shm::SessionFailed::kType)) {
        const auto failed = shm::decode_message<shm::SessionFailed>(frame.payload);
        return tl::unexpected<Error>(failed ? Error{failed->code, failed->message}
                                            : failed.error());
      }
    }
  }
  /// Sends a frame of any kind and content, whose reply nobody waits for.
  Status try_frame(std::uint16_t type, std::span<const std::byte> payload,
                   std::span<const int> fds = {}) {
    return socket_.send(type, ++requests_, payload, fds, in_time());
  }
  /// Takes and forgets what has come; false when the daemon has hung up.
  bool drain() {
    while (true) {
      const auto frame = socket_.receive(std::chrono::steady_clock::now());
      if (!frame) return frame.error().code == ErrorCode::kTimeout;
    }
  }
  Result<shm::Frame> next() { return socket_.receive(in_time()); }
  void shut() { socket_.shutdown(); }

  /// `fds`: the process's own pidfd, or what else a client may send.
  Status attach(const shm::Attach& attach, std::span<const int> fds = {}) {
    auto hello = call<shm::HelloReply>(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"});
    if (!hello) return propagate(hello);
    return attach_again(attach, fds);
  }
  /// Without hello.
  Status attach_again(const shm::Attach& attach, std::span<const int> fds = {}) {
    std::vector<UniqueFd> reply_fds;
    auto reply = call<shm::AttachReply>(attach, fds, &reply_fds);
    if (!reply) return propagate(reply);
    auto mapped = shm::Segment::map(std::move(reply_fds.at(0)));
    if (!mapped) return propagate(mapped);
    segment.emplace(std::move(*mapped));
    producer.ring = segment->ring(0);
    return {};
  }
  Result<std::uint16_t> add_buffer(std::uint64_t bytes) {
    buffer.emplace(shm::BufferFile::create("test", bytes).value());
    const int fds[] = {buffer->fd()};
    auto reply = call<shm::RegisterBufferReply>(shm::RegisterBuffer{bytes, "test"}, fds);
    if (!reply) return propagate(reply);
    return reply->handle;
  }

  std::optional<shm::Segment> segment;
  std::optional<shm::BufferFile> buffer;
  shm::RingProducer producer;

 private:
  shm::FrameSocket socket_;
  std::uint64_t requests_ = 0;
  std::deque<shm::Frame> unasked_;
};

/// Waits, up to a minute, until `done`.
template <class Done>
bool eventually(Done done) {
  for (const auto deadline = in_time(); std::chrono::steady_clock::now() < deadline;) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return done();
}

}  // namespace mk::daemon::test
