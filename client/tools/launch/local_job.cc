#include "client/tools/launch/local_job.h"

#include <charconv>

namespace mk::tools {

Result<RankArguments> parse_rank_arguments(const std::vector<std::string>& words) {
  RankArguments arguments;
  if (words.size() != 4) {
    return fail(ErrorCode::kInvalidArgument, "'{}' takes RANK SOCKET JOB SPEC, not {} words",
                kRankCommand, words.size());
  }
  const char* end = words[0].data() + words[0].size();
  const auto number = std::from_chars(words[0].data(), end, arguments.rank);
  if (number.ec != std::errc{} || number.ptr != end)
    return fail(ErrorCode::kInvalidArgument, "'{}' is not a rank", words[0]);
  arguments.socket = words[1];
  arguments.job = words[2];
  arguments.spec = nlohmann::json::parse(words[3], nullptr, false);
  if (arguments.spec.is_discarded())
    return fail(ErrorCode::kInvalidArgument, "rank {}: what to do is not JSON", arguments.rank);
  return arguments;
}

Result<LocalJob> LocalJob::start(const LocalJobOptions& options, const nlohmann::json& spec) {
  LocalJob job;
  std::vector<std::string> sockets = options.join_sockets;
  if (sockets.empty()) {
    MK_ASSIGN_OR_RETURN(auto started, DaemonSet::start(options.daemons));
    job.daemons_.emplace(std::move(started));
    for (std::uint32_t node = 0; node < options.daemons.nodes; ++node)
      sockets.push_back(job.daemons_->client_socket(node));
  }
  const std::string name = unique_job_name(options.name);
  const std::string text = spec.dump();
  const std::uint32_t world = options.daemons.nodes * options.local;
  const auto arguments_of = [&](std::uint32_t rank) {
    return std::vector<std::string>{kRankCommand, std::to_string(rank),
                                    sockets[rank / options.local], name, text};
  };
  MK_ASSIGN_OR_RETURN(auto ranks,
                      RankSet::start(world, options.program, arguments_of, options.inherited));
  job.ranks_.emplace(std::move(ranks));
  return job;
}

Result<std::vector<nlohmann::json>> LocalJob::read_reports(std::chrono::milliseconds patience,
                                                           const std::string& what) {
  const auto lines = ranks_->read_lines(patience, what);
  if (!lines) {
    const Status daemons = daemons_ ? daemons_->check() : Status{};
    if (daemons) return propagate(lines);
    return fail(lines.error().code, "{}\n{}", lines.error().message, daemons.error().message);
  }
  std::vector<nlohmann::json> reports;
  for (const std::string& line : *lines) {
    reports.push_back(nlohmann::json::parse(line, nullptr, false));
    if (reports.back().is_discarded())
      return fail(ErrorCode::kProtocol, "{}: a rank reported '{}'", what, line);
  }
  return reports;
}

Status LocalJob::finish_ranks(std::chrono::milliseconds patience) {
  return ranks_->finish(patience);
}

Status LocalJob::stop_daemons() {
  return daemons_ ? daemons_->stop(std::chrono::seconds{20}) : Status{};
}

}  // namespace mk::tools
