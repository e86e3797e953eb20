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

/// Likewise where threads go over between launches (kernels/cpu/adaptive_threads.h): from four
/// times too few and too many of those that communicate, in the plan's proportions. `launches`: at
/// least 20 fused ones of one height. `same(one, other)`: of two ranks' results.
template <class Job, class Options, class LaunchPlan, class Same>
void expect_same_bits_as_threads_go_over(Options options,
                                         const std::vector<Workers RoleBlocks::*>& roles,
                                         const std::vector<LaunchPlan>& launches, Same&& same) {
  const auto others = [&](auto&& of) {
    std::uint32_t all = 0;
    for (const auto role : roles) all += of(role);
    return all;
  };
  decltype(std::declval<Job&>().run(launches)) planned;
  for (const auto& [compute, each] : {std::pair{1u, 1u}, {8u, 1u}, {1u, 4u}}) {
    options.cpu.blocks.compute = compute;
    for (const auto role : roles) options.cpu.blocks.*role = each;
    options.cpu.adaptive = !planned.empty();
    Job job(options);
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) job.op(rank).runner().set_trace(64);
    NetworkThread network(job.cluster(), 5);
    const auto results = job.run(launches, std::chrono::microseconds(200));
    EXPECT_EQ(network.stop().complaint(), "");
    const bool adaptive = !planned.empty();
    if (!adaptive) planned = results;
    const std::uint32_t of_role = each;  // no lambda may have the binding
    const std::uint32_t first = others([&](auto) { return of_role; });
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      std::uint32_t before = first;
      std::uint32_t moves = 0;
      for (std::size_t i = 0; i < launches.size(); ++i) {
        ASSERT_TRUE(results[i][rank].stats) << results[i][rank].stats.error().message;
        ASSERT_TRUE(same(results[i][rank], planned[i][rank]))
            << compute << ":" << each << ", launch " << i + 1 << ", rank " << rank;
        const LaunchStats& stats = *results[i][rank].stats;
        const PartitionStats& its = stats.partition;
        ASSERT_EQ(its.first, its.last) << "roles stay within a launch";
        if (!adaptive) {
          ASSERT_EQ(its.last, 0u);
          continue;
        }
        if (stats.mode == Mode::kUnfused) {
          ASSERT_EQ(its.last, first) << "it has the first ones";
        }
        moves += its.last != before ? 1 : 0;
        before = its.last;
        ASSERT_EQ(its.moves, moves);
        ASSERT_EQ(stats.role(Role::kCompute).blocks + its.last, compute + first);
        ASSERT_GE(its.last, roles.size());
      }
      if (!adaptive) continue;
      EXPECT_GE(moves, 1u) << "other numbers have been tried";
      const auto steps = job.op(rank).runner().partition_steps();
      ASSERT_EQ(steps.size(), 1u);
      EXPECT_EQ(steps[0].target, before);
    }
  }
}

}  // namespace mk::kernels::testing
