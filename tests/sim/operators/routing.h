/// \file
/// The routing of a whole job that looks alike from every node: a token of node n goes where that
/// of node 0 with its number goes, n nodes on. So the mirror of a simulated node is exact.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/ops/moe/routing_types.h"

namespace mk::sim {

struct RoutingShapeOfJob {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t tokens = 0;   ///< of each rank
  std::uint32_t experts = 0;  ///< of all ranks: a multiple of the nodes
  std::uint32_t top_k = 0;
};

class JobRouting {
 public:
  /// Distinct experts at random, all alike, by the seed.
  JobRouting(const RoutingShapeOfJob& shape, std::uint64_t seed);

  const RoutingShapeOfJob& shape() const { return shape_; }
  std::int32_t id(std::uint32_t rank, std::uint32_t token, std::uint32_t slot) const {
    const std::uint32_t local = rank % shape_.locals;
    return turned(base_[(std::size_t{local} * shape_.tokens + token) * shape_.top_k + slot],
                  rank / shape_.locals);
  }
  /// An expert's number, seen `nodes` nodes on.
  std::int32_t turned(std::int32_t id, std::uint32_t nodes) const {
    const std::uint64_t step = shape_.experts / shape_.nodes;
    return static_cast<std::int32_t>((static_cast<std::uint64_t>(id) + nodes * step) %
                                     shape_.experts);
  }
  /// A rank's table, and its numbers.
  struct Table {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    kernels::RoutingTable view(std::uint32_t tokens, std::uint32_t top_k) const {
      return {tokens, top_k, ids.data(), weights.data()};
    }
  };
  Table table(std::uint32_t rank) const;
  /// A rank's handle, as Dispatch+GEMM leaves it: its experts' rows, and where each one's begin.
  struct Handle {
    std::vector<kernels::MoeRow> rows;
    std::vector<std::uint32_t> offsets;
  };
  Handle handle(std::uint32_t rank) const;
  /// The most rows that any of the first `ranks` ranks has, over how many they would have if all
  /// experts were alike.
  double imbalance(std::uint32_t ranks) const;

 private:
  RoutingShapeOfJob shape_;
  std::vector<std::int32_t> base_;  ///< node 0's: [local][token][slot]
};

}  // namespace mk::sim
