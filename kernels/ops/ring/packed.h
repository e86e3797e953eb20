/// \file
/// Makes the tables of a packed launch (packed_sequences.h). Host only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/world.h"
#include "kernels/ops/ring/packed_sequences.h"
#include "kernels/ops/ring/spec.h"

namespace mk::kernels {

/// The tables of one launch, of one rank.
class PackedTables {
 public:
  PackedTables() = default;
  /// `starts`: the first row of each sequence, and the number of rows in all (check_starts).
  PackedTables(const RingAttentionGeometry& plan, const World& world,
               std::span<const std::uint32_t> starts);

  PackedSequences view() const;
  /// Rows of Q, K, V and O of a rank.
  std::uint32_t rows(std::uint32_t rank) const { return rank_rows_[rank]; }
  /// For Launch::m (LengthsDigest).
  std::uint32_t digest() const { return digest_; }
  /// What RingAttentionPlan::work is for one sequence.
  LaunchWork work() const { return work_; }

 private:
  std::vector<std::uint32_t> rows_;
  std::vector<std::uint32_t> items_;
  std::vector<std::uint32_t> first_rows_;
  std::vector<std::uint32_t> rank_rows_;
  std::uint32_t digest_ = 0;
  LaunchWork work_;
};

/// kInvalidArgument unless a launch of the plan may have these sequences: from one to
/// plan.sequences_max, each of which may be empty, plan.seq_max rows in all at most.
Status check_starts(const RingAttentionPlan& plan, std::span<const std::uint32_t> starts);

}  // namespace mk::kernels
