/// \file
/// The steps of every operator's creation. It allocates and registers its workspace, and takes its
/// flag range. It exchanges handles with all ranks, and checks that they agree. It maps the local
/// peers' workspaces, in host memory or on the ranks' GPUs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client/src/session_impl.h"
#include "kernels/comm/rank_context.h"

namespace mk {

/// The memory of one operator on one rank. Owns the peers' mappings; the workspace is the
/// session's, which gets it back with the destructor.
class OperatorMemory {
 public:
  /// Collective. `kind` names the operator ("gemm-ar"); `parameters` is what must be equal on all
  /// ranks, spelled for users ("m_max=4096 n=4096 ..."): kShapeMismatch quotes both sides. `spare`
  /// of the bytes are for operators that may come; unless 0, the memory may grow. `so_far`: why
  /// this rank has no part, which the others then hear.
  static Result<OperatorMemory> create(Session::Impl& session, std::string_view kind,
                                       const std::string& parameters, std::uint64_t workspace_bytes,
                                       std::uint32_t flag_count, Executor executor = Executor::kCpu,
                                       std::uint64_t spare = 0, const Status& so_far = {});

  OperatorMemory(OperatorMemory&&) noexcept;
  OperatorMemory& operator=(OperatorMemory&&) = delete;
  /// Gives this rank's part up: it comes back when all ranks have.
  ~OperatorMemory();

  /// Collective, while no rank launches: gives memory that may grow `bytes` in all. Its old
  /// addresses stay good, and handles change. If it fails on a rank, all is as it was on all.
  Status grow(std::string_view tag, std::string_view kind, std::uint64_t bytes);
  std::uint64_t bytes() const { return workspace_.bytes; }

  /// kCuda: all addresses are such as kernels on this rank's GPU may use.
  const kernels::RankContext& context() const { return context_; }
  /// kCuda: `rest` goes with the memory, when no rank uses it any more. Freeing it waits for
  /// kernels. No thread of this process may do so while other ranks wait for this one.
  void keep(std::shared_ptr<void> rest);
  /// kCuda: one more operator's words (kernels/comm/workspace_head.h) begin there. Without any,
  /// those of the memory's only one begin with it.
  void add_head(std::uint64_t at) { heads_.push_back(at); }
  /// kCuda: a word of this rank's memory, without waiting for kernels.
  Result<std::uint32_t> fetch_word(std::uint64_t at) const;
  /// kCuda: to this rank's memory.
  Status store(std::uint64_t at, const void* from, std::uint64_t bytes);
  /// kCuda: ranks of the job, this one included, that are threads of this process with this GPU.
  std::uint32_t ranks_per_device() const { return ranks_per_device_; }

 private:
  struct Announcement;
  struct Announced;
  explicit OperatorMemory(Session::Impl& session) : session_(&session) {}
  /// Workspace, flags, and what is told of them: this rank's own part.
  Result<Announced> make_part(std::string_view kind, std::uint64_t workspace_bytes,
                              std::uint32_t flag_count, Executor executor, std::uint64_t spare);
  /// Takes the others' parts; the first that does not fit is the error.
  Status take_parts(std::span<const std::vector<std::byte>> blobs, std::string_view kind,
                    const Announced& own, const std::string& parameters, Executor executor,
                    std::uint64_t workspace_bytes);
  Status open_host_peer(std::uint32_t local, std::uint16_t handle, std::uint64_t bytes);
  Status open_device_peer(std::uint32_t local, const gpu::MemoryKey& key, std::uint64_t bytes);
  /// Tells whether every local rank's kernels have ended our last launch, too.
  std::function<bool()> kernels_ended() const;

  Session::Impl* session_;
  GpuSession* gpu_ = nullptr;  ///< null: on the CPU
  Buffer workspace_;
  std::vector<shm::BufferFile> peers_;
  std::vector<gpu::View> device_peers_;
  std::uint32_t ranks_per_device_ = 1;
  std::vector<std::uint64_t> heads_;
  std::shared_ptr<void> rest_;
  std::vector<kernels::RailPeer> rail_peers_;  ///< context_'s
  std::uint32_t flag_base_ = shm::kNoFlags;
  /// The other ranks' workspaces that this one may name; those ranks may name ours.
  std::vector<shm::Retire::PeerBuffer> peer_buffers_;
  kernels::RankContext context_;
};

}  // namespace mk
