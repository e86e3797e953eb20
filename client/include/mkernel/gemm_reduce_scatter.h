/// \file
/// GEMM+ReduceScatter.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk {

/// C[M, N] = sum over all ranks r of A_r[M, K] * B_r[K, N]. Rank r gets its rows of C (`rows_of`),
/// bitwise the same from run to run; with Tuning::batch_invariant a row's bits do not depend on m.
/// Inputs and output are bf16 or f16, sums are fp32; kernels/ops/gemm_ar/README.md has the error
/// bound.
///
/// With Partials::kElement, partial sums are rounded to the element type: each rank's product and,
/// with several nodes of several ranks, each node's sum. One whose magnitude reaches 65520 in f16
/// (about 3.4e38 in bf16) becomes an infinity. Infinities of unlike sign add up to a NaN, although
/// the whole sum may be small. In f16, keep the sum of |a| |b| over a node's ranks and their k at
/// 65000 at most. Otherwise use bf16 or Partials::kF32, or watch LaunchStats::nonfinite_partials.
class MK_EXPORT GemmReduceScatter {
 public:
  struct Shape {
    std::uint64_t m_max = 0;  ///< rows of A and C; a launch takes any m from 1 to this
    std::uint64_t n = 0;      ///< columns of B and C
    std::uint64_t k = 0;      ///< this rank's share of the inner dimension; ranks may differ
    DataType dtype = DataType::kBf16;
    BLayout b_layout = BLayout::kKN;
    Epilogue epilogue;  ///< of the sum over all ranks, applied once
    Partials partials = Partials::kElement;

    bool operator==(const Shape&) const = default;
  };
  using Tuning = mk::Tuning;

  /// The rows of C that a rank gets in a launch with `m`; 0 rows for some if m < world.
  static constexpr RowRange rows_of(std::uint64_t m, std::uint32_t world, std::uint32_t rank) {
    return rows_of_rank(m, world, rank);
  }

  /// Collective: all ranks of the job, same shape and tuning (kShapeMismatch names the ranks that
  /// differ). The operator must not outlive its session.
  /// kLimitExceeded, with both numbers and at once, when its memory cannot be had on some rank.
  static Result<GemmReduceScatter> create(Session& session, const Shape& shape,
                                          const Tuning& tuning);
  static Result<GemmReduceScatter> create(Session& session, const Shape& shape);

  /// Bytes that `create` takes on this rank: of host memory, or with Executor::kCuda of the calling
  /// thread's GPU. An operator that shares a workspace (Tuning::own_workspace) takes less, or
  /// none. Not collective. Before the session's first operator on a GPU that ranks share, it is the
  /// size for a rank that has the GPU to itself.
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning);
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape);

  GemmReduceScatter(GemmReduceScatter&&) noexcept;
  GemmReduceScatter& operator=(GemmReduceScatter&&) noexcept;
  ~GemmReduceScatter();

  /// Collective, same `m` on all ranks. A: m x k, row-major. B: by Shape::b_layout. C: this rank's
  /// rows, n columns, row-major. All are without gaps. `c` may be null when the rank gets no rows.
  /// Blocks until this rank's rows are complete and its part for the others is done. After an error
  /// the operator is broken and says so at every call; a wrong argument changes nothing.
  Result<LaunchStats> launch(const void* a, const void* b, void* c, std::uint64_t m,
                             LaunchOptions options = {});
  /// The same with pitches, and with the bias that the shape asks for.
  Result<LaunchStats> launch(const GemmArguments& arguments, LaunchOptions options = {});

  /// Executor::kCuda: puts a launch on the stream and returns at once. The arguments are in the
  /// GPU's memory, at multiples of 16 bytes; n and k are multiples of 8. It may be captured into a
  /// CUDA graph, which then replays it with the same addresses and `m`. A launch that fails while
  /// it runs ends, its output is undefined, and the operator is broken: `status` and later calls
  /// say why. Launches of one operator follow each other. Ranks that share a GPU launch on streams
  /// of their own. (`launch` without a stream waits for its end.)
  Status launch_on(CudaStream stream, const void* a, const void* b, void* c, std::uint64_t m,
                   LaunchOptions options = {});
  Status launch_on(CudaStream stream, const GemmArguments& arguments, LaunchOptions options = {});
  /// The first failure among the launches that have ended, or of the session. Does not wait.
  Status status() const;
  /// Executor::kCuda: waits for the stream, then returns what the last launch did, or the first
  /// failure.
  Result<LaunchStats> finish(CudaStream stream);

  /// Whether later launches keep what their threads did when; costs a little time. On a GPU: no
  /// effect.
  void set_trace(bool on);
  /// The last launch's spans; empty unless traced.
  std::vector<TraceSpan> trace() const;

 private:
  class Impl;
  explicit GemmReduceScatter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk
