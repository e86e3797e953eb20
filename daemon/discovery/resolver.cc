#include "daemon/discovery/resolver.h"

#include <arpa/inet.h>
#include <arpa/nameser.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>

#include <algorithm>
#include <optional>

namespace mk::daemon {
namespace {

constexpr std::size_t kAnswerBytesMax = 64 * 1024;

/// One state of libresolv: its own copy of /etc/resolv.conf, read anew for every question.
class Resolver {
 public:
  Resolver() = default;
  ~Resolver() {
    if (ready_) ::res_nclose(&state_);
  }
  Resolver(const Resolver&) = delete;
  Resolver& operator=(const Resolver&) = delete;

  Status open(const std::string& server) {
    if (::res_ninit(&state_) != 0) return fail(ErrorCode::kSystem, "cannot read /etc/resolv.conf");
    ready_ = true;
    // A look that fails is repeated soon: rather an error than a long wait.
    state_.retrans = 1;
    state_.retry = 2;
    if (server.empty()) return {};
    MK_ASSIGN_OR_RETURN(const Address address, parse_address(server, false));
    sockaddr_in& place = state_.nsaddr_list[0];
    place = {};
    place.sin_family = AF_INET;
    place.sin_port = htons(address.port);
    if (::inet_pton(AF_INET, address.host.c_str(), &place.sin_addr) != 1) {
      return fail(ErrorCode::kInvalidArgument, "a name server's IPv4 address is expected, not '{}'",
                  server);
    }
    state_.nscount = 1;
    return {};
  }

  /// Calls `take(record, message)` for every answer of this type.
  template <class Take>
  Status ask(const std::string& name, ns_type type, Take&& take) {
    const int bytes = ::res_nsearch(&state_, name.c_str(), ns_c_in, type, answer_.data(),
                                    static_cast<int>(answer_.size()));
    if (bytes < 0) {
      if (state_.res_h_errno == HOST_NOT_FOUND || state_.res_h_errno == NO_DATA) return {};
      return fail(ErrorCode::kUnavailable, "no name server answered for {}: {}", name,
                  ::hstrerror(state_.res_h_errno));
    }
    ns_msg message;
    const auto used = std::min(static_cast<std::size_t>(bytes), answer_.size());
    if (::ns_initparse(answer_.data(), static_cast<int>(used), &message) != 0) {
      return fail(ErrorCode::kProtocol, "the name server's answer for {} is malformed", name);
    }
    for (int i = 0; i < ns_msg_count(message, ns_s_an); ++i) {
      ns_rr record;
      if (::ns_parserr(&message, ns_s_an, i, &record) != 0) {
        return fail(ErrorCode::kProtocol, "the name server's answer for {} is malformed", name);
      }
      if (ns_rr_type(record) == type) take(record, message);
    }
    return {};
  }

 private:
  struct __res_state state_ {};
  bool ready_ = false;
  std::vector<unsigned char> answer_ = std::vector<unsigned char>(kAnswerBytesMax);
};

template <int kFamily, std::size_t kBytes>
void add_host(const ns_rr& record, const DnsQuestion& question, std::vector<DnsAnswer>& answers) {
  char text[INET6_ADDRSTRLEN] = "";
  if (ns_rr_rdlen(record) != kBytes) return;
  if (::inet_ntop(kFamily, ns_rr_rdata(record), text, sizeof text) == nullptr) return;
  answers.push_back({{.host = text, .port = question.port}, question.name});
}

Status ask_host(Resolver& resolver, const DnsQuestion& host, std::vector<DnsAnswer>& answers) {
  MK_RETURN_IF_ERROR(resolver.ask(host.name, ns_t_a, [&](const ns_rr& record, const ns_msg&) {
    add_host<AF_INET, NS_INADDRSZ>(record, host, answers);
  }));
  return resolver.ask(host.name, ns_t_aaaa, [&](const ns_rr& record, const ns_msg&) {
    add_host<AF_INET6, NS_IN6ADDRSZ>(record, host, answers);
  });
}

/// The host and port of an SRV record (RFC 2782: priority, weight, port, target).
std::optional<DnsQuestion> target_of(const ns_rr& record, const ns_msg& message) {
  constexpr int kFixedBytes = 6;
  if (ns_rr_rdlen(record) <= kFixedBytes) return {};
  const unsigned char* data = ns_rr_rdata(record);
  char name[NS_MAXDNAME] = "";
  if (::ns_name_uncompress(ns_msg_base(message), ns_msg_end(message), data + kFixedBytes, name,
                           sizeof name) < 0) {
    return {};
  }
  const auto port = static_cast<std::uint16_t>(ns_get16(data + 4));
  if (port == 0 || *name == '\0') return {};  // ".": decidedly not available here
  return DnsQuestion{name, port};
}

}  // namespace

Result<std::vector<DnsAnswer>> resolve(const DnsQuestion& question, const std::string& server) {
  Resolver resolver;
  MK_RETURN_IF_ERROR(resolver.open(server));
  std::vector<DnsQuestion> hosts;
  if (question.service()) {
    MK_RETURN_IF_ERROR(
        resolver.ask(question.name, ns_t_srv, [&](const ns_rr& record, const ns_msg& message) {
          if (auto host = target_of(record, message)) hosts.push_back(std::move(*host));
        }));
  } else {
    hosts.push_back(question);
  }
  std::vector<DnsAnswer> answers;
  for (const DnsQuestion& host : hosts) {
    MK_RETURN_IF_ERROR(ask_host(resolver, host, answers));
  }
  std::sort(answers.begin(), answers.end(), [](const DnsAnswer& a, const DnsAnswer& b) {
    return a.address.text() < b.address.text();
  });
  const auto repeated = std::unique(
      answers.begin(), answers.end(),
      [](const DnsAnswer& a, const DnsAnswer& b) { return a.address.text() == b.address.text(); });
  answers.erase(repeated, answers.end());
  return answers;
}

}  // namespace mk::daemon
