/// \file
/// MoE Dispatch+GEMM: every token goes to the ranks that have its experts. Each rank multiplies the
/// tokens that reach it with its experts' weights, while others are still on their way.
///
///     auto op = mk::MoeDispatchGemm::create(*session, {.tokens_max = 4096, .hidden = 4096,
///                                                      .features = 1536, .experts = 64, .top_k =
///                                                      8});
///     auto stats = op->launch({.tokens = x, .ids = ids, .weights = w, .count = t,
///                              .expert_weights = my_experts}, {.y = y, .capacity = rows});
///     op->rows();            // where each row of y came from: what a combine needs
///     op->expert_offsets();  // which rows of y belong to which expert
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk {

/// Where a row of the output comes from.
struct MoeRow {
  std::uint32_t rank = 0;   ///< whose token
  std::uint32_t token = 0;  ///< its row in that rank's input
  std::uint32_t slot = 0;   ///< of its top_k
  float weight = 0;         ///< the routing weight, as that rank gave it
};

/// The operation on a product row, after its bias, before it is rounded. With a gated epilogue an
/// expert's weights have 2 F columns: for each of the output's a gate and an up projection. The
/// output is silu(x gate) * (x up), in fp32.
enum class MoeEpilogue : std::uint32_t {
  kNone = 0,
  kGatedSilu = 1,             ///< all gates, then all up projections
  kGatedSiluInterleaved = 2,  ///< a gate, its up projection, the next gate, ...
};

/// Among W ranks, rank r has the experts e with floor(r E / W) <= e < floor((r + 1) E / W). With E
/// < W some ranks have none. Inputs and output are bf16 or f16. Sums are fp32, and each output
/// element is rounded once. Results are bitwise the same from run to run. With
/// Tuning::batch_invariant the bits of a row depend on its token and on its expert's weights and
/// bias, not on how many tokens there are. A token that goes nowhere, or to other ranks only,
/// changes no bit of a rank's output, NaN and infinities included.
class MK_EXPORT MoeDispatchGemm {
 public:
  struct Shape {
    std::uint64_t tokens_max = 0;  ///< of any rank; a launch takes any number from 0 to this
    std::uint64_t hidden = 0;      ///< H: elements of a token; a multiple of 8
    std::uint64_t features = 0;    ///< F: columns of the output; a multiple of 8
    std::uint32_t experts = 0;     ///< E, over all ranks
    std::uint32_t top_k = 0;       ///< experts of a token, 1 to E
    /// Output rows of one rank, at most. 0: enough for any routing, which may be much memory:
    /// W tokens_max top_k rows of H elements.
    std::uint64_t rows_max = 0;
    DataType dtype = DataType::kBf16;
    BLayout b_layout = BLayout::kKN;  ///< of an expert's weights: H x F, or F x H; gated 2 F
    MoeEpilogue epilogue = MoeEpilogue::kNone;
    bool bias = false;  ///< launches bring one element for each column of an expert's weights

    bool operator==(const Shape&) const = default;
  };
  /// Tuning::tile_m: a power of two from 8 to 256; Tuning::tile_n: a multiple of 8. On a GPU both
  /// are the kernel's own: leave them 0.
  using Tuning = mk::Tuning;

  /// Collective: all ranks of the job, same shape, tiles and chunks (kShapeMismatch names the ranks
  /// that differ). The operator must not outlive its session.
  /// kLimitExceeded, with both numbers and at once, when its memory cannot be had on some rank.
  static Result<MoeDispatchGemm> create(Session& session, const Shape& shape, const Tuning& tuning);
  static Result<MoeDispatchGemm> create(Session& session, const Shape& shape);

  /// Bytes that `create` takes on this rank: of the host, or with Executor::kCuda of the calling
  /// thread's GPU. Each has rows of its own. Not collective.
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning);
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape);

  MoeDispatchGemm(MoeDispatchGemm&&) noexcept;
  MoeDispatchGemm& operator=(MoeDispatchGemm&&) noexcept;
  ~MoeDispatchGemm();

  /// One rank's input; all dense. Executor::kCuda: in the GPU's memory, tokens, expert_weights and
  /// bias at multiples of 16 bytes, as y.
  struct Input {
    const void* tokens = nullptr;          ///< count x H
    const std::int32_t* ids = nullptr;     ///< count x top_k, each 0 to E - 1, or -1: nowhere
    const float* weights = nullptr;        ///< count x top_k; handed through to the rows; of an
                                           ///< id of -1, anything
    std::uint64_t count = 0;               ///< tokens; ranks may differ, 0 is allowed
    const void* expert_weights = nullptr;  ///< this rank's experts', one after the other
    const void* bias = nullptr;            ///< likewise, if the shape has one; else null
  };
  /// Where the output goes.
  struct Output {
    void* y = nullptr;           ///< capacity x F; the first rows().size() rows are written
    std::uint64_t capacity = 0;  ///< rows y has room for
  };

  /// Collective. Blocks until this rank's rows of y are complete.
  ///
  /// - kInvalidArgument (a wrong argument, an id out of range, a weight that is not a number):
  ///   nothing was launched. The other ranks wait for this one until it launches rightly or their
  ///   deadline.
  /// - kLimitExceeded: the routing sends this rank more rows than `capacity`; the sentence says how
  ///   many. Nothing of y is written. This rank did its part for the others, whose launches
  ///   succeed, and all may launch again.
  ///
  /// After any other error the operator is broken and says so at every call.
  ///
  /// On a GPU the kernel looks at the routing. An id out of range, or a weight that is not a
  /// number, is then kInvalidArgument on all ranks, with that token. No rank computes anything. All
  /// may launch again.
  Result<LaunchStats> launch(const Input& input, const Output& output, LaunchOptions options = {});

  /// Executor::kCuda: puts a launch on the stream and returns at once. May be captured into a CUDA
  /// graph. A replay has the same addresses and count, and takes what routing, tokens and weights
  /// are there then. A launch that fails while it runs ends, with its output undefined; `status`
  /// and later calls say why. Launches that computed nothing, as `launch` has it, only `finish`
  /// tells. Launches of one operator follow each other; those of ranks that share a GPU go to
  /// streams of their own. (`launch` waits for its end.)
  Status launch_on(CudaStream stream, const Input& input, const Output& output,
                   LaunchOptions options = {});
  /// The first failure among the launches that have ended, or of the session. Does not wait.
  Status status() const;
  /// kCuda: waits for the stream, then answers what the last launch did, or the first failure. If
  /// launches since the last `finish` computed nothing, it answers why the last of these did so.
  Result<LaunchStats> finish(CudaStream stream);

  /// This rank's experts.
  std::uint32_t first_expert() const;
  std::uint32_t expert_count() const;

  /// expert_count() + 1 numbers of the last launch, valid until the next one. Expert first_expert()
  /// + i has the rows [expert_offsets()[i], expert_offsets()[i + 1]) of y.
  ///
  /// kCuda: in the GPU's memory, always at the same address. Kernels behind the launch can use
  /// them.
  std::span<const std::uint32_t> expert_offsets() const;
  /// One for each row of y of the last launch, valid until the next one.
  ///
  /// kCuda: likewise in the GPU's memory. The host knows their number after `launch` or `finish`.
  std::span<const MoeRow> rows() const;

  /// Whether later launches keep what their threads did when; costs a little time. On a GPU: no
  /// effect.
  void set_trace(bool on);
  /// The last launch's spans; empty unless traced.
  std::vector<TraceSpan> trace() const;

 private:
  class Impl;
  explicit MoeDispatchGemm(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk
