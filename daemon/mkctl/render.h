/// \file
/// The daemon's answers as text for users. Lines end with a newline.
#pragma once

#include <string>

#include "daemon/control/progress_watch.h"
#include "proto/mkernel/v1/admin.pb.h"

namespace mk::mkctl {

namespace v1 = ::mkernel::v1;

std::string render(const v1::GetVersionResponse& version, const std::string& own_version);
std::string render(const v1::GetStatusResponse& status);
std::string render(const v1::DrainResponse& left);
std::string render(const v1::ListSessionsResponse& sessions);
std::string render(const v1::ListQueuesResponse& queues);
std::string render(const v1::ListLinksResponse& links);
std::string render(const v1::ListJobsResponse& jobs);
std::string render(const v1::MetricsSample& metrics);  ///< Prometheus' text format
/// What a daemon says of a rank, as it knew it.
daemon::RankProgress progress_of(const v1::Progress& from);
/// The link's rail here, "2", or "2 > 0" where the peer's is another.
std::string rails_of(const v1::Link& link);
std::string sessions_table(const google::protobuf::RepeatedPtrField<v1::Session>& sessions);
std::string queues_table(const google::protobuf::RepeatedPtrField<v1::Queue>& queues);

/// The columns of a sample's line.
std::string stats_header();
std::string render(const v1::StatsSample& sample);

}  // namespace mk::mkctl
