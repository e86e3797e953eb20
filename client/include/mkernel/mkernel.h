/// \file
/// libmkclient: attach to this node's mkerneld, share buffers with it and with the other ranks of
/// the job, and run fused multi-GPU, multi-node operators.
///
///     auto options = mk::AttachOptions::from_environment();          // torchrun, srun, mpirun, or
///     set by hand auto session = mk::Session::attach(*options);                  // returns when
///     the whole job is up auto op = mk::GemmAllReduce::create(*session, {.m_max = 4096, .n = 4096,
///     .k = 512}); auto stats = op->launch(a, b, c, m);                           // C = sum over
///     ranks of A B, on every rank
///
/// Threads: a Session may be used by several threads; its collective calls (exchange, barrier,
/// creating and launching operators) must be made in the same order on all ranks of the job. An
/// operator is used by one thread at a time, and the operators of one session launch one after the
/// other. Errors: every call answers mk::Result and
/// nothing throws, but for std::bad_alloc when the process is out of memory. A session that failed
/// (a rank died, the daemon went away, a link broke) stays failed: every later call answers the
/// same error. Attach anew to go on.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shm/host/expected.h"

#if defined(__GNUC__)
#define MK_EXPORT __attribute__((visibility("default")))
#else
#define MK_EXPORT
#endif

namespace mk {

/// The library's version, "major.minor.patch".
MK_EXPORT const char* version();

/// How a rank finds its daemon and its place in the job. Ranks are node-major: rank = node_rank *
/// local_size + local_rank.
struct MK_EXPORT AttachOptions {
  /// The daemon's client socket; empty: $MKERNEL_SOCKET, else /run/mkernel/mkerneld.sock. '@' names
  /// the abstract namespace.
  std::string socket;
  std::string job;  ///< the same on all ranks; one daemon runs one job of a name at a time
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::uint32_t node_rank = 0;
  std::uint32_t nodes = 1;
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  std::uint32_t lanes =
      2;  ///< command rings: the most send blocks an operator of this session may have
  /// Arrival flags, which operators take when they are created and never give back; 64 to 65536, in
  /// steps of 64. A GEMM+AllReduce on N nodes takes about 128 (N - 1), more with many chunks.
  std::uint32_t arrival_flags = 65'536;
  std::chrono::milliseconds timeout{
      60'000};  ///< for the whole job to come up; the error then lists the missing ranks
  /// The daemon counts as lost when its heartbeat is older than this.
  std::chrono::milliseconds heartbeat_timeout{5'000};

  /// Reads the launcher's environment: MKERNEL_{JOB,RANK,WORLD_SIZE,LOCAL_RANK,LOCAL_SIZE} first,
  /// then torchrun's, Slurm's and Open MPI's variables. kInvalidArgument says which variable is
  /// missing or makes no sense.
  static Result<AttachOptions> from_environment();
};

/// Memory that the daemon, its NIC and the local ranks can reach. Owned by the session it came
/// from: freed by `Session::free_buffer` or with the session.
struct Buffer {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint16_t handle = 0;
};

class GemmAllReduce;

/// One rank attached to its daemon. Movable; detaches when destroyed.
class MK_EXPORT Session {
 public:
  /// Attaches and waits until all ranks of the job are attached and their links connected.
  static Result<Session> attach(const AttachOptions& options);

  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();

  const AttachOptions& options() const;
  /// The network between the nodes, e.g. "loopback" or "ofi:tcp;ofi_rxm".
  const std::string& fabric() const;

  /// Zeroed memory, registered with the daemon. `name` shows in the daemon's listings.
  Result<Buffer> alloc_buffer(std::uint64_t bytes, std::string_view name);
  Status free_buffer(const Buffer& buffer);

  /// An all-gather of small blobs (at most 64 KiB each) over the job, by rank. `tag` must be the
  /// same on all ranks.
  Result<std::vector<std::vector<std::byte>>> exchange(
      std::string_view tag, std::span<const std::byte> blob,
      std::chrono::milliseconds timeout = std::chrono::milliseconds{60'000});
  /// Returns when every rank of the job has called it.
  Status barrier(std::chrono::milliseconds timeout = std::chrono::milliseconds{60'000});

  /// Ok while the session is well; else why it failed.
  Status status() const;
  /// Leaves the job in an orderly way; the session is unusable afterwards. The destructor does the
  /// same, silently. The other ranks have 10 s to leave as well, then their sessions fail with
  /// kPeerLost, naming this rank; an exchange or a barrier without it fails them at once. A rank
  /// that has work of its own left (a checkpoint) should pass a barrier with the others after it,
  /// before any of them detaches.
  Status detach();

  class Impl;

 private:
  friend class GemmAllReduce;
  explicit Session(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

enum class DataType : std::uint32_t { kBf16 = 1, kF16 = 2 };
constexpr std::size_t bytes_of(DataType) { return 2; }
/// "bf16", "f16".
MK_EXPORT const char* name_of(DataType type);

/// How B lies in memory.
enum class BLayout : std::uint32_t {
  kKN = 0,  ///< row-major K x N
  kNK = 1,  ///< row-major N x K: the usual layout of a linear layer's weight
};

/// How a launch is executed.
enum class LaunchMode : std::uint32_t {
  kFused = 0,    ///< computation, local exchange and network overlap tile by tile
  kUnfused = 1,  ///< the whole GEMM first, then the collective: the baseline
};

/// What one launch did, on this rank.
struct LaunchStats {
  std::uint32_t epoch = 0;
  LaunchMode mode = LaunchMode::kFused;
  std::uint64_t total_ns = 0;
  std::uint64_t compute_ns = 0;        ///< until this rank's last tile was computed
  std::uint64_t network_bytes = 0;     ///< payload this rank sent
  std::uint64_t network_commands = 0;  ///< commands this rank wrote, flag-only ones included
};

/// C[M, N] = sum over all ranks r of A_r[M, K] * B_r[K, N]; every rank gets the whole C, bitwise
/// the same on all ranks and from run to run. Inputs and output bf16 or f16, sums in fp32
/// (kernels/gemm_ar/README.md has the error bound).
class MK_EXPORT GemmAllReduce {
 public:
  struct Shape {
    std::uint64_t m_max = 0;  ///< rows of A and C; a launch takes any m from 1 to this
    std::uint64_t n = 0;      ///< columns of B and C
    std::uint64_t k = 0;      ///< this rank's share of the inner dimension; ranks may differ
    DataType dtype = DataType::kBf16;
    BLayout b_layout = BLayout::kKN;
  };
  /// Zero means: the default, chosen from the shape and the machine.
  struct Tuning {
    std::uint32_t tile_m = 0;
    std::uint32_t tile_n = 0;
    std::uint32_t chunk_bytes = 0;  ///< of one network transfer; default 256 KiB
    std::uint32_t compute_blocks = 0;
    std::uint32_t reduce_blocks = 0;
    std::uint32_t send_blocks = 0;
    std::uint32_t receive_blocks = 0;
    std::chrono::milliseconds wait_timeout{30'000};  ///< of every single wait inside a launch
  };

  /// Collective: all ranks of the job, same shape and tuning (kShapeMismatch names the ranks that
  /// differ). The operator must not outlive its session.
  static Result<GemmAllReduce> create(Session& session, const Shape& shape, const Tuning& tuning);
  static Result<GemmAllReduce> create(Session& session, const Shape& shape);

  GemmAllReduce(GemmAllReduce&&) noexcept;
  GemmAllReduce& operator=(GemmAllReduce&&) noexcept;
  ~GemmAllReduce();

  /// Collective, same `m` on all ranks. A: m x k, B: by Shape::b_layout, C: m x n, all dense.
  /// Blocks until C is complete. `c` may be null: then read `output()`. After an error the operator
  /// is broken and says so at every call.
  Result<LaunchStats> launch(const void* a, const void* b, void* c, std::uint64_t m,
                             LaunchMode mode = LaunchMode::kFused);
  /// The last launch's result, m x n row-major; valid until the next launch. Peers write here
  /// during a launch only.
  const void* output() const;

 private:
  class Impl;
  explicit GemmAllReduce(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk
