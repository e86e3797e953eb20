/// \file
/// What all operators share: element types, layouts, modes, what a launch did.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "mkernel/session.h"

struct CUstream_st;

namespace mk {

/// The type of a matrix's elements. kF32 is for Collective; operators that multiply refuse it.
enum class DataType : std::uint32_t { kBf16 = 1, kF16 = 2, kF32 = 3 };
/// Bytes of an element.
constexpr std::size_t bytes_of(DataType type) { return type == DataType::kF32 ? 4 : 2; }
/// "bf16", "f16", "f32".
MK_EXPORT const char* name_of(DataType type);

/// How B lies in memory.
enum class BLayout : std::uint32_t {
  kKN = 0,  ///< row-major K x N
  kNK = 1,  ///< row-major N x K: the usual layout of a linear layer's weight
};

/// The function of each element s of a product, in fp32.
enum class Activation : std::uint32_t {
  kNone = 0,
  kRelu = 1,  ///< max(s, 0)
  kGelu = 2,  ///< s (1 + erf(s / sqrt(2))) / 2
  kSilu = 3,  ///< s / (1 + exp(-s))
  /// Columns alternate: a gate g, then its up projection u. C has one column of two, silu(g) u: n /
  /// 2 of them.
  kGatedSilu = 4,
};

/// The last step on the whole sum before its only rounding to C's type. The bias is added, then
/// comes the activation. Sums over ranks are complete by then.
struct Epilogue {
  Activation activation = Activation::kNone;
  bool bias = false;  ///< launches bring one element for each of B's columns

  bool operator==(const Epilogue&) const = default;
};

/// The type in which partial sums travel: of a rank's product, of a node's sum.
enum class Partials : std::uint32_t {
  kElement = 0,  ///< the element type: each is rounded to it
  kF32 = 1,      ///< in fp32: twice the bytes, and no rounding
};

/// The arguments of a launch of a product over all ranks. The operator's class says where the
/// pointers lead. Pitches are in elements from row to row; 0 is a matrix without gaps. C may lie
/// beside the other matrices in rows of one buffer, but shares no element with them. Pitches are at
/// most 2^38. On a GPU they are multiples of 8 elements, and all pointers of 16 bytes.
struct GemmArguments {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  std::uint64_t m = 0;
  const void* bias = nullptr;  ///< if the shape's epilogue has one: n elements
  std::uint64_t lda = 0;
  std::uint64_t ldb = 0;
  std::uint64_t ldc = 0;
  void* gathered = nullptr;  ///< AllGatherGemm: m x k without gaps, gets the whole A; or null
};

/// Rows [first, first + count) of a matrix.
struct RowRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};
/// How operators deal rows out over ranks: rank r of W has [floor(r rows / W), floor((r + 1) rows /
/// W)). Counts differ by one at most; with fewer rows than ranks some are 0, and a rank that is not
/// below W has none. `rows` < 2^31, W < 2^33.
constexpr RowRange rows_of_rank(std::uint64_t rows, std::uint64_t world, std::uint64_t rank) {
  if (rank >= world) return {};
  const std::uint64_t first = rows * rank / world;
  return {first, rows * (rank + 1) / world - first};
}

/// How a launch is executed.
enum class LaunchMode : std::uint32_t {
  kFused = 0,    ///< computation, local exchange and network overlap tile by tile
  kUnfused = 1,  ///< the whole GEMM first, then the collective: the baseline
  kAuto = 2,     ///< the form that the estimate for this rank, shape and machine expects faster
};

/// How a launch is executed, and what it is for. Each rank's own.
struct LaunchOptions {
  LaunchOptions() = default;
  /// With the form alone, as a LaunchMode.
  LaunchOptions(LaunchMode form, std::uint64_t mark = 0)  // NOLINT(google-explicit-constructor)
      : mode(form), tag(mark) {}

  LaunchMode mode = LaunchMode::kAuto;
  /// The caller's number for the launch (a layer, a step), which tools show with it: traces,
  /// `mkctl session list`, `who-is-slow`, NVTX. 0: none. A captured graph replays it.
  std::uint64_t tag = 0;
};

/// The hardware that computes an operator. All ranks must choose the same.
enum class Executor : std::uint32_t {
  /// Threads of this process; matrices in host memory.
  kCpu = 0,
  /// A kernel on the GPU (H100, H200) that is the calling thread's when the operator is created;
  /// matrices in its memory. In builds with CUDA.
  kCuda = 1,
};

/// cudaStream_t.
using CudaStream = CUstream_st*;

/// Numbers of one rank's machine, in place of the machine file's (kernels/plan/machines). 0: the
/// file's. On a GPU rank 0's count for all ranks, and what is chosen for a launch goes by them; on
/// a CPU LaunchMode::kAuto's estimate does.
struct MachineRates {
  double flops_per_s = 0;          ///< of all its compute threads
  double local_bytes_per_s = 0;    ///< read plus written, of its sums and copies
  double network_bytes_per_s = 0;  ///< to other nodes
  double command_ns = 0;           ///< time of a network transfer besides its bytes
  double step_ns = 0;              ///< time that the hand-off of a chunk costs the fused form

  bool operator==(const MachineRates&) const = default;
};

/// How the nodes' sums of a GEMM+AllReduce come together. kAuto: as the planner predicts it to be
/// quicker. kOneShot: each node sends its sums to all others, and adds up all: N - 1 times its
/// share of C, one hop. kTwoShot: one node adds up each chunk and sends the result to the others:
/// about twice the share whatever N is, two hops.
enum class Exchange : std::uint8_t { kAuto = 0, kOneShot = 1, kTwoShot = 2 };

/// A rank's threads or SMs compute, or they share or sum rows within the node. kPlanned: each keeps
/// its role, by Tuning's numbers. kAdaptive, in fused launches: in AllGather+GEMM,
/// GEMM+ReduceScatter and GEMM+AllReduce on CPUs a thread goes over from one task to the next.
/// Measured costs and the work that is left say how many do which. On GPUs, and on CPUs in Ring
/// Attention, MoE Dispatch+GEMM and GEMM+Combine, SMs or threads go over from launch to launch, to
/// where launches are quickest. Each role keeps one. A captured launch keeps the numbers that were
/// best then. Tuning's numbers are the first ones. Elsewhere kUnsupported. The bits of the result
/// do not depend on it.
enum class Partition : std::uint8_t { kPlanned = 0, kAdaptive = 1 };

/// The way of Ring Attention's keys and MoE Dispatch's tokens to a node's other ranks on GPUs.
/// kAuto: the planner predicts which is quicker. kEngines: copy engines, which take no SMs. Keys:
/// on one node, with sequences of one length and all heads in the workspace at a time, else
/// kInvalidArgument; they are quickest where heads of a row follow each other. kWarpgroups: SMs.
enum class Transport : std::uint8_t { kAuto = 0, kEngines = 1, kWarpgroups = 2 };

/// Choices of a rank for any operator. 0 means the default, from the shape and the machine. Ranks
/// must agree on executor, tiles, chunks and transport. All else is each rank's own.
struct Tuning {
  Executor executor = Executor::kCpu;
  std::uint32_t tile_m = 0;       ///< rows of a tile
  std::uint32_t tile_n = 0;       ///< columns of a tile
  std::uint32_t chunk_bytes = 0;  ///< payload of one network transfer
  // Resources of each role: SMs on a GPU, threads on CPUs. A role that an operator does not have
  // ignores its number.
  std::uint32_t compute_sms = 0;
  std::uint32_t reduce_sms = 0;
  /// Each thread that sends has a command ring: on CPUs at most AttachOptions::lanes. An SM has
  /// three such threads, or as many as there are rings, if those are less.
  std::uint32_t send_sms = 0;
  std::uint32_t receive_sms = 0;
  /// AllGather+GEMM on a GPU: 0 lets copy engines share many rows, which takes no SMs.
  std::uint32_t share_sms = 0;
  std::uint32_t pull_sms = 0;
  /// Deadline of each wait inside a launch, more than 0. More than a year counts as a year, on a
  /// GPU more than 5 minutes as 5 minutes. A launch that misses it ends with kTimeout, which names
  /// the rank that is behind.
  std::chrono::milliseconds wait_timeout{30'000};
  MachineRates rates;
  /// The planner's files. The first is a machine file (`mkbench calibrate` writes one), or the name
  /// of a shipped one: "H100", "H200", "CPU". The second, for GPUs, is a tuned.json. Empty:
  /// $MKERNEL_MACHINE and $MKERNEL_TUNED, else what is shipped. On GPUs rank 0's count for all
  /// ranks.
  std::string machine_file;
  std::string tuned_file;
  /// The bits of a row of the output then depend on that row's own inputs, on the weights and on
  /// the ranks alone. They do not depend on how many rows there are, nor on m_max, tiles or any
  /// other choice. A row of Ring Attention also has its sequence, and its tiles of keys, as inputs;
  /// the rest of the batch, other heads and other sequences change no bit. Every operator promises
  /// this on GPUs and on CPUs. On CPUs products then take a loop of our own in place of oneDNN. To
  /// be set on all ranks: on CPUs kShapeMismatch names those that differ.
  bool batch_invariant = false;
  /// GEMM+AllReduce, GEMM+ReduceScatter and GEMM+Combine on CPUs: fill in
  /// LaunchStats::nonfinite_partials, which takes another look at all that is added. On a GPU:
  /// kUnsupported. It has no effect on operators that add no partial sums. Ranks may differ.
  bool count_nonfinite = false;
  /// Operators of a session that are created alike share one workspace, and with it their epochs
  /// and traces (but for MoE Dispatch). Unlike ones share its data, too: it is as large as the
  /// largest needs. They take turns, so all ranks launch them in one order, and no rank launches
  /// while one is created. A failed launch breaks all that share. True: this one shares with none.
  /// So a shard or a result may stay in it. If one rank sets it, no rank's shares.
  bool own_workspace = false;
  /// GEMM+AllReduce over three nodes or more; elsewhere kTwoShot is refused, or of no effect. The
  /// same on all ranks; the bits of the result do not depend on it.
  Exchange exchange = Exchange::kAuto;
  /// Ranks may differ. It has no effect where a node has one rank (GEMM+AllReduce,
  /// GEMM+ReduceScatter) or the job has.
  Partition partition = Partition::kPlanned;
  /// Ring Attention and MoE Dispatch on GPUs, several ranks of a node; elsewhere it has no effect.
  /// The bits of the result do not depend on it.
  Transport transport = Transport::kAuto;

  bool operator==(const Tuning&) const = default;
};

/// Figures of one launch, on this rank.
struct LaunchStats {
  std::uint32_t epoch = 0;               ///< launches of its workspace so far: 1, 2, 3, ...
  LaunchMode mode = LaunchMode::kFused;  ///< as run: kFused or kUnfused
  std::uint64_t total_ns = 0;            ///< from its begin to its end on this rank
  std::uint64_t compute_ns = 0;          ///< until this rank's last tile was computed
  std::uint64_t network_bytes = 0;       ///< payload this rank sent
  std::uint64_t network_commands = 0;    ///< commands this rank wrote, flag-only ones included
  std::uint64_t compute_wait_ns = 0;     ///< the part of compute_ns in waits: mean of its threads
  // The estimates of kAuto, whatever was run.
  std::uint64_t estimated_fused_ns = 0;
  std::uint64_t estimated_unfused_ns = 0;
  /// With Tuning::count_nonfinite: how many elements of the partial sums that this rank added were
  /// NaN or infinite. Partial sums are products of one rank or expert, and sums of one node. Where
  /// inputs are finite, these have overflowed the element type.
  std::uint64_t nonfinite_partials = 0;
  // For an adaptive partition (Tuning::partition); else all 0.
  std::uint32_t partition_first = 0;  ///< threads (SMs) that were to communicate, at the begin
  std::uint32_t partition_last = 0;   ///< the same, when that was last decided
  /// How often it changed in the launch; where it does so between launches: since the first one.
  std::uint32_t partition_moves = 0;
  std::uint64_t partition_turns = 0;  ///< how often a thread went over to the other kind of task
};

/// Something one thread of a launch did, for traces: kernels/comm/trace.h says what `kind`, the
/// indices and `rank` mean. Times are of CLOCK_MONOTONIC, comparable between ranks of one machine.
struct TraceSpan {
  const char* role = "";  ///< "compute", "reduce", "send", "receive", ...
  std::uint32_t block = 0;
  /// "tile", "sum", "copy", "send", "arrival", "wait"; of role "partition" "target": how many
  /// threads are to communicate, and how many did when that was decided.
  const char* kind = "";
  std::uint32_t index[2] = {};
  std::uint32_t rank = 0;
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
};

}  // namespace mk
