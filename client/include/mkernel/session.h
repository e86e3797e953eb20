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

/// The library's version, "major.minor.patch".
MK_EXPORT const char* version();

/// How a rank finds its daemon and its place in the job. Ranks are node-major: rank = node_rank *
/// local_size + local_rank.
struct MK_EXPORT AttachOptions {
  /// The daemon's client socket, a path of at most 107 bytes; empty: $MKERNEL_SOCKET, else
  /// /run/mkernel/mkerneld.sock. '@' names the abstract namespace. Root, this user, "mkernel" or
  /// the user of $MKERNEL_DAEMON_UID must listen there (kPermission).
  std::string socket;
  /// The same on all ranks; one daemon runs one job of a name at a time. 1 to 128 bytes of
  /// printable ASCII without spaces.
  std::string job;
  /// What all ranks of the job know and nobody else, at most 128 bytes of any values: without it no
  /// process joins the job. Empty: $MKERNEL_JOB_SECRET, else the user id alone keeps others out.
  std::string job_secret;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::uint32_t node_rank = 0;
  std::uint32_t nodes = 1;
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  std::uint32_t lanes =
      2;  ///< command rings: the most send blocks an operator of this session may have
  /// Arrival flags of all operators that this session has at once; 64 to 65536, in steps of 64. A
  /// GEMM+AllReduce on N nodes takes about 128 (N - 1), more with many chunks. They come back when
  /// an operator has been destroyed on all ranks.
  std::uint32_t arrival_flags = 65'536;
  /// PCI address of this rank's GPU, "0000:1b:00.0": its daemon gives it the nearest rail (NIC).
  /// Empty: the calling thread's GPU if it has a CUDA context, else what CUDA_VISIBLE_DEVICES and
  /// the local rank tell, if that is one; else the job's ranks take rails in turn.
  std::string gpu;
  /// The rail itself; -1: $MKERNEL_RAIL, else the daemon's choice.
  std::int32_t rail = -1;
  /// For the whole job to come up; the error then lists the missing ranks. Times, here and below,
  /// are more than 0; more than a day counts as a day.
  std::chrono::milliseconds timeout{60'000};
  /// The daemon counts as lost when its heartbeat is older than this.
  std::chrono::milliseconds heartbeat_timeout{5'000};

  /// Reads the launcher's environment: MKERNEL_{JOB,RANK,WORLD_SIZE,LOCAL_RANK,LOCAL_SIZE} first,
  /// then the variables of torchrun, Open MPI, MPICH, Intel MPI, PALS, Flux, Slurm and PMIx; what
  /// one of them does not say may be said by MKERNEL_* beside it (PMIx says no sizes).
  /// kInvalidArgument names the variable that is missing or makes no sense, or those that
  /// contradict each other, with their values; nodes with different numbers of ranks are refused,
  /// too.
  static Result<AttachOptions> from_environment();

  /// Of rank `rank` of a job on `nodes` nodes with `local_size` ranks each; all but the place as it
  /// is by default. For callers that launch ranks without a launcher. (attach checks it.)
  static AttachOptions of_rank(std::string job, std::uint32_t rank, std::uint32_t nodes,
                               std::uint32_t local_size);

  /// Of this process in a group of the job's ranks: tensor-, data- or expert-parallel groups of one
  /// launch are jobs of their own, and a process may be in several at once. `whole`: the place in
  /// the launch, and all else. `ranks`: the group's, in rising order, this one's among them; as
  /// many on every node. Rank i of the group is ranks[i]. `name`, printable ASCII without spaces,
  /// tells groups of the same ranks apart; the group's job is "<job>.<name>.<digest of ranks>".
  /// kInvalidArgument says what breaks these rules.
  static Result<AttachOptions> of_group(const AttachOptions& whole,
                                        std::span<const std::uint32_t> ranks,
                                        std::string_view name = "group");
};

/// Where a buffer lies.
enum class MemoryKind : std::uint32_t {
  kHost = 0,
  kDevice = 1,  ///< on the calling thread's GPU; a session uses one GPU
};

/// Memory that the daemon, its NIC and the local ranks can reach. Owned by the session it came
/// from: freed by `Session::free_buffer` or with the session.
struct Buffer {
  std::byte* data = nullptr;  ///< kDevice: a device address
  std::uint64_t bytes = 0;
  std::uint16_t handle = 0;
};

/// One rank attached to its daemon. Movable; detaches when destroyed.
///
/// It is its process's alone. A child of fork() may destroy it, exit or exec: that tells nobody
/// anything, and the parent goes on. Every other call of it, or of its operators, answers
/// kUnsupported there; a child that wants a session attaches one.
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

  /// Zeroed memory, registered with the daemon. `name` shows in the daemon's listings: at most 256
  /// bytes of UTF-8 without control characters, else kInvalidArgument. kDevice: kUnavailable on a
  /// machine without a GPU; kUnsupported when the job has several nodes and the daemon's fabric
  /// does not reach GPU memory, or the daemon is too old.
  Result<Buffer> alloc_buffer(std::uint64_t bytes, std::string_view name,
                              MemoryKind kind = MemoryKind::kHost);
  Status free_buffer(const Buffer& buffer);

  /// An all-gather of small blobs over the job, by rank. `tag` must be the same on all ranks, and
  /// has at most 256 bytes of UTF-8 without control characters. A blob has at most 64 KiB, in a job
  /// of more than 63 ranks at most (4 MiB - 4) / ranks - 4 bytes: all go into one message. What
  /// does not fit is kInvalidArgument, and nothing is sent.
  Result<std::vector<std::vector<std::byte>>> exchange(
      std::string_view tag, std::span<const std::byte> blob,
      std::chrono::milliseconds timeout = std::chrono::milliseconds{60'000});
  /// Returns when every rank of the job has called it.
  Status barrier(std::chrono::milliseconds timeout = std::chrono::milliseconds{60'000});

  /// Ok while the session is well; else why it failed.
  Status status() const;
  /// Leaves the job in an orderly way; the session is unusable afterwards. The destructor does the
  /// same, silently. The other ranks may stay for work of their own (a checkpoint); an exchange, a
  /// barrier or the creation of an operator without this rank fails their sessions at once, with
  /// kPeerLost and naming it, and so does a launch without it, after 10 s.
  Status detach();

  class Impl;
  /// For the operators of this library.
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  explicit Session(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace mk
