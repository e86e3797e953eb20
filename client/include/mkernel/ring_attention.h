/// \file
/// Ring Attention: attention over a sequence that is spread over all ranks. Each rank computes its
/// queries' attention over the keys and values of all ranks, while those of others are still on
/// their way.
///
///     auto op = mk::RingAttention::create(*session, {.seq_max = 65536, .query_heads = 32,
///                                                    .key_heads = 8, .head_dim = 128,
///                                                    .causal = true});
///     auto stats = op->launch({.q = q, .k = k, .v = v}, {.out = out}, seq);
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk {

/// The rows of the sequence that one rank has: one part, or two, which follow each other in its
/// tensors.
struct SequenceRows {
  RowRange parts[2];
  constexpr std::uint64_t count() const { return parts[0].count + parts[1].count; }
};
/// How a sequence of `seq` rows is dealt out. Without a mask rank r of W has the r-th of W parts.
/// Causal, it has parts r and 2W-1-r of 2W ("zigzag"). The first sees less than the average and the
/// second more, so all ranks have the same work. A rank that is not below W has no rows.
constexpr SequenceRows sequence_rows_of_rank(std::uint64_t seq, bool causal, std::uint32_t world,
                                             std::uint32_t rank) {
  if (rank >= world) return {};
  if (!causal) return {{rows_of_rank(seq, world, rank), {}}};
  const std::uint64_t parts = std::uint64_t{2} * world;
  return {{rows_of_rank(seq, parts, rank), rows_of_rank(seq, parts, parts - 1 - rank)}};
}

/// The most rows that any rank has of `sequences` sequences with `seq` rows in all, whatever their
/// lengths. A graph whose replays have other lengths needs room for so many.
constexpr std::uint64_t packed_rows_max(std::uint64_t seq, std::uint64_t sequences, bool causal,
                                        std::uint32_t world) {
  const std::uint64_t most = seq / world + sequences * (causal ? 2 : 1);
  return most < seq ? most : seq;
}

/// O = softmax(scale Q K^T) V, for each sequence of a batch and each query head. Query head h uses
/// key head h / (query_heads / key_heads). Tensors are bf16 or f16, everything between them is
/// fp32; kernels/ops/ring/README.md has the error bound. Results are bitwise the same from run to
/// run. With Tuning::batch_invariant the bits of a row depend on its head's queries, keys and
/// values in its own sequence, on that sequence's length, on the tiles of keys and on the ranks.
/// The rest of the batch, other heads, other packed sequences and seq_max change no bit. Rows that
/// the causal mask hides from a row change no bit of it, NaN and infinities included.
class MK_EXPORT RingAttention {
 public:
  struct Shape {
    /// Rows over all ranks; a launch takes any number from one for each part to this: W parts, or
    /// 2W when causal. With `sequences_max` it may have fewer; some ranks have none then.
    std::uint64_t seq_max = 0;
    std::uint32_t query_heads = 0;  ///< a multiple of key_heads; at most 1024
    std::uint32_t key_heads = 0;    ///< of K and of V
    std::uint32_t head_dim = 0;     ///< 64 or 128
    bool causal = false;            ///< a row sees itself and what is before it in the sequence
    DataType dtype = DataType::kBf16;
    std::uint32_t batch = 1;  ///< sequences of one length; each is spread over all ranks
    /// The most sequences of different lengths in one launch. Then seq_max counts their rows in
    /// all, and batch is 1. 0: all sequences of a launch have one length.
    std::uint32_t sequences_max = 0;

    bool operator==(const Shape&) const = default;
  };
  /// Tuning::tile_m: sequence rows of a tile of queries; Tuning::tile_n: keys of a tile. On a GPU
  /// both are the kernel's own, and so are its passes: leave them 0.
  struct Tuning : mk::Tuning {
    /// In how many stretches queries meet the keys of other nodes, 1 to 8. More of them wait less
    /// for the network, and touch the fp32 state of the output more often.
    std::uint32_t remote_passes = 0;

    bool operator==(const Tuning&) const = default;
  };

  /// Collective: all ranks of the job, same shape, tiles, chunks and passes (kShapeMismatch names
  /// the ranks that differ). The operator must not outlive its session.
  /// kLimitExceeded, with both numbers and at once, when its memory cannot be had on some rank.
  static Result<RingAttention> create(Session& session, const Shape& shape, const Tuning& tuning);
  static Result<RingAttention> create(Session& session, const Shape& shape);

  /// Bytes that `create` takes on this rank: of the host, or with Executor::kCuda of the calling
  /// thread's GPU. An operator that shares a workspace (Tuning::own_workspace) takes less, or
  /// none. Not collective.
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape,
                                               const Tuning& tuning);
  static Result<std::uint64_t> workspace_bytes(const Session& session, const Shape& shape);

  RingAttention(RingAttention&&) noexcept;
  RingAttention& operator=(RingAttention&&) noexcept;
  ~RingAttention();

  /// One rank's input: its rows of each sequence (sequence_rows_of_rank), each of heads x head_dim
  /// elements. Strides are in elements, `..._stride` from row to row; 0: as
  /// [sequence][row][head][head_dim] without gaps. On CPUs the heads of a row follow each other:
  /// head strides are for GPUs, where [sequence][head][row][head_dim] is possible, too.
  /// Executor::kCuda: strides are multiples of 8, addresses of 16 bytes.
  struct Input {
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    std::uint64_t q_stride = 0;
    std::uint64_t k_stride = 0;
    std::uint64_t v_stride = 0;
    double scale = 0;  ///< of the scores; 0: 1 / sqrt(head_dim). On a GPU not negative
    std::uint64_t q_head_stride = 0;
    std::uint64_t k_head_stride = 0;
    std::uint64_t v_head_stride = 0;
    std::uint64_t q_batch_stride = 0;
    std::uint64_t k_batch_stride = 0;
    std::uint64_t v_batch_stride = 0;
    /// With Shape::sequences_max: where each of the `sequences` sequences begins among the rows of
    /// all ranks, and where the last one ends (FlashAttention's cu_seqlens). Each is dealt out by
    /// itself: a rank's rows are its sequence_rows_of_rank of the first, then those of the second,
    /// and so on. Some ranks have no rows of a short one, and one may be empty. The same on all
    /// ranks (kShapeMismatch, whose m stands for the lengths). Executor::kCuda: in the GPU's
    /// memory. They are read when the launch runs, so another launch or the next replay of a graph
    /// may have others.
    const std::uint32_t* sequence_starts = nullptr;
    std::uint32_t sequences = 0;
    /// With sequence_starts: rows that this rank's tensors have room for, which no lengths may
    /// exceed. 0 means enough. On a GPU that is as many as any lengths may give it,
    /// packed_rows_max.
    std::uint64_t rows = 0;
  };
  /// Where the output goes; must not overlap the input.
  struct Output {
    void* out = nullptr;  ///< like q
    std::uint64_t out_stride = 0;
    /// [sequence][row][query head], ln of the sum of exp(scores); or null. On a GPU in any strides.
    float* lse = nullptr;
    std::uint64_t out_head_stride = 0;
    std::uint64_t out_batch_stride = 0;
    std::uint64_t lse_stride = 0;
    std::uint64_t lse_head_stride = 0;
    std::uint64_t lse_batch_stride = 0;
  };

  /// Collective, same `seq`, the rows of the whole sequence (with Shape::sequences_max: of all; on
  /// a GPU as many at most), on all ranks. Blocks until this rank's output is complete. A wrong
  /// argument (kInvalidArgument) changes nothing. After any other error the operator is broken and
  /// says so at every call.
  Result<LaunchStats> launch(const Input& input, const Output& output, std::uint64_t seq,
                             LaunchOptions options = {});

  /// Executor::kCuda: puts a launch on the stream and returns at once; all tensors are in the GPU's
  /// memory. May be captured into a CUDA graph, which then replays it with the same addresses and
  /// `seq`. A launch that fails while it runs ends, with its output undefined, and breaks the
  /// operator: `status` and later calls say why. Launches of one operator follow each other; those
  /// of ranks that share a GPU go to streams of their own. (`launch` without a stream waits for its
  /// end.)
  Status launch_on(CudaStream stream, const Input& input, const Output& output, std::uint64_t seq,
                   LaunchOptions options = {});
  /// The first failure among the launches that have ended, or of the session. Does not wait.
  Status status() const;
  /// kCuda: waits for the stream, then answers what the last launch did, or the first failure.
  Result<LaunchStats> finish(CudaStream stream);

  /// Whether later launches keep what their threads or, on a GPU, their blocks did when; costs a
  /// little time.
  void set_trace(bool on);
  /// The last launch's spans; empty unless traced.
  std::vector<TraceSpan> trace() const;

 private:
  class Impl;
  explicit RingAttention(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk
