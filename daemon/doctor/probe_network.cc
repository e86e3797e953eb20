#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>

#include "daemon/doctor/probe.h"
#include "shm/host/protocol.h"
#include "shm/host/unique_fd.h"
#include "shm/host/unix_socket.h"
#include "shm/layout.h"

namespace mk::doctor {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience(2000);

/// Connects and hangs up: whether anybody listens.
Status try_connect(const sockaddr* address, socklen_t bytes) {
  const UniqueFd fd(::socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return fail_errno(errno, "no socket");
  if (::connect(fd.get(), address, bytes) == 0) return {};
  if (errno != EINPROGRESS) return fail(ErrorCode::kUnavailable, "{}", errno_text(errno));
  pollfd waiting{fd.get(), POLLOUT, 0};
  if (::poll(&waiting, 1, static_cast<int>(kPatience.count())) != 1) {
    return fail(ErrorCode::kTimeout, "no answer within {} s",
                static_cast<double>(kPatience.count()) / 1e3);
  }
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return fail(ErrorCode::kUnavailable, "{}", errno_text(error));
  return {};
}

Status try_address(const daemon::Address& address) {
  if (address.unix_socket) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    if (address.path.size() >= sizeof name.sun_path)
      return fail(ErrorCode::kInvalidArgument, "its path is too long");
    std::memcpy(name.sun_path, address.path.data(), address.path.size());
    if (!address.path.empty() && address.path.front() == '@') name.sun_path[0] = '\0';
    return try_connect(
        reinterpret_cast<const sockaddr*>(&name),
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.path.size()));
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) {
    return fail(ErrorCode::kNotFound, "its name is not known here: {}", ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, ::freeaddrinfo);
  Status last = fail(ErrorCode::kNotFound, "its name has no address");
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    last = try_connect(one->ai_addr, one->ai_addrlen);
    if (last) break;
  }
  return last;
}

/// What the daemon answers to a client's first message.
Result<shm::HelloReply> greet(const std::string& socket) {
  MK_ASSIGN_OR_RETURN(auto connection, shm::FrameSocket::connect(socket, kPatience));
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  shm::Hello hello;
  hello.abi_major = shm::kAbiMajor;
  hello.abi_minor = shm::kAbiMinor;
  hello.client_version = "doctor";
  MK_RETURN_IF_ERROR(connection.send(static_cast<std::uint16_t>(shm::Hello::kType), 1,
                                     shm::encode_message(hello), {}, deadline));
  MK_ASSIGN_OR_RETURN(const shm::Frame answer, connection.receive(deadline));
  if (answer.type == static_cast<std::uint16_t>(shm::MessageType::kError)) {
    MK_ASSIGN_OR_RETURN(const shm::ErrorReply error,
                        shm::decode_message<shm::ErrorReply>(answer.payload));
    return tl::unexpected<Error>(Error{error.code, error.message});
  }
  if (answer.type != static_cast<std::uint16_t>(shm::HelloReply::kType))
    return fail(ErrorCode::kProtocol, "who answers there is no mkerneld");
  return shm::decode_message<shm::HelloReply>(answer.payload);
}

}  // namespace

void probe_daemon(const daemon::Config& config, Facts& facts) {
  facts.abi_major = shm::kAbiMajor;
  facts.abi_minor = shm::kAbiMinor;
  facts.daemon.socket = config.socket.path;
  const auto reply = greet(config.socket.path);
  if (!reply) {
    facts.daemon.trouble = reply.error().message;
    return;
  }
  facts.daemon.version = reply->daemon_version;
  facts.daemon.abi_major = reply->abi_major;
  facts.daemon.abi_minor = reply->abi_minor;
}

void probe_peers(const daemon::Config& config, const FindNodes& find, Facts& facts) {
  std::vector<daemon::Sighting> nodes;
  for (const daemon::PeerConfig& peer : config.peers) nodes.push_back({peer.id, peer.address});
  if (find && config.discovery.kind != "static") {
    const auto found = find(config);
    if (found) {
      nodes = *found;
    } else {
      facts.discovery_trouble =
          fmt::format("discovery ({}): {}", config.discovery.kind, found.error().message);
    }
  }
  // All at once: the patience with one is the patience with all.
  std::vector<std::future<Status>> attempts;
  for (const daemon::Sighting& node : nodes) {
    attempts.push_back(std::async(std::launch::async, [&node]() -> Status {
      if (!node.trouble.empty()) return fail(ErrorCode::kUnsupported, "{}", node.trouble);
      MK_RETURN_IF_ERROR(try_address(node.address));
      if (node.node) return {};
      return fail(ErrorCode::kUnavailable,
                  "accepts connections, but has not said which node it is");
    }));
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Status reached = attempts[i].get();
    facts.peers.push_back({nodes[i].node, nodes[i].address.text(),
                           reached ? std::string() : reached.error().message});
  }
}

}  // namespace mk::doctor
