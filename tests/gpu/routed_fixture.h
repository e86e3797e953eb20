/// \file
/// What the tests of Dispatch+GEMM and of GEMM+Combine on GPUs have in common: launches whose rows
/// go by a routing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/on_gpus.h"
#include "tests/kernels/moe/routing_cases.h"

namespace mk::test {

/// `SetupOf`: MoeSetup or CombineSetup; `Ranks`: its ranks.
template <class SetupOf, class Ranks>
class RoutedOnGpus : public OnGpus<GpuWorld> {
 protected:
  using JobRouting = std::vector<kernels::testing::RankRouting>;
  using Skew = kernels::testing::Skew;
  using Mode = kernels::Mode;

  template <class Shape>
  static SetupOf setup(const Shape& shape) {
    auto setup = placed<SetupOf>();
    setup.shape = shape;
    setup.options.wait_timeout = 10s;
    return setup;
  }
  JobRouting draw(const Ranks& ranks, Skew skew, bool uneven) {
    const auto& shape = ranks.plan().shape;
    return kernels::testing::draw_routing(world(), shape.experts, shape.top_k, shape.tokens_max,
                                          skew, uneven, random_);
  }
  void judge_all(Ranks& ranks, std::uint32_t set = 0, bool behind = false) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) ASSERT_EQ(ranks.judge(r, set, behind), "");
    worst_ = std::max(worst_, ranks.worst());
  }
  void check(Ranks& ranks, Mode mode = Mode::kFused) {
    launch_all(ranks, mode, true);
    if (HasFatalFailure()) return;
    finish_all(ranks);
    if (!HasFatalFailure()) judge_all(ranks);
  }
  /// Four launches whose copies between nodes come late.
  void check_dawdling(const SetupOf& with) {
    Ranks ranks(with);
    if (ranks.proxy() != nullptr) ranks.proxy()->dawdle(true);
    for (int i = 0; i < 4 && !HasFatalFailure(); ++i) {
      ranks.fill(draw(ranks, Skew::kUniform, true), fresh_seed());
      check(ranks);
    }
  }
  /// Ten runs of one routing, whose inputs `fill(seed)` gives anew.
  template <class Fill>
  void check_same_bits(Ranks& ranks, Fill&& fill) {
    const std::uint64_t seed = fresh_seed();
    std::vector<std::vector<std::uint16_t>> first;
    for (int run = 0; run < 10; ++run) {
      SCOPED_TRACE("run " + std::to_string(run));
      fill(seed);
      launch_all(ranks, run % 4 == 3 ? Mode::kUnfused : Mode::kFused, true);
      finish_all(ranks);
      if (run == 0) judge_all(ranks);
      if (HasFatalFailure()) return;
      for (std::uint32_t r = 0; r < ranks.world(); ++r) {
        if (run == 0) first.push_back(ranks.output(r));
        ASSERT_EQ(ranks.output(r), first[r]) << "rank " << r;
      }
    }
  }
  /// On the streams, one after the other, each with another routing than the one before: the last
  /// one's results are judged. `fill(ranks, routing, set)` lays out a set's inputs.
  template <class Fill>
  void check_without_a_pause(SetupOf with, std::uint32_t launches, Fill&& fill) {
    constexpr std::uint32_t kSets = 4;
    with.sets = kSets;
    Ranks ranks(with);
    using kernels::testing::kSkews;
    for (std::uint32_t set = 0; set < kSets; ++set)
      fill(ranks, draw(ranks, kSkews[random_() % std::size(kSkews)], true), set);
    for (std::uint32_t last = 0; last < kSets && !HasFatalFailure(); ++last) {
      for (std::uint32_t i = 0; i < launches; ++i)
        launch_all(ranks, Mode::kFused, false, (last + i + 1) % kSets);
      finish_all(ranks);
      if (!HasFatalFailure()) judge_all(ranks, (last + launches) % kSets, true);
    }
  }
  /// And fresh ranks find the GPU as usable as before.
  void check_a_missing_rank(SetupOf with, const std::string& operation) {
    {
      with.options.wait_timeout = 200ms;
      const auto ranks = launched_once(with);
      if (HasFatalFailure()) return;
      (void)miss_last_rank(*ranks, operation, [&](std::uint32_t r) { return ranks->launch(r); });
    }
    with.options.wait_timeout = 10s;
    launched_once(with);
  }
  void check_an_abort(SetupOf with) {
    const auto make = [&](const std::uint32_t* abort) {
      with.abort = abort;
      return launched_once(with);
    };
    abort_launches(make, [](Ranks& ranks, std::uint32_t r) { return ranks.launch(r); });
  }

 private:
  std::unique_ptr<Ranks> launched_once(const SetupOf& with) {
    auto ranks = std::make_unique<Ranks>(with);
    ranks->fill(draw(*ranks, Skew::kUniform, false), fresh_seed());
    check(*ranks);
    return ranks;
  }
};

inline constexpr GpuWorld kRoutedWorlds[] = {{1, 1, 1}, {1, 2, 1}, {1, 4, 1}, {2, 1, 1},
                                             {2, 2, 1}, {4, 1, 1}, {1, 2, 2}, {1, 4, 4},
                                             {2, 1, 2}, {2, 2, 4}, {1, 8, 8}, {2, 4, 8}};

}  // namespace mk::test
