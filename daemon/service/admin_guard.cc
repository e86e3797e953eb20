#include "daemon/service/admin_guard.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <string_view>

#include "daemon/rpc/grpc_channel.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"

namespace mk::daemon {

namespace v1 = ::mkernel::v1;

namespace {

constexpr std::size_t kRequestTextBytesMax = 512;  ///< of a request in the log

}  // namespace

class AdminGuard::Impl final : public v1::Admin::Service {
 public:
  Impl(v1::Admin::Service& inner, AdminRights rights, const ConnectionBook& book, Logger& logger)
      : inner_(inner), rights_(std::move(rights)), book_(book), logger_(logger) {}

  // Who may connect may look.
#define MK_ADMIN_LOOK(Method)                                                           \
  grpc::Status Method(grpc::ServerContext* context, const v1::Method##Request* request, \
                      v1::Method##Response* response) override {                        \
    return inner_.Method(context, request, response);                                   \
  }
  MK_ADMIN_LOOK(GetVersion)
  MK_ADMIN_LOOK(GetStatus)
  MK_ADMIN_LOOK(ListSessions)
  MK_ADMIN_LOOK(ListQueues)
  MK_ADMIN_LOOK(ListLinks)
  MK_ADMIN_LOOK(ListJobs)
  MK_ADMIN_LOOK(GetConfig)
#undef MK_ADMIN_LOOK
  grpc::Status WatchStats(grpc::ServerContext* context, const v1::WatchStatsRequest* request,
                          grpc::ServerWriter<v1::StatsSample>* writer) override {
    return inner_.WatchStats(context, request, writer);
  }
  grpc::Status WatchMetrics(grpc::ServerContext* context, const v1::WatchMetricsRequest* request,
                            grpc::ServerWriter<v1::MetricsSample>* writer) override {
    return inner_.WatchMetrics(context, request, writer);
  }
  grpc::Status RecordTrace(grpc::ServerContext* context, const v1::RecordTraceRequest* request,
                           grpc::ServerWriter<v1::TraceChunk>* writer) override {
    return inner_.RecordTrace(context, request, writer);
  }

#define MK_ADMIN_CHANGE(Method)                                                         \
  grpc::Status Method(grpc::ServerContext* context, const v1::Method##Request* request, \
                      v1::Method##Response* response) override {                        \
    return change(*context, #Method, *request,                                          \
                  [&] { return inner_.Method(context, request, response); });           \
  }
  MK_ADMIN_CHANGE(Drain)
  MK_ADMIN_CHANGE(Resume)
  MK_ADMIN_CHANGE(TerminateJob)
  MK_ADMIN_CHANGE(SetJob)
#undef MK_ADMIN_CHANGE

 private:
  template <class Act>
  grpc::Status change(const grpc::ServerContext& context, const char* method,
                      const google::protobuf::Message& request, Act&& act) {
    const std::vector<std::string> names = certificate_names(*context.auth_context());
    std::string who = names.empty() ? book_.who(context.peer())
                                    : fmt::format("certificate '{}' at {}",
                                                  fmt::join(names, "', '"), context.peer());
    if (who.empty()) who = context.peer();
    std::string what = request.ShortDebugString();
    if (!what.empty()) what = fmt::format(" {}", what.substr(0, kRequestTextBytesMax));
    if (!may_change(names)) {
      const std::string text = fmt::format(
          "{} changes the daemon, and {} may only look at it here{}", method, who, rights_.instead);
      logger_.audit_refused(caller(names, context.peer()), method,
                            fmt::format("audit: refused {}{} to {}", method, what, who),
                            fields(method, who, "refused"));
      return {grpc::StatusCode::PERMISSION_DENIED, text};
    }
    const grpc::Status status = act();
    const std::string result = status.ok() ? "done" : status.error_message();
    logger_.audit(fmt::format("audit: {}{} by {}: {}", method, what, who, result),
                  fields(method, who, status.ok() ? "done" : "failed"));
    return status;
  }

  /// Whose budget of refusals it is: the same for all connections of one caller.
  std::string caller(const std::vector<std::string>& names, const std::string& peer) const {
    if (!names.empty()) return names.front();
    if (const auto uid = book_.uid_of(peer)) return fmt::format("uid {}", *uid);
    return peer.substr(0, peer.rfind(':'));  // without the port
  }

  bool may_change(const std::vector<std::string>& names) const {
    switch (rights_.change) {
      case AdminRights::Change::kNobody:
        return false;
      case AdminRights::Change::kEverybody:
        return true;
      case AdminRights::Change::kCertificate:
        return std::any_of(rights_.writers.begin(), rights_.writers.end(),
                           [&](const std::string& writer) { return names_match(names, writer); });
    }
    return false;
  }

  static std::vector<std::pair<std::string, std::string>> fields(const char* method,
                                                                 const std::string& who,
                                                                 const char* result) {
    return {{"audit", method}, {"who", who}, {"result", result}};
  }

  v1::Admin::Service& inner_;
  const AdminRights rights_;
  const ConnectionBook& book_;
  Logger& logger_;
};

AdminGuard::AdminGuard(grpc::Service& inner, AdminRights rights, const ConnectionBook& book,
                       Logger& logger)
    : impl_(std::make_unique<Impl>(dynamic_cast<v1::Admin::Service&>(inner), std::move(rights),
                                   book, logger)) {}
AdminGuard::~AdminGuard() = default;
grpc::Service& AdminGuard::service() { return *impl_; }

}  // namespace mk::daemon
