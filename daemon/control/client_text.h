/// \file
/// The texts in clients' messages: what others get to see of them is text.
#pragma once

#include <string_view>

#include "shm/host/protocol.h"
#include "shm/host/text.h"
#include "shm/limits.h"

namespace mk::daemon::control {

/// Names reach other daemons, the log, JSON and other ranks' errors.
inline Status check_name(const char* what, std::string_view name) {
  if (shm::is_plain_text(name)) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{} '{}' is not UTF-8, or has control characters; choose another one", what,
              shm::plain_text(name, 4 * shm::kNameBytesMax));
}
template <class Message>
Status check_text(const Message&) {
  return {};  // no text, or one that its handler checks more strictly
}
inline Status check_text(const shm::Hello& hello) {
  return check_name("the client's version", hello.client_version);
}
inline Status check_text(const shm::RegisterBuffer& message) {
  return check_name("a buffer's name", message.name);
}
inline Status check_text(const shm::RegisterDeviceBuffer& message) {
  return check_name("a buffer's name", message.name);
}
inline Status check_text(const shm::RegisterDmabuf& message) { return check_text(message.buffer); }
inline Status check_text(const shm::Exchange& message) {
  return check_name("an exchange's tag", message.tag);
}

}  // namespace mk::daemon::control
