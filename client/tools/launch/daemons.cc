#include "client/tools/launch/daemons.h"

#include <signal.h>

#include <utility>

namespace mk::tools {
namespace {

using Clock = std::chrono::steady_clock;

/// From the folder of a program (installed: the same or ../sbin; build tree: client/tools/mkrun,
/// tests/bench/mkbench, tests/multiprocess) to the daemon's.
const std::vector<std::string> kDaemonFolders = {"../sbin", "../../daemon", "../../../daemon"};

}  // namespace

Result<DaemonSet> DaemonSet::start(const DaemonSetOptions& options) {
  std::string program = options.program;
  if (program.empty()) {
    MK_ASSIGN_OR_RETURN(program, find_program("mkerneld", kDaemonFolders));
  }
  MK_ASSIGN_OR_RETURN(auto folder, TemporaryFolder::create("mkernel"));
  DaemonSet set(std::move(folder));
  const auto path = [&](std::uint32_t node, const char* what) {
    return fmt::format("{}/node{}.{}", set.folder(), node, what);
  };
  const auto deadline = Clock::now() + options.start_timeout;
  for (std::uint32_t node = 0; node < options.nodes; ++node) {
    ProcessOptions process;
    process.name = fmt::format("mkerneld of node {}", node);
    process.output_path = path(node, "log");
    process.report = true;
    process.arguments = {program,
                         "--node-id",
                         std::to_string(node),
                         "--listen",
                         "unix:" + path(node, "peer"),
                         "--socket",
                         path(node, "sock"),
                         "--rails",
                         std::to_string(options.rails),
                         "--ready-fd",
                         std::to_string(kReportFd)};
    const auto add = [&](const char* flag, const std::string& value) {
      if (value.empty()) return;
      process.arguments.emplace_back(flag);
      process.arguments.push_back(value);
    };
    add("--fabric", options.fabric);
    add("--link-bandwidth", options.link_bandwidth);
    add("--link-latency", options.link_latency);
    for (std::uint32_t peer = 0; peer < options.nodes; ++peer) {
      if (peer != node) add("--peer", fmt::format("{}=unix:{}", peer, path(peer, "peer")));
    }
    process.arguments.insert(process.arguments.end(), options.arguments.begin(),
                             options.arguments.end());
    MK_ASSIGN_OR_RETURN(auto started, Process::start(process));
    set.nodes_.push_back(Node{path(node, "sock"), "unix:" + path(node, "peer"), process.output_path,
                              std::move(started)});
  }
  for (Node& node : set.nodes_) {
    MK_ASSIGN_OR_RETURN(const auto ready, node.process.read_line(deadline));
    if (!ready) {
      const Status end = node.process.wait(Clock::now() + std::chrono::seconds{5});
      return fail(ErrorCode::kUnavailable, "{} did not start: {}", node.process.name(),
                  end ? "it exited without a word" : end.error().message);
    }
  }
  return set;
}

Status DaemonSet::check() {
  for (Node& node : nodes_) {
    if (!node.process.ended()) continue;
    const Status end = node.process.wait(Clock::now());
    return fail(ErrorCode::kDaemonLost, "{}",
                end ? node.process.name() + " ended early" : end.error().message);
  }
  return {};
}

Status DaemonSet::stop(std::chrono::milliseconds timeout) {
  for (const Node& node : nodes_) node.process.signal(SIGTERM);
  const auto deadline = Clock::now() + timeout;
  Status first;
  for (Node& node : nodes_) {
    if (auto end = node.process.wait(deadline); !end && first) first = end;
  }
  return first;
}

}  // namespace mk::tools
