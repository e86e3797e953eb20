/// \file
/// An operator's launches on CPUs give the same bits each time, and with any partition of its
/// threads, planned or adaptive (kernels/cpu/adaptive_roles.h).
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/comm/launch.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {

/// Runs the launch so many times, fused and unfused in turn. All are right, and each gives the bits
/// of the first. `output`: of a rank's result.
template <class Job, class LaunchPlan, class Output>
void expect_same_bits_each_time(Job& job, const LaunchPlan& launch, std::uint32_t times,
                                Output output) {
  NetworkThread network(job.cluster(), 5);
  std::vector<LaunchPlan> launches(times, launch);
  for (std::uint32_t i = 0; i < times; ++i)
    launches[i].mode = i % 2 == 0 ? Mode::kFused : Mode::kUnfused;
  const auto results = job.run(launches, std::chrono::microseconds(1000));
  for (std::size_t i = 0; i < launches.size(); ++i) {
    ASSERT_EQ(job.check(launches[i], results[i]), "");
    for (std::uint32_t rank = 0; rank < job.size(); ++rank)
      EXPECT_EQ(results[i][rank].*output, results[0][rank].*output) << "launch " << i + 1;
  }
}

/// Runs the launches with one thread for tiles and one for `other`, as planned. Then adaptive ones
/// begin with partitions of all kinds, and may go anywhere. `Job`: made of `options`.
/// `check(options, launch, rank, stats)`: of every launch on every rank.
template <class Job, class Options, class LaunchPlan, class Check>
void expect_same_bits_in_any_partition(Options options, Workers RoleBlocks::*other,
                                       const std::vector<LaunchPlan>& launches, Check&& check) {
  decltype(std::declval<Job&>().run(launches)) planned;
  for (const auto& [compute, others] :
       {std::pair{1u, 1u}, {1u, 1u}, {4u, 1u}, {1u, 4u}, {2u, 2u}}) {
    options.cpu.blocks.compute = compute;
    options.cpu.blocks.*other = others;
    options.cpu.adaptive = !planned.empty();
    Job job(options);
    NetworkThread network(job.cluster(), 5);
    const auto results = job.run(launches, std::chrono::microseconds(500));
    EXPECT_EQ(network.stop().complaint(), "");
    if (planned.empty()) planned = results;
    for (std::size_t i = 0; i < launches.size(); ++i) {
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        ASSERT_TRUE(results[i][rank].stats) << results[i][rank].stats.error().message;
        ASSERT_EQ(results[i][rank].c, planned[i][rank].c) << compute << ":" << others;
        check(options, launches[i], rank, *results[i][rank].stats);
      }
    }
  }
}

}  // namespace mk::kernels::testing
