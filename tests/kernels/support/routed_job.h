/// \file
/// A whole job of an operator whose rows are routed to experts, in one process: every rank is a
/// thread with its own operator, over a Cluster's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "client/tools/numeric/elements.h"
#include "kernels/comm/epilogue.h"
#include "kernels/comm/types.h"
#include "tests/kernels/moe/routing_cases.h"
#include "tests/kernels/support/cluster.h"
#include "tests/kernels/support/or_throw.h"

namespace mk::kernels::testing {

template <class OperatorShape, class CpuOptions>
struct RoutedJobOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  OperatorShape shape;
  DType dtype = DType::kBf16;
  Tiling tiling;
  CpuOptions cpu;
  std::uint32_t slot_count_log2 = 5;
  std::uint64_t seed = 1;
};

/// One launch, the same for all ranks.
struct RoutedLaunch {
  Skew skew = Skew::kUniform;
  bool uneven = true;  ///< ranks have different numbers of tokens
  Mode mode = Mode::kFused;
  std::uint64_t inputs = 0;  ///< launches with equal numbers here have equal inputs
};

template <class Plan, class Cpu, class Options>
class RoutedJob {
 public:
  Cluster& cluster() { return *cluster_; }
  const Plan& plan() const { return plan_; }
  Cpu& op(std::uint32_t rank) { return *ops_[rank]; }
  std::uint32_t size() const { return cluster_->size(); }
  /// The largest error over its bound so far: 1 would be just allowed.
  double worst() const { return worst_; }

 protected:
  /// Makes plan, memory and operators; throws if it cannot.
  explicit RoutedJob(const Options& options) : options_(options) {
    plan_ = or_throw(
        Plan::make(options.nodes, options.locals, options.shape, options.dtype, options.tiling));
    cluster_ = std::make_unique<Cluster>(
        ClusterShape{options.nodes, options.locals, plan_.workspace_bytes(), plan_.flag_count(),
                     options.cpu.blocks.send, options.slot_count_log2});
    for (std::uint32_t rank = 0; rank < size(); ++rank)
      ops_.push_back(or_throw(
          Cpu::create(plan_, cluster_->context(rank), cluster_->with_progress(options.cpu, rank))));
  }
  ~RoutedJob() = default;

  std::mt19937_64 random_of(const RoutedLaunch& launch) const {
    return std::mt19937_64(options_.seed * 1000003 + launch.inputs * 1009 +
                           static_cast<std::uint64_t>(launch.skew));
  }
  std::vector<RankRouting> routing_of(const RoutedLaunch& launch, std::mt19937_64& random) const {
    const auto& shape = options_.shape;
    return draw_routing(size(), shape.experts, shape.top_k, shape.tokens_max, launch.skew,
                        launch.uneven, random);
  }
  /// Appends an expert's weights, [rows][columns], in the operator's layout.
  void append_weights(const std::vector<std::uint16_t>& one, std::uint32_t rows,
                      std::uint32_t columns, std::vector<std::uint16_t>& all) const {
    if (options_.cpu.b_layout == BLayout::kKN) {
      all.insert(all.end(), one.begin(), one.end());
      return;
    }
    for (std::uint32_t column = 0; column < columns; ++column) {
      for (std::uint32_t row = 0; row < rows; ++row)
        all.push_back(one[std::size_t{row} * columns + column]);
    }
  }
  DataType type() const {
    return options_.dtype == DType::kBf16 ? DataType::kBf16 : DataType::kF16;
  }

  Options options_;
  Plan plan_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<std::unique_ptr<Cpu>> ops_;
  double worst_ = 0;
};

}  // namespace mk::kernels::testing
