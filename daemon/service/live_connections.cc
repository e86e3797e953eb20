#include "daemon/service/live_connections.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "shm/host/unique_fd.h"

namespace mk::daemon {
namespace {

/// The socket's number in the kernel; 0: there is none.
ino_t socket_of(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return 0;
  return status.st_ino;
}

}  // namespace

LiveConnections::Counts LiveConnections::count(const std::string& owner) {
  std::erase_if(entries_, [](const Entry& entry) { return socket_of(entry.fd) != entry.socket; });
  Counts counts;
  for (const Entry& entry : entries_) {
    const bool owned = entry.owner == owner, is_young = young(entry);
    ++counts.all;
    counts.of_owner += owned;
    counts.young += is_young;
    counts.young_of_owner += owned && is_young;
  }
  return counts;
}

void LiveConnections::add(int fd, const std::string& owner, const std::string& remote) {
  entries_.push_back({fd, socket_of(fd), owner, remote, Clock::now()});
}

std::vector<std::string> LiveConnections::last_heard() const {
  std::vector<std::string> remotes;
  std::uint32_t least_ms = std::numeric_limits<std::uint32_t>::max();
  for (const Entry& entry : entries_) {
    if (!young(entry)) continue;
    tcp_info info{};
    socklen_t bytes = sizeof info;
    if (::getsockopt(entry.fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) continue;
    // After that, the answer was this connection's.
    if (socket_of(entry.fd) != entry.socket || info.tcpi_last_data_recv > least_ms) continue;
    if (info.tcpi_last_data_recv < least_ms) remotes.clear();
    least_ms = info.tcpi_last_data_recv;
    remotes.push_back(entry.remote);
  }
  return remotes;
}

bool LiveConnections::cut_oldest_young(const std::string& owner) {
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if ((!owner.empty() && entry->owner != owner) || !young(*entry)) continue;
    // gRPC may close it at this very moment, and the number become another file's.
    const UniqueFd held(::fcntl(entry->fd, F_DUPFD_CLOEXEC, 0));
    const bool same = held.valid() && socket_of(held.get()) == entry->socket;
    if (same) ::shutdown(held.get(), SHUT_RDWR);
    entries_.erase(entry);
    if (same) return true;
    return cut_oldest_young(owner);
  }
  return false;
}

}  // namespace mk::daemon
