/// \file
/// AllGather+GEMM.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk {

/// C_r[M, N_r] = A[M, K] * B_r[K, N_r] on every rank r, where each rank brings its rows of A
/// (`rows_of`) and its own B. Inputs and output are bf16 or f16. Sums are fp32, and each element of
/// C is rounded once; kernels/ops/ag_gemm/README.md has the error bound. Results are bitwise the
/// same from run to run. With Tuning::batch_invariant the bits of a row do not depend on m either.
class MK_EXPORT AllGatherGemm {
 public:
  struct Shape {
    std::uint64_t m_max = 0;  ///< rows of the whole A and of C; a launch takes any m from 1 to this
    std::uint64_t n = 0;      ///< columns of this rank's B and C; ranks may differ
    std::uint64_t k = 0;      ///< columns of A; the same on all ranks
    DataType dtype = DataType::kBf16;
    BLayout b_layout = BLayout::kKN;  ///< ranks may differ
    Epilogue epilogue;                ///< of each tile as it is stored; ranks may differ

    bool operator==(const Shape&) const = default;
  };
  /// The default chunk is 128 rows of A. Ranks may differ in all but chunk_bytes.
  using Tuning = mk::Tuning;

  /// The rows of A that a rank brings to a launch with `m`; 0 rows for some if m < world.
  static constexpr RowRange rows_of(std::uint64_t m, std::uint32_t world, std::uint32_t rank) {
    return rows_of_rank(m, world, rank);
  }

  /// Collective: all ranks of the job, same m_max, k, type and chunks (kShapeMismatch names the
  /// ranks that differ). The operator must not outlive its session.
  /// kLimitExceeded, with both numbers and at once, when its memory cannot be had on some rank.
  static Result<AllGatherGemm> create(Session& session, const Shape& shape, const Tuning& tuning);
  static Result<AllGatherGemm> create(Session& session, const Shape& shape);

  /// Bytes that `create` takes on this rank: of host memory, or with Executor::kCuda of the calling
  /// thread's GPU. An operator that shares a workspace (Tuning::own_workspace) takes less, or
  /// none. Not collective. Before the session's first operator on a GPU that ranks share, it is the
  /// size for a rank that has the GPU to itself.
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning);
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape);

  AllGatherGemm(AllGatherGemm&&) noexcept;
  AllGatherGemm& operator=(AllGatherGemm&&) noexcept;
  ~AllGatherGemm();

  /// Collective, same `m` on all ranks. `a_shard`: this rank's rows of A, k columns; may be null
  /// when it has none. B: by Shape::b_layout. C: m x n. `gathered`: null, or m x k, which gets the
  /// whole A; ranks may differ in that. All are without gaps, and row-major except B. Blocks until
  /// C (and A) are complete and this rank's part for the others is done. After an error the
  /// operator is broken and says so at every call; a wrong argument changes nothing.
  Result<LaunchStats> launch(const void* a_shard, const void* b, void* c, std::uint64_t m,
                             LaunchOptions options = {}, void* gathered = nullptr);
  /// The same with pitches, and with the bias that the shape asks for.
  Result<LaunchStats> launch(const GemmArguments& arguments, LaunchOptions options = {});

  /// Where `a_shard` may lie so that the network reads it there: over several nodes that spares its
  /// copy, and the first rows leave sooner. Room for rows_of(m_max, ...) rows, dense; the caller's
  /// to write between launches (kCuda: in stream order). A launch with a shard elsewhere may
  /// overwrite it. Null in a job of one rank, and while another operator shares the workspace;
  /// once asked for, it is this operator's alone (Tuning::own_workspace).
  void* input() const;

  /// Executor::kCuda: puts a launch on the stream and returns at once. The arguments are in the
  /// GPU's memory, at multiples of 16 bytes; n and k are multiples of 8. It may be captured into a
  /// CUDA graph, which then replays it with the same addresses and `m`. A launch that fails while
  /// it runs ends, its output is undefined, and the operator is broken: `status` and later calls
  /// say why. Launches of one operator follow each other. Ranks that share a GPU launch on streams
  /// of their own. (`launch` without a stream waits for its end.)
  Status launch_on(CudaStream stream, const void* a_shard, const void* b, void* c, std::uint64_t m,
                   LaunchOptions options = {}, void* gathered = nullptr);
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
  explicit AllGatherGemm(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk
