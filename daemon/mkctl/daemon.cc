#include "daemon/mkctl/daemon.h"

#include <fmt/format.h>

#include <algorithm>

#include "daemon/config/units.h"
#include "daemon/tls/handshake.h"

namespace mk::mkctl {

Daemon::Daemon(Target target)
    : target_(std::move(target)),
      stub_(v1::Admin::NewStub(daemon::open_channel(target_.address, target_.channel))) {}

std::unique_ptr<Daemon> Daemon::beside(daemon::Address address) const {
  Target other = target_;
  other.name = address.text();
  other.channel.tls_name.clear();
  other.address = std::move(address);
  return std::make_unique<Daemon>(std::move(other));
}

namespace {

/// The cause at the end of gRPC's chain of messages: "Connection refused".
std::string plain_reason(const std::string& message) {
  const bool name = message.starts_with("DNS resolution failed");
  if (!name && !message.starts_with("failed to connect to all addresses")) return message;
  const std::size_t colon = message.rfind(": ");
  std::string cause = colon == message.npos ? message : message.substr(colon + 2);
  return name ? "its name cannot be looked up: " + cause : cause;
}

/// The reason why TLS fails between this program and the daemon there; empty: none, or nobody
/// is there.
std::string tls_trouble(const Target& target) {
  const daemon::TlsTexts& tls = target.channel.tls;
  if (!tls.enabled() || target.address.unix_socket) return "";
  const daemon::TlsFiles own{"tls", tls.cert_path, tls.key_path, tls.ca_path, {}, false};
  std::string text;
  const daemon::TlsContents contents = daemon::read_contents(own);
  for (const daemon::TlsFault& fault : daemon::look_at(own, contents, daemon::unix_now()).faults) {
    if (fault.dead()) return fault.text;
    text += fault.text + "; ";
  }
  constexpr std::chrono::milliseconds kPatience(2000);
  const auto patience =
      std::min(kPatience, std::chrono::duration_cast<std::chrono::milliseconds>(target.timeout));
  const auto connection = daemon::connect_to(target.address, patience);
  if (!connection) return "";
  const std::string& name = target.channel.tls_name;
  const Status met = daemon::try_handshake(own, contents, *connection,
                                           name.empty() ? target.address.host : name, patience);
  if (met || met.error().code != ErrorCode::kPermission) return "";
  return text + "of the daemon: " + met.error().message;
}

/// What to do about a connection that somebody took and then ended: it is most likely TLS on one
/// side alone. Else nothing.
std::string about_tls(const Target& target, const std::string& why) {
  if (target.address.unix_socket) return "";
  const bool ended = why.find("Socket closed") != why.npos ||
                     why.find("Connection reset") != why.npos || why.find("GOAWAY") != why.npos;
  if (!target.channel.tls.enabled() && ended) {
    return "a daemon is there and wants TLS, most likely: name the files of its [tls] by --config, "
           "or by --tls-cert, --tls-key and --tls-ca";
  }
  if (target.channel.tls.enabled() && why.find("WRONG_VERSION_NUMBER") != why.npos) {
    return "the daemon there has no [tls], most likely: leave out --tls-cert, --tls-key and "
           "--tls-ca";
  }
  return "";
}

}  // namespace

Answer Daemon::explain(const grpc::Status& status) const {
  const std::string where = target_.address.text();
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED: {
      if (const std::string trouble = tls_trouble(target_); !trouble.empty()) {
        return error_answer(kExitUnreachable,
                            fmt::format("no answer from {}, since TLS fails: {}", where, trouble));
      }
      const bool late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
      const auto patience = static_cast<std::uint64_t>(target_.timeout.count());
      const std::string why = late
                                  ? fmt::format("none within {}", daemon::format_duration(patience))
                                  : plain_reason(status.error_message());
      const std::string tls = about_tls(target_, status.error_message());
      return error_answer(kExitUnreachable,
                          fmt::format("no answer from {}: {}; {}", where, why,
                                      tls.empty() ? "is mkerneld running there (systemctl status "
                                                    "mkerneld)? --address names another one"
                                                  : tls));
    }
    case grpc::StatusCode::UNIMPLEMENTED:
      return error_answer(
          kExitUnreachable,
          fmt::format("{} is not a mkerneld of this version or does not support this request: {}",
                      where, status.error_message()));
    default:
      return error_answer(kExitUnhealthy,
                          fmt::format("{} refused: {}", where, status.error_message()));
  }
}

}  // namespace mk::mkctl
