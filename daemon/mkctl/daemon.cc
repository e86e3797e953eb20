#include "daemon/mkctl/daemon.h"

#include <fmt/format.h>

#include "daemon/config/units.h"

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

Answer Daemon::explain(const grpc::Status& status) const {
  const std::string where = target_.address.text();
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED: {
      const bool late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
      const auto patience = static_cast<std::uint64_t>(target_.timeout.count());
      return error_answer(
          kExitUnreachable,
          fmt::format("no answer from {}: {}; is mkerneld running there? (--address)", where,
                      late ? fmt::format("none within {}", daemon::format_duration(patience))
                           : status.error_message()));
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
