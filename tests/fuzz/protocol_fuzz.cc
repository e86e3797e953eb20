// The client socket as the daemon reads it: any bytes, in any pieces, as frames; each frame's
// payload as the message of its type. What decodes must encode to the same bytes.
#include <sys/socket.h>

#include <cstdlib>

#include "shm/host/protocol.h"
#include "shm/host/unix_socket.h"

namespace mk::shm {
namespace {

template <class Message>
void take(const Frame& frame) {
  if (frame.type != static_cast<std::uint16_t>(Message::kType)) return;
  const auto message = decode_message<Message>(frame.payload);
  if (message && encode_message(*message) != frame.payload) std::abort();
}

void take_any(const Frame& frame) {
  take<ErrorReply>(frame);
  take<Hello>(frame);
  take<HelloReply>(frame);
  take<Attach>(frame);
  take<AttachReply>(frame);
  take<JobUp>(frame);
  take<RegisterBuffer>(frame);
  take<RegisterBufferReply>(frame);
  take<DeregisterBuffer>(frame);
  take<AllocFlags>(frame);
  take<AllocFlagsReply>(frame);
  take<Exchange>(frame);
  take<ExchangeReply>(frame);
  take<OpenPeerBuffer>(frame);
  take<OpenPeerBufferReply>(frame);
  take<Detach>(frame);
  take<Done>(frame);
  take<SessionFailed>(frame);
  take<RegisterDeviceBuffer>(frame);
  take<RegisterDmabuf>(frame);
  take<Retire>(frame);
  take<LaunchBegins>(frame);
  (void)message_type_name(frame.type);
}

/// Reads what is there; false at the end of the connection.
bool read_frames(FrameSocket& socket) {
  while (true) {
    const auto frame = socket.try_receive();
    if (!frame) return false;
    if (!*frame) return true;
    take_any(**frame);
  }
}

void run(const std::uint8_t* data, std::size_t bytes) {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) std::abort();
  FrameSocket reader{UniqueFd(fds[0])};
  const UniqueFd writer(fds[1]);
  const std::size_t piece = bytes == 0 ? 1 : 1 + data[0];
  for (std::size_t at = 1; at < bytes;) {
    const ssize_t sent =
        ::send(writer.get(), data + at, std::min(piece, bytes - at), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0 || !read_frames(reader)) return;
    at += static_cast<std::size_t>(sent);
  }
}

}  // namespace
}  // namespace mk::shm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  mk::shm::run(data, bytes);
  return 0;
}
