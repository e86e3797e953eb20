/// \file
/// The engine's state as the Admin service's messages.
#pragma once

#include "daemon/control/control_plane.h"
#include "daemon/service/grpc_peer_transport.h"
#include "daemon/service/live_config.h"
#include "proto/mkernel/v1/admin.pb.h"

namespace mk::daemon {

namespace v1 = ::mkernel::v1;

void to_proto(const SessionInfo& from, v1::Session& to);
/// `buckets`: whether the histograms carry theirs.
void to_proto(const QueueInfo& from, bool buckets, v1::Queue& to);
void to_proto(const LinkInfo& from, v1::Link& to);
void to_proto(const PeerInfo& from, v1::PeerStatus& to);
void to_proto(const LatencyHistogram& from, bool buckets, v1::LatencyHistogram& to);

JobChange from_proto(const v1::SetJobRequest& request);

}  // namespace mk::daemon
