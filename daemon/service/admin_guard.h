/// \file
/// Rights before the Admin service, and the record of who changed what. Every call passes here
/// first. Those that change the daemon need the right to, and leave one line in the log, whether
/// they were let through or not. A call that this file does not list does not exist.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "daemon/service/log.h"
#include "daemon/service/unix_gate.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace mk::daemon {

struct AdminRights {
  enum class Change {
    kNobody,
    kEverybody,    ///< who can connect: the gate has looked already
    kCertificate,  ///< who shows a certificate with one of the names in `writers`
  } change = Change::kNobody;
  std::vector<std::string> writers;
  std::string instead;  ///< for users who lack the right: where they would have it
};

class AdminGuard {
 public:
  /// `inner` is a v1::Admin::Service; it, `book` and `logger` outlive this.
  AdminGuard(grpc::Service& inner, AdminRights rights, const ConnectionBook& book, Logger& logger);
  ~AdminGuard();
  grpc::Service& service();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
