/// \file
/// Socket paths as addresses; shared by connecting and listening.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "shm/host/result.h"

namespace mk::shm {

struct UnixAddress {
  sockaddr_un address{};
  socklen_t bytes = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

inline bool is_abstract(const std::string& path) { return path.starts_with('@'); }

/// A path starting with '@' is a name in the abstract namespace: no file, gone with its last
/// holder.
inline Result<UnixAddress> unix_address(const std::string& path) {
  UnixAddress result;
  result.address.sun_family = AF_UNIX;
  constexpr std::size_t kPathBytesMax = sizeof result.address.sun_path - 1;
  if (path.empty() || path == "@" || path.size() > kPathBytesMax || path.find('\0') != path.npos) {
    return fail(ErrorCode::kInvalidArgument,
                "'{}' is no socket path: it takes 1 to {} bytes, or '@' and a name", path,
                kPathBytesMax);
  }
  std::memcpy(result.address.sun_path, path.data(), path.size());
  if (is_abstract(path)) result.address.sun_path[0] = '\0';
  // An abstract name ends where its length says; a file's name ends at the zero, which counts.
  result.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() +
                                        (is_abstract(path) ? 0 : 1));
  return result;
}

}  // namespace mk::shm
