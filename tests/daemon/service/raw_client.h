// One rank, attached by hand over the daemon's client socket.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "shm/host/protocol.h"
#include "shm/host/unix_socket.h"
#include "shm/layout.h"
#include "tests/daemon/service/temp_folder.h"

namespace mk::daemon {

class RawClient {
 public:
  /// Attaches as the only rank of `job`; the error is the daemon's.
  static Result<RawClient> attach(const std::string& socket, const std::string& job) {
    MK_ASSIGN_OR_RETURN(auto connection,
                        shm::FrameSocket::connect(socket, std::chrono::seconds(20)));
    RawClient client(std::move(connection));
    shm::Hello hello;
    hello.abi_major = shm::kAbiMajor;
    hello.abi_minor = shm::kAbiMinor;
    hello.client_version = "test";
    MK_RETURN_IF_ERROR(client.ask(hello, 1));
    shm::Attach attach;
    attach.job = job;
    MK_RETURN_IF_ERROR(client.ask(attach, 2));
    return client;
  }
  /// Waits for the next message of this type; whether it came.
  bool wait_for(shm::MessageType type) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (;;) {
      const auto frame = socket_.receive(deadline);
      if (!frame) return false;
      if (frame->type == static_cast<std::uint16_t>(type)) return true;
    }
  }

 private:
  explicit RawClient(shm::FrameSocket socket) : socket_(std::move(socket)) {}

  template <class Message>
  Status ask(const Message& message, std::uint64_t request) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    MK_RETURN_IF_ERROR(socket_.send(static_cast<std::uint16_t>(Message::kType), request,
                                    shm::encode_message(message), {}, deadline));
    MK_ASSIGN_OR_RETURN(const auto reply, socket_.receive(deadline));
    if (reply.type != static_cast<std::uint16_t>(shm::MessageType::kError)) return {};
    MK_ASSIGN_OR_RETURN(const auto error, shm::decode_message<shm::ErrorReply>(reply.payload));
    return fail(error.code, "{}", error.message);
  }

  shm::FrameSocket socket_;
};

}  // namespace mk::daemon
