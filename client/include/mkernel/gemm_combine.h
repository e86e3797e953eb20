/// \file
/// GEMM+Combine: the second half of the MoE layer. It multiplies the rows that MoE Dispatch+GEMM
/// left on each rank with the experts' down projections, and scales them with their routing
/// weights. It sums them at their tokens' ranks, while others are still computed.
///
///     auto combine = mk::GemmCombine::create(*session, {.tokens_max = 4096, .hidden = 4096,
///                                                       .features = 1536, .experts = 64,
///                                                       .top_k = 8});
///     auto stats = combine->launch({.y = y, .rows = dispatch->rows(),
///                                   .expert_offsets = dispatch->expert_offsets(),
///                                   .expert_weights = my_down_projections, .ids = ids,
///                                   .count = t}, out);
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mkernel/moe_dispatch_gemm.h"
#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk {

/// Token t of this rank gets the sum over its slots of weight times (row times the expert's
/// weights). Products and sums are in fp32. Rows of one node are added in slot order, then nodes in
/// their order, then the residual; then comes one rounding. So it is bitwise the same from run to
/// run. With Tuning::batch_invariant the bits of a token depend on its own rows and weights, on the
/// experts' weights and on the ranks, not on how many tokens there are. A token without an expert
/// gets 0, or its residual. A NaN in a token's rows reaches no other token.
///
/// With Partials::kElement, each weighted product row and each node's sum of a token is rounded to
/// the element type. One whose magnitude reaches 65520 in f16 becomes an infinity. Infinities of
/// unlike sign add up to a NaN, although the whole sum may be small. In f16, keep the sum of
/// |weight| |row| |expert's weights| over a token's slots at 65000 at most, use Partials::kF32, or
/// watch LaunchStats::nonfinite_partials.
class MK_EXPORT GemmCombine {
 public:
  struct Shape {
    std::uint64_t tokens_max = 0;  ///< of any rank; a launch takes any number from 0 to this
    std::uint64_t hidden = 0;      ///< H: elements of a token's output; a multiple of 8
    std::uint64_t features = 0;    ///< I: elements of a row; a multiple of 8
    std::uint32_t experts = 0;     ///< E, over all ranks: who has which is MoeDispatchGemm's rule
    std::uint32_t top_k = 0;       ///< experts of a token, 1 to E
    DataType dtype = DataType::kBf16;
    BLayout b_layout = BLayout::kKN;  ///< of an expert's weights: I x H, or H x I
    Partials partials = Partials::kElement;

    bool operator==(const Shape&) const = default;
  };
  /// Tuning::tile_m: a power of two from 8 to 256; Tuning::tile_n: a multiple of 8. On a GPU both
  /// are the kernel's own: leave them 0.
  using Tuning = mk::Tuning;

  /// Collective: all ranks of the job, same shape, tiles and chunks (kShapeMismatch names the ranks
  /// that differ). The operator must not outlive its session.
  /// kLimitExceeded, with both numbers and at once, when its memory cannot be had on some rank.
  static Result<GemmCombine> create(Session& session, const Shape& shape, const Tuning& tuning);
  static Result<GemmCombine> create(Session& session, const Shape& shape);

  /// Bytes that `create` takes on this rank: of the host, or with Executor::kCuda of the calling
  /// thread's GPU. An operator that shares a workspace (Tuning::own_workspace) takes less, or
  /// none. Not collective.
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning);
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape);

  GemmCombine(GemmCombine&&) noexcept;
  GemmCombine& operator=(GemmCombine&&) noexcept;
  ~GemmCombine();

  /// One rank's input; all dense. Executor::kCuda: in the GPU's memory, y, expert_weights, residual
  /// and `out` at multiples of 16 bytes.
  struct Input {
    /// rows.size() x I, of MoeDispatchGemm's output, or what the caller made of it.
    const void* y = nullptr;
    /// Whose rows they are, and with which weights: MoeDispatchGemm::rows(). kCuda: from there on
    /// as many as y has room for (Output::capacity). The offsets tell the kernel how many there
    /// are.
    std::span<const MoeRow> rows;
    /// MoeDispatchGemm::expert_offsets(). After a dispatch that had no room (kLimitExceeded), give
    /// these and no rows.
    std::span<const std::uint32_t> expert_offsets;
    const void* expert_weights = nullptr;  ///< this rank's experts', one after the other
    const std::int32_t* ids = nullptr;     ///< count x top_k: what was dispatched
    std::uint64_t count = 0;               ///< of this rank's tokens
    const void* residual = nullptr;        ///< count x H; null: none
  };

  /// Collective. Blocks until `out`, count x H in the order of this rank's tokens, is complete.
  ///
  /// - kInvalidArgument for a wrong argument: nothing was launched. The other ranks wait for this
  ///   one until it launches rightly or their deadline.
  /// - kInvalidArgument that names a rank: the rows it combines are not those of this rank's
  ///   tokens.
  /// - kLimitExceeded: the named rank has no rows, because its dispatch had no room. Every rank
  ///   hears of it.
  ///
  /// After the last two nothing of `out` is written, the other ranks have what they could get, and
  /// all may launch again. After any other error the operator is broken and says so at every call.
  ///
  /// On a GPU the kernel looks at rows, offsets and ids. Values that make no sense are then
  /// kInvalidArgument after the launch. Nothing of `out` is written, and all may launch again.
  Result<LaunchStats> launch(const Input& input, void* out, LaunchOptions options = {});

  /// Executor::kCuda: puts a launch on the stream and returns at once, behind the dispatch's on the
  /// same stream. May be captured into a CUDA graph, as MoeDispatchGemm::launch_on. Launches that
  /// wrote nothing, as `launch` has it, only `finish` tells.
  Status launch_on(CudaStream stream, const Input& input, void* out, LaunchOptions options = {});
  /// The first failure among the launches that have ended, or of the session. Does not wait.
  Status status() const;
  /// kCuda: waits for the stream, then answers what the last launch did, or the first failure. If
  /// launches since the last `finish` wrote nothing, it answers why the last of these did so.
  Result<LaunchStats> finish(CudaStream stream);

  /// This rank's experts.
  std::uint32_t first_expert() const;
  std::uint32_t expert_count() const;

  /// Whether later launches keep what their threads did when; costs a little time. On a GPU: no
  /// effect.
  void set_trace(bool on);
  /// The last launch's spans; empty unless traced.
  std::vector<TraceSpan> trace() const;

 private:
  class Impl;
  explicit GemmCombine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk
