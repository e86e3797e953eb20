#include "daemon/config/address.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include <charconv>

namespace mk::daemon {
namespace {

constexpr std::string_view kUnixPrefix = "unix:";
constexpr std::size_t kHostBytesMax = 253;
constexpr std::size_t kPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;

Result<Address> parse_unix(std::string_view path) {
  while (path.starts_with("//")) path.remove_prefix(1);  // unix:///run/x is gRPC's other spelling
  if (!path.starts_with('/') || path.size() > kPathBytesMax) {
    return fail(ErrorCode::kInvalidArgument,
                "the path after \"unix:\" must be absolute and of at most {} bytes", kPathBytesMax);
  }
  Address address;
  address.unix_socket = true;
  address.path = path;
  return address;
}

}  // namespace

bool Address::local() const {
  in_addr numeric{};
  return unix_socket || host == "localhost" || host == "::1" ||
         (host.starts_with("127.") && ::inet_pton(AF_INET, host.c_str(), &numeric) == 1);
}

std::string Address::text() const {
  if (unix_socket) return "unix:" + path;
  const bool brackets = host.find(':') != std::string::npos;
  return fmt::format("{}{}{}:{}", brackets ? "[" : "", host, brackets ? "]" : "", port);
}

Result<Address> parse_address(std::string_view text, bool allow_port_0) {
  if (text.starts_with(kUnixPrefix)) return parse_unix(text.substr(kUnixPrefix.size()));
  const auto refuse = [&] {
    return fail(ErrorCode::kInvalidArgument,
                "\"host:port\", \"[ipv6]:port\" or \"unix:/path\" is expected, with a port of {} "
                "to 65535",
                allow_port_0 ? 0 : 1);
  };
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return refuse();
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  const bool brackets = host.starts_with('[') && host.ends_with(']');
  if (brackets) host = host.substr(1, host.size() - 2);
  if (host.empty() || (!brackets && host.find(':') != std::string_view::npos)) return refuse();
  if (host.find_first_of(" \t/[]") != std::string_view::npos) return refuse();

  Address address;
  address.host = host;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error != std::errc{} || end != port.data() + port.size()) return refuse();
  if (address.port == 0 && !allow_port_0) return refuse();
  return address;
}

Result<DnsQuestion> parse_dns_question(std::string_view text) {
  DnsQuestion question;
  const bool service = text.starts_with('_');
  if (service) {
    question.name = text;
  } else {
    const auto address = parse_address(text, false);
    if (address && !address->unix_socket) question = {address->host, address->port};
  }
  if (question.name.empty() || question.name.size() > kHostBytesMax ||
      question.name.find_first_of(" \t/:") != std::string::npos) {
    return fail(ErrorCode::kInvalidArgument,
                "a host name with a port (\"mkernel.cluster:7171\") or a service "
                "(\"_peer._tcp.mkernel.cluster\") is expected");
  }
  return question;
}

}  // namespace mk::daemon
