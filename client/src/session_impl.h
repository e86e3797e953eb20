/// \file
/// What a Session holds: the connection, the mapped segment, the lanes' producers and the buffers.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/src/connection.h"
#include "client/src/gpu_launches.h"
#include "client/src/gpu_session.h"
#include "client/src/job_plan.h"
#include "client/src/launch_pauses.h"
#include "client/src/process_mark.h"
#include "client/src/retired_memory.h"
#include "mkernel/mkernel.h"
#include "shm/atomic.h"
#include "shm/host/buffer_file.h"
#include "shm/host/segment.h"
#include "shm/ring.h"

namespace mk {

class SharedCores;

/// Requests that the daemon answers by itself, without waiting for other ranks.
inline constexpr std::chrono::milliseconds kRequestTimeout{30'000};
/// A slow network may have much left of what was committed; a daemon that hangs is noticed by its
/// heartbeat.
inline constexpr std::chrono::milliseconds kDetachTimeout{60'000};

class __attribute__((visibility("hidden"))) Session::Impl {
 public:
  static Result<std::shared_ptr<Impl>> attach(AttachOptions options);
  ~Impl();

  /// `may_grow`: of the host's memory.
  Result<Buffer> alloc_buffer(std::uint64_t bytes, std::string_view name, MemoryKind kind,
                              bool may_grow = false);
  /// The memory of a buffer that may grow, with `bytes`, as another buffer: the bytes that there
  /// were are in both, at other addresses. One of both then goes: `grown` by free_buffer, or
  /// `buffer` by retire_ungrown.
  Result<Buffer> grow_buffer(const Buffer& buffer, std::uint64_t bytes, std::string_view name);
  /// Gives up the handle of the smaller one as `retire` does. Its addresses stay good as long as
  /// `grown`.
  void retire_ungrown(const Buffer& buffer, const Buffer& grown,
                      std::vector<shm::Retire::PeerBuffer> peers);
  Status free_buffer(const Buffer& buffer);
  Result<std::vector<std::vector<std::byte>>> exchange(std::string_view tag,
                                                       std::span<const std::byte> blob,
                                                       std::chrono::milliseconds timeout);
  Status barrier(std::chrono::milliseconds timeout);
  /// How long a rank that cannot go on waits for the others to hear of it.
  static constexpr std::chrono::milliseconds kRefusalTimeout{1};
  /// Collective, at the end of a creation of `kind`: an error on one rank is one on all.
  Status agree(std::string_view tag, std::string_view kind, const Status& own);
  Status status() const;
  /// Whether this process attached it, and is no forked child.
  bool is_here() const { return home_.is_here(); }
  /// The session's failure that explains why an operator's launch was cut short, if there is one. A
  /// local rank may hear of it first and end our launch through shared memory: our own word from
  /// the daemon is then still on its way.
  Status failure_behind(const Error& launch_error) const;
  Status detach();

  /// Gives up this rank's part of an operator: its buffer, the flags from `flag_base` (kNoFlags:
  /// none), and the buffers of others that it could name. Does not wait: what others still use
  /// comes back when they have given up theirs. `quiet`: of GPU memory, whether no kernel of this
  /// node writes there any more. `rest`: what is freed with GPU memory, and as late.
  void retire(const Buffer& buffer, std::uint32_t flag_base,
              std::vector<shm::Retire::PeerBuffer> peers, std::function<bool()> quiet,
              std::shared_ptr<void> rest);
  /// Calls `attempt` again for as long as it answers that there is no room and there may be some
  /// when other ranks have given up theirs, too.
  template <class Attempt>
  auto with_room(Attempt&& attempt) {
    const auto deadline = std::chrono::steady_clock::now() + options_.timeout;
    while (true) {
      const std::uint64_t seen = retired_.answers();
      auto result = attempt();
      if (result || result.error().code != ErrorCode::kLimitExceeded || !status() ||
          !retired_.await_answer(seen, deadline)) {
        return result;
      }
    }
  }
  /// kLimitExceeded, with both numbers, unless `bytes` of memory for each of this node's `ranks`
  /// may be had: of the host, or of the calling thread's GPU. Waits while other ranks may yet give
  /// some back. `what`: "gemm-ar workspace".
  Status check_room(std::string_view what, std::uint64_t bytes, std::uint32_t ranks,
                    MemoryKind kind);
  /// A range of `count` arrival flags (whole granules) for one operator.
  Result<std::uint32_t> alloc_flags(std::uint32_t count);
  /// Maps a local rank's buffer as peer memory.
  Result<shm::BufferFile> open_peer_buffer(std::uint32_t local_rank, std::uint16_t handle);
  /// What others need to use a kDevice buffer of ours.
  Result<gpu::MemoryKey> device_key(const Buffer& buffer) const;
  /// The session as the calling thread's GPU sees it, from the first call on; kInvalidArgument from
  /// a thread that has chosen another GPU since.
  Result<GpuSession*> gpu();
  /// In place of this machine's, before the first use: for tests.
  void use_driver(std::shared_ptr<gpu::Driver> driver) { driver_ = std::move(driver); }
  /// The lanes' counters live either here or on the GPU: the first operator on several nodes
  /// decides, and kUnsupported is the answer to the other kind.
  Status claim_lanes(Executor executor);
  /// Before a launch: after a pause, tells the daemon that commands will come.
  void announce_launch() const;
  /// Tells the daemon, while it lives, that a launch is under way on the CPU. (On a GPU the kernel
  /// does that itself: CudaOptions::launches.) An operator's launch begins by it and goes on with
  /// it alive.
  class LaunchMark {
   public:
    explicit LaunchMark(const Impl& session) : word_(&session.segment().header().launches) {
      shm::store_relaxed(word_, shm::load_relaxed(word_) + 1);
    }
    ~LaunchMark() { shm::store_relaxed(word_, shm::load_relaxed(word_) + 1); }
    LaunchMark(const LaunchMark&) = delete;
    LaunchMark& operator=(const LaunchMark&) = delete;

   private:
    std::uint64_t* word_;
  };

  /// A tag that is the same on all ranks for their n-th operator of `kind`.
  std::string next_operator_tag(std::string_view kind);

  /// Of the last operator on a GPU.
  JobPlanSeen& job_plan_seen() { return job_plan_seen_; }

  /// The cores that its operators may share.
  SharedCores& shared_cores() { return *shared_cores_; }

  const AttachOptions& options() const { return options_; }
  const std::string& fabric() const { return fabric_; }
  /// What the daemon knows of this rank's links, now; 0: nothing yet.
  double network_bytes_per_s() const {
    return static_cast<double>(shm::load_relaxed(&segment_->header().network_bytes_per_s));
  }
  const shm::Segment& segment() const { return *segment_; }
  /// Where this rank says how far its launch is; null: the daemon does not read it.
  shm::Progress* progress() const {
    shm::SegmentHeader& header = segment_->header();
    return (header.features & shm::kFeatureProgress) != 0 ? &header.progress : nullptr;
  }
  std::vector<shm::RingProducer>& lanes() { return lanes_; }
  const client::Connection& connection() const { return *connection_; }

 private:
  explicit Impl(AttachOptions options);

  const client::ProcessMark home_;
  AttachOptions options_;
  std::string fabric_;
  std::unique_ptr<shm::Segment>
      segment_;  ///< before the connection: its monitor reads the heartbeat in it
  std::unique_ptr<client::Connection> connection_;
  std::vector<shm::RingProducer> lanes_;
  /// A buffer's memory: a file, or on the GPU.
  struct OwnBuffer {
    std::optional<shm::BufferFile> file;
    std::optional<gpu::Allocation> device;
    std::vector<shm::BufferFile> before;  ///< mappings of the file from before it has grown
    std::byte* data() const { return file ? file->data() : device->data(); }
  };
  Status check_room_now(std::string_view what, std::uint64_t bytes, std::uint32_t ranks,
                        MemoryKind kind, bool ever);
  Result<Buffer> try_buffer(std::uint64_t bytes, std::string_view name, MemoryKind kind,
                            bool may_grow);
  Result<Buffer> register_file(shm::BufferFile file, std::string_view name);
  Result<std::uint16_t> register_device_buffer(shm::RegisterDeviceBuffer request,
                                               const gpu::Allocation& memory);
  Buffer keep_buffer(OwnBuffer own, std::uint64_t bytes, std::uint16_t handle);

  bool launch_under_way() const { return gpu_ != nullptr && client::GpuLaunches::under_way(); }

  mutable std::mutex mutex_;
  std::shared_ptr<gpu::Driver> driver_;  ///< null: load_driver()'s
  std::unique_ptr<GpuSession> gpu_;
  std::optional<client::GpuLaunches> launches_;  ///< with gpu_
  client::RetiredMemory retired_{[this] { return launch_under_way(); }};
  std::optional<Executor> lanes_claimed_;
  std::map<std::uint16_t, OwnBuffer> buffers_;
  JobPlanSeen job_plan_seen_;
  std::shared_ptr<SharedCores> shared_cores_;
  std::uint64_t operators_ = 0;
  mutable client::LaunchPauses launch_pauses_;
  std::uint64_t barriers_ = 0;
  bool attached_ = false;
};

}  // namespace mk
