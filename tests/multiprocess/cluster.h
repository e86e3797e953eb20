/// \file
/// A cluster of real daemons and the rank processes on it, for tests.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "client/tools/launch/daemons.h"
#include "client/tools/launch/process.h"

namespace mk::test {

using namespace std::chrono_literals;
using tools::Process;

/// Sanitizers on two busy cores are slow; nothing here is decided by how long something takes.
inline auto patience() { return std::chrono::steady_clock::now() + 120s; }

inline std::unique_ptr<tools::DaemonSet> start_daemons(std::uint32_t nodes,
                                                       const std::string& fabric = "loopback") {
  tools::DaemonSetOptions options;
  options.nodes = nodes;
  options.fabric = fabric;
  options.program = MK_TEST_MKERNELD;
  options.start_timeout = 120s;
  auto started = tools::DaemonSet::start(options);
  EXPECT_TRUE(started) << started.error().message;
  return started ? std::make_unique<tools::DaemonSet>(std::move(*started)) : nullptr;
}

/// Rank `rank` of a job of `daemons.size()` nodes with `local` ranks each.
inline Process start_rank(const tools::DaemonSet& daemons, const std::string& job,
                          std::uint32_t local, std::uint32_t rank, std::uint32_t launches) {
  tools::ProcessOptions options;
  options.name = "rank " + std::to_string(rank);
  options.report = true;
  options.arguments = {MK_TEST_RANK,
                       daemons.client_socket(rank / local),
                       job,
                       std::to_string(daemons.size()),
                       std::to_string(local),
                       std::to_string(rank),
                       std::to_string(launches)};
  auto started = Process::start(options);
  EXPECT_TRUE(started) << started.error().message;
  return std::move(*started);
}

inline std::vector<Process> start_ranks(const tools::DaemonSet& daemons, const std::string& job,
                                        std::uint32_t local, std::uint32_t launches) {
  std::vector<Process> ranks;
  for (std::uint32_t rank = 0; rank < daemons.size() * local; ++rank) {
    ranks.push_back(start_rank(daemons, job, local, rank, launches));
  }
  return ranks;
}

/// Reads report lines until one starts with `prefix`; returns it, or what ended the search.
inline std::string read_until(Process& rank, const std::string& prefix) {
  while (true) {
    const auto line = rank.read_line(patience());
    if (!line) return line.error().message;
    if (!*line) return rank.name() + " ended without saying '" + prefix + "'";
    if ((*line)->starts_with(prefix) || (*line)->starts_with("error")) return **line;
  }
}

/// A whole job, from attach to detach; every rank must end well.
inline void expect_job_works(const tools::DaemonSet& daemons, const std::string& job,
                             std::uint32_t local, std::uint32_t launches = 3) {
  auto ranks = start_ranks(daemons, job, local, launches);
  for (Process& rank : ranks) EXPECT_EQ("done", read_until(rank, "done"));
  for (Process& rank : ranks) EXPECT_TRUE(rank.wait(patience()));
}

struct Output {
  int status = -1;
  std::string text;
};

/// Runs a program to its end.
inline Output run_program(const std::vector<std::string>& arguments) {
  auto folder = tools::TemporaryFolder::create("mk-test");
  tools::ProcessOptions options;
  options.name = arguments.front();
  options.arguments = arguments;
  options.output_path = folder->path() + "/output";
  auto process = Process::start(options);
  EXPECT_TRUE(process);
  Output output;
  const Status end = process->wait(patience());
  output.status = process->exit_status();
  output.text = tools::tail_of(options.output_path, 100'000);  // a list of sessions in JSON is long
  EXPECT_TRUE(end || end.error().code != ErrorCode::kTimeout) << output.text;
  return output;
}

}  // namespace mk::test
