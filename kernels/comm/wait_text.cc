#include "kernels/comm/wait_text.h"

#include <fmt/format.h>

#include <string>

namespace mk::kernels {
namespace {

/// The flag and its indices, as the comments of FlagKind define them.
std::string flag_text(const WaitSite& site) {
  const std::uint32_t i = site.index[0];
  const std::uint32_t j = site.index[1];
  switch (site.kind) {
    case FlagKind::kLaunchRecord:
      return fmt::format("flag launch-record[local rank {}]", i);
    case FlagKind::kTileReady:
      return fmt::format("flag tile-ready[local rank {}][owned tile {}]", i, j);
    case FlagKind::kChunkReduced:
      return fmt::format("flag chunk-reduced[chunk {}]", i);
    case FlagKind::kOutReady:
      return fmt::format("flag out-ready[local rank {}][chunk {}]", i, j);
    case FlagKind::kArrival:
      return fmt::format("flag arrival[node {}][chunk {}]", i, j);
    case FlagKind::kRelease:
      return fmt::format("flag release[node {}][bank {}]", i, j);
    case FlagKind::kCredit:
      return fmt::format("commands taken from lane {}", i);
    case FlagKind::kCompleted:
      return fmt::format("commands completed of lane {}", i);
    case FlagKind::kBlockDone:
      return fmt::format("flag block-done[{} block {}]",
                         i < kRoles ? name_of(static_cast<Role>(i)) : "?", j);
    case FlagKind::kFinished:
      return fmt::format("flag finished[local rank {}]", i);
    case FlagKind::kRowsReady:
      return fmt::format("flag rows-ready[rank {}][chunk {}]", i, j);
    case FlagKind::kPlanReady:
      return "flag plan-ready";
    case FlagKind::kRowsPacked:
      return fmt::format("flag rows-packed[row tile {}]", i);
    case FlagKind::kShardsSent:
      return fmt::format("flag shards-sent[local rank {}]", i);
    case FlagKind::kPassedOn:
      return "flag passed-on by the DMA engines";
    case FlagKind::kRowsIndexed:
      return fmt::format("flag rows-indexed[local rank {}]", i);
  }
  return "?";
}

/// Who is behind.
std::string culprit_text(const WaitSite& site, const World& world) {
  if (site.kind == FlagKind::kCredit || site.kind == FlagKind::kCompleted) return "its daemon";
  if (site.rank == world.rank()) return fmt::format("rank {} (itself)", site.rank);
  return fmt::format("rank {}", site.rank);
}

}  // namespace

Error describe(const WaitRecord& record, std::string_view op, std::uint32_t epoch,
               const World& world, std::uint32_t peer_failed) {
  const WaitSite& site = record.site;
  const std::string launch = fmt::format("{} launch {} on rank {}", op, epoch, world.rank());
  const bool counter = site.kind == FlagKind::kCredit || site.kind == FlagKind::kCompleted ||
                       site.kind == FlagKind::kPassedOn;
  const std::string wait = fmt::format(
      "{} block {} waited {:.3f} s for {}: {} shows {}, expected {} {}", name_of(site.role),
      site.block, static_cast<double>(record.waited_ns) * 1e-9, culprit_text(site, world),
      flag_text(site), record.seen, counter ? "at least" : "epoch", record.expected);
  switch (record.end) {
    case WaitEnd::kTimeout:
      return {ErrorCode::kTimeout,
              fmt::format("{}: {}; find out why {} behind, or raise the wait timeout", launch, wait,
                          site.hops > 2 ? "it, or a rank that it waits for, is" : "it is")};
    case WaitEnd::kSessionAbort:
      return {ErrorCode::kAborted,
              fmt::format("{}: the session was aborted while {}", launch, wait)};
    case WaitEnd::kProcessAbort:
      return {ErrorCode::kAborted,
              fmt::format("{}: the connection to the daemon was lost while {}", launch, wait)};
    case WaitEnd::kPeerFailed:
      return {ErrorCode::kAborted,
              fmt::format("{}: the launch of rank {} on the same node failed while {}", launch,
                          peer_failed - 1, wait)};
    case WaitEnd::kMismatch:
      return {ErrorCode::kShapeMismatch,
              fmt::format("{}: this rank launched with m = {}, rank {} with m = {}; all ranks of a "
                          "launch must pass the same m",
                          launch, record.expected, site.rank, record.seen)};
    case WaitEnd::kReached:
    case WaitEnd::kStopped:
      break;
  }
  return {ErrorCode::kInternal, fmt::format("{}: it stopped without a recorded cause", launch)};
}

}  // namespace mk::kernels
