#include "daemon/fabric/loopback/connection.h"

#include <cstring>
#include <utility>

namespace mk::fabric::loopback {

std::string socket_name(const Token& endpoint) {
  return "@mkernel-loopback-" + token_text(endpoint);
}

Bytes refusal(const Error& error) {
  Bytes payload(sizeof(std::uint32_t) + error.message.size());
  const auto code = static_cast<std::uint32_t>(error.code);
  std::memcpy(payload.data(), &code, sizeof(code));
  std::memcpy(payload.data() + sizeof(code), error.message.data(), error.message.size());
  return payload;
}

std::optional<Error> from_refusal(std::span<const std::byte> payload) {
  std::uint32_t number = 0;
  if (payload.size() < sizeof(number)) return std::nullopt;
  std::memcpy(&number, payload.data(), sizeof(number));
  payload = payload.subspan(sizeof(number));
  // "No error" is no refusal; a code of a later version is one.
  if (number == 0) return std::nullopt;
  if (number > static_cast<std::uint32_t>(ErrorCode::kInternal))
    number = static_cast<std::uint32_t>(ErrorCode::kProtocol);
  return Error{static_cast<ErrorCode>(number),
               std::string(reinterpret_cast<const char*>(payload.data()), payload.size())};
}

Result<shm::Frame> Connection::ask(Message question, std::span<const std::byte> payload,
                                   Message answer, std::chrono::steady_clock::time_point deadline) {
  if (!usable_) {
    return fail(ErrorCode::kLinkDown, "the connection was closed after an earlier question");
  }
  auto frame = exchange(question, payload, answer, deadline);
  if (!frame) {
    close();
    return frame;
  }
  if (frame->type != static_cast<std::uint16_t>(Message::kRefused)) return frame;
  auto error = from_refusal(frame->payload);
  if (!error) {
    close();
    return fail(ErrorCode::kProtocol, "the peer refused question {} without saying why",
                static_cast<int>(question));
  }
  return tl::unexpected<Error>(std::move(*error));
}

Result<shm::Frame> Connection::exchange(Message question, std::span<const std::byte> payload,
                                        Message answer,
                                        std::chrono::steady_clock::time_point deadline) {
  const std::uint64_t request = ++asked_;
  MK_RETURN_IF_ERROR(
      socket_.send(static_cast<std::uint16_t>(question), request, payload, {}, deadline));
  for (;;) {
    MK_ASSIGN_OR_RETURN(shm::Frame frame, socket_.receive(deadline));
    if (frame.request == request) {
      if (frame.type != static_cast<std::uint16_t>(answer) &&
          frame.type != static_cast<std::uint16_t>(Message::kRefused)) {
        return fail(ErrorCode::kProtocol, "the peer answered question {} with message {}",
                    static_cast<int>(question), frame.type);
      }
      return frame;
    }
    if (frame.request == 0 || frame.request > request) {
      return fail(ErrorCode::kProtocol, "the peer answered request {}, which was not made",
                  frame.request);
    }
    // An answer to an earlier question. Nobody waits for it; its descriptors close with the frame.
    if (std::chrono::steady_clock::now() >= deadline) {
      return fail(ErrorCode::kTimeout, "the peer sends answers to other questions only");
    }
  }
}

void Connection::close() {
  usable_ = false;
  socket_.shutdown();
}

void Connection::release() {
  close();
  socket_ = shm::FrameSocket(UniqueFd());
}

}  // namespace mk::fabric::loopback
