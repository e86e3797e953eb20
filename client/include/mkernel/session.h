/// \file
/// A rank's session with its node's mkerneld: attach, shared buffers, exchange, failure.
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

/// The library's version, "0.1.0" or with a revision, "0.1.0+...". The string lives as long as the
/// library.
MK_EXPORT const char* version();

/// How a rank finds its daemon and its place in the job. Ranks are numbered node by node: rank =
/// node_rank * local_size + local_rank. All nodes have the same number of ranks.
struct MK_EXPORT AttachOptions {
  /// The daemon's client socket, a path of at most 107 bytes; empty: $MKERNEL_SOCKET, else
  /// /run/mkernel/mkerneld.sock. '@' names the abstract namespace. The process that listens there
  /// must belong to root, this user, "mkernel" or the user of $MKERNEL_DAEMON_UID (else
  /// kPermission).
  std::string socket;
  /// The job's name, the same on all ranks. A daemon runs one job of a name at a time. 1 to 128
  /// bytes of printable ASCII without spaces.
  std::string job;
  /// A secret of the job's ranks, at most 128 bytes of any values. No process joins the job without
  /// it. Empty: $MKERNEL_JOB_SECRET, else the user id alone keeps others out.
  std::string job_secret;
  std::uint32_t rank = 0;        ///< 0 to world - 1
  std::uint32_t world = 1;       ///< ranks of the job: nodes * local_size, at most 8192
  std::uint32_t node_rank = 0;   ///< 0 to nodes - 1
  std::uint32_t nodes = 1;       ///< at most 1024
  std::uint32_t local_rank = 0;  ///< 0 to local_size - 1
  std::uint32_t local_size = 1;  ///< ranks of a node, at most 16
  /// Command rings, 1 to 16: the most send blocks that an operator of this session may have.
  std::uint32_t lanes = 2;
  /// Arrival flags of all operators that this session has at once; 64 to 65536, in steps of 64. An
  /// operator on N nodes takes about 128 (N - 1), more with many chunks, and at most 4096 (MoE
  /// Dispatch+GEMM 8192). Its flags are free again when all ranks have destroyed it.
  std::uint32_t arrival_flags = 65'536;
  /// PCI address of this rank's GPU, "0000:1b:00.0": its daemon gives it the nearest rail (NIC).
  /// Empty: the calling thread's GPU if it has a CUDA context, else the GPU that
  /// CUDA_VISIBLE_DEVICES and the local rank name. Without any, the job's ranks take rails in turn.
  std::string gpu;
  /// The number of the rail; -1: $MKERNEL_RAIL, else the daemon's choice.
  std::int32_t rail = -1;
  /// How long `attach` waits for the whole job. Its error lists the missing ranks. Times, here and
  /// below, are more than 0; more than a day counts as a day.
  std::chrono::milliseconds timeout{60'000};
  /// The daemon counts as lost when its heartbeat is older than this.
  std::chrono::milliseconds heartbeat_timeout{5'000};

  /// Reads the launcher's environment: MKERNEL_{JOB,RANK,WORLD_SIZE,LOCAL_RANK,LOCAL_SIZE} first,
  /// then the variables of torchrun, Open MPI, MPICH, Intel MPI, PALS, Flux, Slurm and PMIx.
  /// MKERNEL_* may add what a launcher does not say (PMIx says no sizes). The error,
  /// kInvalidArgument, names the variable that is missing or makes no sense, or those that
  /// contradict each other, with their values. Nodes with different numbers of ranks are refused,
  /// too.
  static Result<AttachOptions> from_environment();

  /// The options of rank `rank` of a job on `nodes` nodes with `local_size` ranks each, with
  /// defaults for all else. For callers that start ranks without a launcher. `attach` checks them.
  static AttachOptions of_rank(std::string job, std::uint32_t rank, std::uint32_t nodes,
                               std::uint32_t local_size);

  /// The options of this process in a group of the job's ranks. Tensor-, data- or expert-parallel
  /// groups of one launch are jobs of their own, and a process may be in several at once. The place
  /// in the launch, and all else, is that of `whole`. The group's `ranks` are in rising order, this
  /// process's among them, and as many on every node. Rank i of the group is ranks[i]. `name`,
  /// printable ASCII without spaces, tells groups of the same ranks apart. The group's job is
  /// "<job>.<name>.<digest of ranks>". kInvalidArgument says what breaks these rules.
  static Result<AttachOptions> of_group(const AttachOptions& whole,
                                        std::span<const std::uint32_t> ranks,
                                        std::string_view name = "group");
};

/// Where a buffer lies.
enum class MemoryKind : std::uint32_t {
  kHost = 0,
  kDevice = 1,  ///< on the calling thread's GPU; a session uses one GPU
};

/// Memory that the daemon, its NIC and the local ranks can reach. The session owns it, and frees it
/// in `Session::free_buffer` or when it is destroyed.
struct Buffer {
  std::byte* data = nullptr;  ///< kDevice: a device address
  std::uint64_t bytes = 0;
  std::uint16_t handle = 0;  ///< its number in commands
};

/// One rank attached to its daemon. Movable; detaches when destroyed.
///
/// Several threads may use it. It belongs to its process alone: a child of fork() may destroy it,
/// exit or exec, which does not touch the parent's. Every other call of it, or of its operators,
/// returns kUnsupported in the child. A child that wants a session attaches one.
class MK_EXPORT Session {
 public:
  /// Attaches and waits until all ranks of the job are attached and their links connected. kTimeout
  /// lists the ranks that are missing. The daemon's absence is kUnavailable, a socket or job of
  /// another user or another secret is kPermission, a drained daemon kDraining. After an error
  /// nothing is attached.
  static Result<Session> attach(const AttachOptions& options);

  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();

  const AttachOptions& options() const;
  /// The network between the nodes, e.g. "loopback" or "ofi:tcp;ofi_rxm".
  const std::string& fabric() const;

  /// Zeroed memory, registered with the daemon. Not collective. The daemon's listings show `name`:
  /// at most 256 bytes of UTF-8 without control characters, else kInvalidArgument. The error
  /// kLimitExceeded names the daemon's limit. With kDevice, a machine without a GPU returns
  /// kUnavailable. A job of several nodes whose fabric does not reach GPU memory, or a daemon that
  /// is too old, returns kUnsupported.
  Result<Buffer> alloc_buffer(std::uint64_t bytes, std::string_view name,
                              MemoryKind kind = MemoryKind::kHost);
  /// The caller must not use the memory any more. kNotFound: no buffer of this session.
  Status free_buffer(const Buffer& buffer);

  /// Collective: an all-gather of small blobs over the job, by rank. The `tag` must be the same on
  /// all ranks. It has at most 256 bytes of UTF-8 without control characters. A blob has at most 64
  /// KiB. In a job of more than 63 ranks it has at most (4 MiB - 4) / ranks - 4 bytes: all go into
  /// one message. A blob that does not fit returns kInvalidArgument, and nothing is sent.
  Result<std::vector<std::vector<std::byte>>> exchange(
      std::string_view tag, std::span<const std::byte> blob,
      std::chrono::milliseconds timeout = std::chrono::milliseconds{60'000});
  /// Collective: returns when every rank of the job has called it.
  Status barrier(std::chrono::milliseconds timeout = std::chrono::milliseconds{60'000});

  /// Ok while the session is well; else why it failed.
  Status status() const;
  /// Leaves the job in an orderly way; the session is unusable afterwards. The destructor does the
  /// same, silently. The other ranks may stay for work of their own, such as a checkpoint. Their
  /// exchange, barrier or creation of an operator then fails at once, with kPeerLost that names
  /// this rank. So does a launch, after 10 s.
  Status detach();

  class Impl;
  /// For the operators of this library.
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  explicit Session(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace mk
