/// \file
/// What loopback endpoints say to each other, and the asking end of a connection between them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "daemon/fabric/blob.h"
#include "shm/host/unix_socket.h"

namespace mk::fabric::loopback {

/// Messages between loopback endpoints. Hello carries an Address (whom the sender expects),
/// GetRegion a Key. The answer is Welcome (empty), Region (the Key again, with the memory file; of
/// a GPU, the Key and a gpu::MemoryKey) or Refused (an error code in 4 bytes, then a sentence),
/// under the question's request number.
enum class Message : std::uint16_t { kHello = 1, kWelcome, kGetRegion, kRegion, kRefused };

/// The socket of an endpoint, in the abstract namespace.
std::string socket_name(const Token& endpoint);

/// The payload of Refused.
Bytes refusal(const Error& error);
/// The error back; nullopt when the payload is no refusal.
std::optional<Error> from_refusal(std::span<const std::byte> payload);

/// The asking end of a connection to a peer's service: one question at a time, each under a number
/// of its own, so that no answer is ever taken for the answer to another question. Control thread.
class Connection {
 public:
  explicit Connection(shm::FrameSocket socket) : socket_(std::move(socket)) {}

  /// Asks and waits for the answer. A refusal is returned as the error it carries, and the
  /// connection stays in use. After every other error (kTimeout, kProtocol, kUnavailable for the
  /// end of the stream) it is closed, and later questions fail at once with kLinkDown.
  Result<shm::Frame> ask(Message question, std::span<const std::byte> payload, Message answer,
                         std::chrono::steady_clock::time_point deadline);
  bool usable() const { return usable_; }
  /// Both ends see the end of the stream; what was on its way is lost.
  void close();
  /// `close`, and gives the descriptor back; nobody may watch it any more.
  void release();
  int fd() const { return socket_.fd(); }
  Result<shm::PeerCredentials> credentials() const { return socket_.credentials(); }

 private:
  Result<shm::Frame> exchange(Message question, std::span<const std::byte> payload, Message answer,
                              std::chrono::steady_clock::time_point deadline);

  shm::FrameSocket socket_;
  std::uint64_t asked_ = 0;  ///< the number of the last question
  bool usable_ = true;
};

}  // namespace mk::fabric::loopback
