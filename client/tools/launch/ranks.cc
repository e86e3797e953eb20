#include "client/tools/launch/ranks.h"

#include <unistd.h>

#include <random>

namespace mk::tools {

using Clock = std::chrono::steady_clock;

Result<RankSet> RankSet::start(
    std::uint32_t world, const std::string& program,
    const std::function<std::vector<std::string>(std::uint32_t)>& arguments_of,
    const std::vector<int>& inherited) {
  MK_ASSIGN_OR_RETURN(auto folder, TemporaryFolder::create("mkernel-ranks"));
  RankSet set(std::move(folder));
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    ProcessOptions process;
    process.name = fmt::format("rank {}", rank);
    process.report = true;
    process.inherited = inherited;
    process.output_path = fmt::format("{}/rank{}.log", set.folder(), rank);
    process.arguments = arguments_of(rank);
    process.arguments.insert(process.arguments.begin(),
                             program.empty() ? "/proc/self/exe" : program);
    MK_ASSIGN_OR_RETURN(auto started, Process::start(process));
    set.ranks_.push_back(std::move(started));
  }
  return set;
}

Result<std::vector<std::string>> RankSet::read_lines(std::chrono::milliseconds patience,
                                                     const std::string& what) {
  const auto deadline = Clock::now() + patience;
  std::vector<std::string> lines;
  for (Process& rank : ranks_) {
    auto line = rank.read_line(deadline);
    if (!line && line.error().code == ErrorCode::kAborted) return propagate(line);
    if (!line)
      return tl::unexpected<Error>(explain(fmt::format("{}: {}", what, line.error().message)));
    if (!*line)
      return tl::unexpected<Error>(explain(fmt::format("{}: {} ended early", what, rank.name())));
    lines.push_back(std::move(**line));
  }
  return lines;
}

Status RankSet::finish(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  for (Process& rank : ranks_) {
    if (!rank.wait(deadline)) return tl::unexpected<Error>(explain("at the end of the job"));
  }
  return {};
}

Error RankSet::explain(const std::string& what) {
  std::string message = what;
  const auto deadline = Clock::now() + std::chrono::seconds{10};
  for (Process& rank : ranks_) {
    if (const Status end = rank.wait(deadline); !end) message += "\n" + end.error().message;
  }
  return Error{ErrorCode::kInternal, message};
}

std::string unique_job_name(const std::string& prefix) {
  std::random_device random;
  return fmt::format("{}-{:08x}{:08x}", prefix, random(), random());
}

}  // namespace mk::tools
