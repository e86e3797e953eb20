#include "client/src/operator_memory.h"

#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "kernels/comm/workspace_head.h"
#include "shm/flag.h"

namespace mk {
namespace {

/// How long an operator that goes waits for the local ranks' last launches to end.
constexpr std::chrono::milliseconds kPeersTimeout{1'000};

/// What ranks tell each other about one operator: this struct's bytes, of a GPU the workspace's
/// gpu::MemoryKey, then the parameters' text.
struct Announcement {
  std::uint32_t flag_base = 0;
  std::uint16_t workspace_handle = 0;
  std::uint16_t executor = 0;
};
struct Announced {
  Announcement head;
  gpu::MemoryKey key;
};

std::vector<std::byte> pack(const Announced& own, const std::string& parameters) {
  const bool device = own.head.executor != 0;
  std::vector<std::byte> blob(sizeof(own.head) + (device ? sizeof(own.key) : 0) +
                              parameters.size());
  std::byte* at = blob.data();
  const auto put = [&](const void* from, std::size_t bytes) {
    std::memcpy(at, from, bytes);
    at += bytes;
  };
  put(&own.head, sizeof(own.head));
  if (device) put(&own.key, sizeof(own.key));
  put(parameters.data(), parameters.size());
  return blob;
}

Result<Announced> unpack(std::span<const std::byte> blob, std::uint32_t rank,
                         std::uint32_t own_rank, std::string_view kind, Executor executor,
                         const std::string& parameters) {
  Announced announced;
  const auto take = [&](void* to, std::size_t bytes) {
    if (blob.size() < bytes) return false;
    std::memcpy(to, blob.data(), bytes);
    blob = blob.subspan(bytes);
    return true;
  };
  const auto malformed = [&] {
    return fail(ErrorCode::kProtocol, "rank {} announced its {} in too few bytes", rank, kind);
  };
  if (!take(&announced.head, sizeof(announced.head))) return malformed();
  if (announced.head.executor != static_cast<std::uint16_t>(executor)) {
    const auto name = [](std::uint16_t number) { return number == 0 ? "the CPU" : "the GPU"; };
    return fail(ErrorCode::kShapeMismatch,
                "rank {} creates {} on {}, rank {} on {}; they must be the same", own_rank, kind,
                name(static_cast<std::uint16_t>(executor)), rank, name(announced.head.executor));
  }
  if (executor == Executor::kCuda && !take(&announced.key, sizeof(announced.key)))
    return malformed();
  const std::string theirs(reinterpret_cast<const char*>(blob.data()), blob.size());
  if (theirs != parameters) {
    return fail(ErrorCode::kShapeMismatch,
                "rank {} creates {} with {}, rank {} with {}; they must be the same", own_rank,
                kind, parameters, rank, theirs);
  }
  return announced;
}

}  // namespace

Result<OperatorMemory> OperatorMemory::create(Session::Impl& session, std::string_view kind,
                                              const std::string& parameters,
                                              std::uint64_t workspace_bytes,
                                              std::uint32_t flag_count, Executor executor) {
  const AttachOptions& options = session.options();
  const bool device = executor == Executor::kCuda;
  OperatorMemory memory(session);
  if (flag_count > 0) MK_RETURN_IF_ERROR(session.claim_lanes(executor));
  if (device) {
    MK_ASSIGN_OR_RETURN(memory.gpu_, session.gpu());
  }
  MK_ASSIGN_OR_RETURN(memory.workspace_,
                      session.alloc_buffer(workspace_bytes, fmt::format("{} workspace", kind),
                                           device ? MemoryKind::kDevice : MemoryKind::kHost));
  Announced own;
  own.head.workspace_handle = memory.workspace_.handle;
  own.head.executor = static_cast<std::uint16_t>(executor);
  if (flag_count > 0) {
    MK_ASSIGN_OR_RETURN(own.head.flag_base, session.alloc_flags(flag_count));
  }
  if (device) {
    MK_ASSIGN_OR_RETURN(own.key, session.device_key(memory.workspace_));
  }
  MK_ASSIGN_OR_RETURN(const auto blobs, session.exchange(session.next_operator_tag(kind),
                                                         pack(own, parameters), options.timeout));

  kernels::RankContext& context = memory.context_;
  context.world = {options.nodes, options.local_size, options.node_rank, options.local_rank};
  context.workspace_handle = memory.workspace_.handle;
  memory.rail_peers_.resize(options.nodes);
  context.rail_peers = memory.rail_peers_.data();
  for (std::uint32_t rank = 0; rank < options.world; ++rank) {
    MK_ASSIGN_OR_RETURN(const Announced theirs,
                        unpack(blobs[rank], rank, options.rank, kind, executor, parameters));
    const std::uint32_t node = rank / options.local_size;
    const std::uint32_t local = rank % options.local_size;
    const bool sharing =
        theirs.key.process == own.key.process && theirs.key.device == own.key.device;
    if (device && sharing && rank != options.rank) ++memory.ranks_per_device_;
    if (node != options.node_rank) {
      if (local == options.local_rank) {
        memory.rail_peers_[node] = {static_cast<std::uint16_t>(rank), theirs.head.workspace_handle,
                                    theirs.head.flag_base};
      }
    } else if (local == options.local_rank) {
      context.workspaces[local] = memory.workspace_.data;
    } else if (device) {
      MK_RETURN_IF_ERROR(memory.open_device_peer(local, theirs.key, workspace_bytes));
    } else {
      MK_RETURN_IF_ERROR(
          memory.open_host_peer(local, theirs.head.workspace_handle, workspace_bytes));
    }
  }
  context.flag_base = own.head.flag_base;
  context.flag_count = flag_count;
  const shm::Segment& segment = session.segment();
  if (!device) {
    context.lanes = session.lanes().data();
    context.lane_count = static_cast<std::uint32_t>(session.lanes().size());
    context.arrival_flags = segment.flags() + own.head.flag_base;
    context.session_abort = &segment.header().abort_flag;
    context.process_abort = session.connection().abort_word();
    return memory;
  }
  if (flag_count > 0) {
    context.lanes = memory.gpu_->lanes();
    context.lane_count = static_cast<std::uint32_t>(session.lanes().size());
  }
  context.arrival_flags = memory.gpu_->flags() + own.head.flag_base;
  context.session_abort = memory.gpu_->session_abort();
  context.process_abort = memory.gpu_->process_abort();
  return memory;
}

Status OperatorMemory::open_host_peer(std::uint32_t local, std::uint16_t handle,
                                      std::uint64_t bytes) {
  MK_ASSIGN_OR_RETURN(auto peer, session_->open_peer_buffer(local, handle));
  if (peer.bytes() < bytes) {
    return fail(ErrorCode::kProtocol, "local rank {}'s workspace has {} bytes instead of {}", local,
                peer.bytes(), bytes);
  }
  context_.workspaces[local] = peer.data();
  peers_.push_back(std::move(peer));
  return {};
}

Status OperatorMemory::open_device_peer(std::uint32_t local, const gpu::MemoryKey& key,
                                        std::uint64_t bytes) {
  auto peer = gpu::View::open(gpu_->driver(), gpu_->device(), key);
  if (!peer) {
    return fail(peer.error().code, "cannot use local rank {}'s memory on {}: {}", local,
                gpu::text_of(key.device), peer.error().message);
  }
  if (peer->bytes() < bytes) {
    return fail(ErrorCode::kProtocol, "local rank {}'s workspace has {} bytes instead of {}", local,
                peer->bytes(), bytes);
  }
  context_.workspaces[local] = peer->data();
  device_peers_.push_back(std::move(*peer));
  return {};
}

OperatorMemory::OperatorMemory(OperatorMemory&& other) noexcept
    : session_(std::exchange(other.session_, nullptr)),
      gpu_(other.gpu_),
      workspace_(other.workspace_),
      peers_(std::move(other.peers_)),
      device_peers_(std::move(other.device_peers_)),
      ranks_per_device_(other.ranks_per_device_),
      rail_peers_(std::move(other.rail_peers_)),
      context_(other.context_) {}

void OperatorMemory::await_peers() {
  const kernels::WorkspaceHead head{context_.world.locals};
  /// The last launch that a local rank has ended; nullopt when the GPU does not answer.
  const auto ended_by = [&](std::uint32_t local) -> std::optional<std::uint32_t> {
    std::uint32_t epoch = 0;
    const std::byte* const word = workspace_.data + head.finished(local);
    if (!gpu_->driver()->fetch(gpu_->device(), &epoch, word, sizeof epoch)) return std::nullopt;
    return epoch;
  };
  const auto deadline = std::chrono::steady_clock::now() + kPeersTimeout;
  const std::uint32_t own = ended_by(context_.world.local).value_or(0);
  for (std::uint32_t local = 0; local < context_.world.locals; ++local) {
    while (!shm::epoch_reached(ended_by(local).value_or(own), own) && session_->status() &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds{100});
    }
  }
}

OperatorMemory::~OperatorMemory() {
  if (session_ == nullptr || workspace_.data == nullptr) return;
  if (!session_->is_here()) {
    // A forked child: the GPU is its parent's.
    client::keep_for_ever(new std::vector<gpu::View>(std::move(device_peers_)));
    return;
  }
  // A kernel of a local rank may still say that it has ended, in our workspace.
  if (gpu_ != nullptr && session_->status()) await_peers();
  device_peers_.clear();
  // Of a session that failed nothing is given back to the daemon, which cleans up by itself.
  (void)session_->free_buffer(workspace_);
}

}  // namespace mk
