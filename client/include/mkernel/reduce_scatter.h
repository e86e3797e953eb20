/// \file
/// ReduceScatter.
#pragma once

#include <cstdint>

#include "mkernel/collective.h"
#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk {

/// The rows of all ranks are added up, and each rank gets a share of the sums. Input: m rows of n
/// elements; output: the sums of rows rows_of(m, world, rank). Sums are fp32, in rank order within
/// a node, and the own node's before the others': results are bitwise the same from run to run.
/// With Tuning::batch_invariant the nodes' sums are added in node order. Then a row's bits do not
/// depend on m, which says who owns the row.
///
/// With Partials::kElement over several nodes of several ranks, each node's sum is rounded to the
/// element type before the nodes' are added up. With f32 nothing is rounded but the fp32 sums.
class MK_EXPORT ReduceScatter : public Collective {
 public:
  struct Shape {
    std::uint64_t m_max = 0;  ///< rows of each rank; a launch takes any m from 1 to this
    std::uint64_t n = 0;      ///< elements of a row
    DataType dtype = DataType::kBf16;
    Partials partials = Partials::kElement;

    bool operator==(const Shape&) const = default;
  };
  /// These count: tile_m, tile_n, chunk_bytes, and compute, reduce, send and receive_sms. The
  /// first of them bring this rank's rows to the ranks that add them up.
  using Tuning = mk::Tuning;

  static constexpr const char* kSummary = "sums of all ranks' rows, each rank gets its share";
  static constexpr bool kSums = true;
  static constexpr RowRange input_rows(std::uint64_t m, std::uint32_t, std::uint32_t) {
    return {0, m};
  }
  static constexpr RowRange output_rows(std::uint64_t m, std::uint32_t world, std::uint32_t rank) {
    return rows_of(m, world, rank);
  }

  /// The rows whose sums a rank gets in a launch with `m`; 0 rows for some if m < world.
  static constexpr RowRange rows_of(std::uint64_t m, std::uint32_t world, std::uint32_t rank) {
    return rows_of_rank(m, world, rank);
  }

  /// Collective: all ranks of the job, same shape and tuning (kShapeMismatch names the ranks that
  /// differ). The operator must not outlive its session. kLimitExceeded, with both numbers and at
  /// once, when its memory cannot be had on some rank.
  static Result<ReduceScatter> create(Session& session, const Shape& shape, const Tuning& tuning);
  static Result<ReduceScatter> create(Session& session, const Shape& shape);
  /// Bytes that `create` takes on this rank. Not collective.
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning);
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape);

 private:
  using Collective::Collective;
};

}  // namespace mk
