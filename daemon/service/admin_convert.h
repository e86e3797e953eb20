/// \file
/// The engine's state as the Admin service's messages.
#pragma once

#include <prometheus/metric_family.h>

#include <span>

#include "daemon/config/compare.h"
#include "daemon/control/control_plane.h"
#include "daemon/service/grpc_peer_transport.h"
#include "daemon/service/live_config.h"
#include "daemon/service/tls_refusals.h"
#include "proto/mkernel/v1/admin.pb.h"

namespace mk::daemon {

namespace v1 = ::mkernel::v1;

void to_proto(const SessionInfo& from, v1::Session& to);
void to_proto(const RankProgress& from, v1::Progress& to);
void to_proto(const EndedJob& from, v1::EndedJob& to);
/// `buckets`: whether the histograms carry theirs.
void to_proto(const QueueInfo& from, bool buckets, v1::Queue& to);
void to_proto(const LinkInfo& from, v1::Link& to);
void to_proto(const PeerInfo& from, v1::PeerStatus& to);
/// With what its queues have counted.
void to_proto(const JobInfo& from, const ControlSnapshot& all, v1::Job& to);
/// `buckets`: whether the histogram carries its own.
void to_proto(std::uint32_t rail, const ProxyStats& from, bool buckets, v1::RailStatus& to);
void to_proto(const prometheus::MetricFamily& from, v1::MetricFamily& to);
/// Without secrets.
void to_proto(const ConfigChange& from, v1::ConfigChange& to);
void to_proto(const TlsRefusal& from, v1::TlsRefusal& to);
void to_proto(const LatencyHistogram& from, bool buckets, v1::LatencyHistogram& to);

JobChange from_proto(const v1::SetJobRequest& request);

}  // namespace mk::daemon
