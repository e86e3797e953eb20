/// \file
/// AllGather.
#pragma once

#include <cstdint>

#include "mkernel/collective.h"
#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk {

/// Every rank gets all ranks' rows. Input: this rank's, rows_of(m, world, rank) of n elements;
/// output: all m, in rank order. Bytes are moved and not looked at: results are bitwise the same
/// from run to run, whatever m is, so Tuning::batch_invariant changes nothing.
class MK_EXPORT AllGather : public Collective {
 public:
  struct Shape {
    std::uint64_t m_max = 0;  ///< rows over all ranks; a launch takes any m from 1 to this
    std::uint64_t n = 0;      ///< elements of a row
    DataType dtype = DataType::kBf16;

    bool operator==(const Shape&) const = default;
  };
  /// Of these, chunk_bytes counts (by default 128 rows), and send, share, receive and compute_sms:
  /// the last bring rows to the output.
  using Tuning = mk::Tuning;

  static constexpr const char* kSummary = "all ranks' rows, to every rank";
  static constexpr bool kSums = false;
  static constexpr RowRange input_rows(std::uint64_t m, std::uint32_t world, std::uint32_t rank) {
    return rows_of(m, world, rank);
  }
  static constexpr RowRange output_rows(std::uint64_t m, std::uint32_t, std::uint32_t) {
    return {0, m};
  }

  /// The rows that a rank brings to a launch with `m`; 0 rows for some if m < world.
  static constexpr RowRange rows_of(std::uint64_t m, std::uint32_t world, std::uint32_t rank) {
    return rows_of_rank(m, world, rank);
  }

  /// Collective: all ranks of the job, same shape and chunks (kShapeMismatch names the ranks that
  /// differ). The operator must not outlive its session. kLimitExceeded, with both numbers and at
  /// once, when its memory cannot be had on some rank.
  static Result<AllGather> create(Session& session, const Shape& shape, const Tuning& tuning);
  static Result<AllGather> create(Session& session, const Shape& shape);
  /// Bytes that `create` takes on this rank. Not collective.
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning);
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape);

  /// Where the input may lie so that the network reads it there; see AllGatherGemm::input.
  void* input() const;

 private:
  using Collective::Collective;
};

}  // namespace mk
