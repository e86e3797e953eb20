/// \file
/// The Admin service's RecordTrace: what the proxies' recorders hold, as messages.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>

#include "daemon/control/node.h"
#include "daemon/service/admin_streams.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"

namespace mk::daemon {

class TraceRecorder {
 public:
  /// All outlive this.
  TraceRecorder(Node& node, AdminStreams& streams) : node_(node), streams_(streams) {}

  /// Records until the asked duration is over; the recorders are off when it returns. Five seconds
  /// later, a caller that does not read is cancelled.
  grpc::Status record(grpc::ServerContext& context,
                      const ::mkernel::v1::RecordTraceRequest& request,
                      grpc::ServerWriter<::mkernel::v1::TraceChunk>& writer);

 private:
  grpc::Status send(grpc::ServerContext& context, std::chrono::nanoseconds duration,
                    grpc::ServerWriter<::mkernel::v1::TraceChunk>& writer);
  /// What was recorded since the last call, in chunks that fit a message. False: nobody reads.
  bool drain(grpc::ServerWriter<::mkernel::v1::TraceChunk>& writer);
  /// What slots and links mean now.
  void explain(::mkernel::v1::TraceChunk& chunk);

  Node& node_;
  AdminStreams& streams_;
  std::atomic<bool> busy_{false};
};

}  // namespace mk::daemon
