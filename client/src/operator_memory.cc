#include "client/src/operator_memory.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>
#include <span>
#include <thread>
#include <utility>

#include "kernels/comm/workspace_head.h"
#include "shm/flag.h"

namespace mk {

// What ranks tell each other about one operator: an Announcement's bytes, of a GPU the workspace's
// gpu::MemoryKey, then the parameters' text. A rank that has no part says so instead: an
// Announcement with no handle, then why.

struct OperatorMemory::Announcement {
  std::uint32_t flag_base = 0;  ///< without a handle: an ErrorCode
  std::uint16_t workspace_handle = shm::kNoHandle;
  std::uint16_t executor = 0;
};
struct OperatorMemory::Announced {
  Announcement head;
  gpu::MemoryKey key;

  static std::vector<std::byte> pack(const Announcement& head, const gpu::MemoryKey* key,
                                     std::string_view text) {
    std::vector<std::byte> blob;
    const auto put = [&](const void* from, std::size_t bytes) {
      const auto* const first = static_cast<const std::byte*>(from);
      blob.insert(blob.end(), first, first + bytes);
    };
    put(&head, sizeof head);
    if (key != nullptr) put(key, sizeof *key);
    put(text.data(), text.size());
    return blob;
  }

  /// Why a rank has no part, as much of it as an exchange takes.
  static std::vector<std::byte> pack(const Error& why, std::uint32_t world) {
    const std::size_t most = shm::exchange_blob_bytes_max(world) - sizeof(Announcement);
    return pack({static_cast<std::uint32_t>(why.code)}, nullptr,
                std::string_view(why.message).substr(0, most));
  }

  /// `text`: the parameters, or why the rank has no part.
  static Result<Announced> unpack(std::span<const std::byte> blob, std::uint32_t rank,
                                  std::string_view kind, std::string& text) {
    Announced announced;
    const auto take = [&](void* to, std::size_t bytes) {
      if (blob.size() < bytes) return false;
      std::memcpy(to, blob.data(), bytes);
      blob = blob.subspan(bytes);
      return true;
    };
    const bool whole = take(&announced.head, sizeof announced.head) &&
                       (!announced.has_key() || take(&announced.key, sizeof announced.key));
    if (!whole)
      return fail(ErrorCode::kProtocol, "rank {} announced its {} in too few bytes", rank, kind);
    text.assign(reinterpret_cast<const char*>(blob.data()), blob.size());
    return announced;
  }

  bool has_part() const { return head.workspace_handle != shm::kNoHandle; }
  bool has_key() const {
    return has_part() && head.executor == static_cast<std::uint16_t>(Executor::kCuda);
  }
};

namespace {

const char* name_of_executor(std::uint16_t number) { return number == 0 ? "the CPU" : "the GPU"; }

}  // namespace

Result<OperatorMemory::Announced> OperatorMemory::make_part(std::string_view kind,
                                                            std::uint64_t workspace_bytes,
                                                            std::uint32_t flag_count,
                                                            Executor executor,
                                                            std::uint64_t spare) {
  const bool device = executor == Executor::kCuda;
  if (flag_count > 0) MK_RETURN_IF_ERROR(session_->claim_lanes(executor));
  if (device) {
    MK_ASSIGN_OR_RETURN(gpu_, session_->gpu());
  }
  const MemoryKind kind_of_memory = device ? MemoryKind::kDevice : MemoryKind::kHost;
  const std::string name = fmt::format("{} workspace", kind);
  // A file's pages are there only when they are written: by then it is too late to refuse.
  const std::uint32_t ranks = device ? 1 : session_->options().local_size;
  MK_RETURN_IF_ERROR(session_->check_room(name, workspace_bytes - spare, ranks, kind_of_memory));
  MK_ASSIGN_OR_RETURN(workspace_,
                      session_->alloc_buffer(workspace_bytes, name, kind_of_memory, spare != 0));
  Announced own;
  own.head.workspace_handle = workspace_.handle;
  own.head.executor = static_cast<std::uint16_t>(executor);
  if (flag_count > 0) {
    MK_ASSIGN_OR_RETURN(flag_base_, session_->alloc_flags(flag_count));
    own.head.flag_base = flag_base_;
  }
  if (device) {
    MK_ASSIGN_OR_RETURN(own.key, session_->device_key(workspace_));
  }
  return own;
}

Result<OperatorMemory> OperatorMemory::create(Session::Impl& session, std::string_view kind,
                                              const std::string& parameters,
                                              std::uint64_t workspace_bytes,
                                              std::uint32_t flag_count, Executor executor,
                                              std::uint64_t spare, const Status& so_far) {
  const AttachOptions& options = session.options();
  OperatorMemory memory(session);
  const auto own = so_far ? memory.make_part(kind, workspace_bytes, flag_count, executor, spare)
                          : Result<Announced>(propagate(so_far));
  const std::string tag = session.next_operator_tag(kind);
  if (!own) {
    // The others need not wait for their deadline to hear of it.
    (void)session.exchange(tag, Announced::pack(own.error(), options.world),
                           Session::Impl::kRefusalTimeout);
    return propagate(own);
  }
  const auto blobs = session.exchange(
      tag, Announced::pack(own->head, own->has_key() ? &own->key : nullptr, parameters),
      options.timeout);
  if (!blobs) {
    // Who came later may have heard of our part, and goes by it: it stays with the session.
    if (blobs.error().code == ErrorCode::kTimeout) memory.session_ = nullptr;
    return propagate(blobs);
  }
  MK_RETURN_IF_ERROR(memory.take_parts(*blobs, kind, *own, parameters, executor, workspace_bytes));
  kernels::RankContext& context = memory.context_;
  context.flag_base = own->head.flag_base;
  context.flag_count = flag_count;
  const shm::Segment& segment = session.segment();
  if (executor == Executor::kCpu) {
    context.lanes = session.lanes().data();
    context.lane_count = static_cast<std::uint32_t>(session.lanes().size());
    context.arrival_flags = segment.flags() + own->head.flag_base;
    context.session_abort = &segment.header().abort_flag;
    context.process_abort = session.connection().abort_word();
    return memory;
  }
  if (flag_count > 0) {
    context.lanes = memory.gpu_->lanes();
    context.lane_count = static_cast<std::uint32_t>(session.lanes().size());
  }
  context.arrival_flags = memory.gpu_->flags() + own->head.flag_base;
  context.session_abort = memory.gpu_->session_abort();
  context.process_abort = memory.gpu_->process_abort();
  return memory;
}

Status OperatorMemory::take_parts(std::span<const std::vector<std::byte>> blobs,
                                  std::string_view kind, const Announced& own,
                                  const std::string& parameters, Executor executor,
                                  std::uint64_t workspace_bytes) {
  const AttachOptions& options = session_->options();
  const auto node_of = [&](std::uint32_t rank) { return rank / options.local_size; };
  const auto local_of = [&](std::uint32_t rank) { return rank % options.local_size; };
  std::vector<Announced> parts(options.world);
  std::vector<std::string> texts(options.world);
  // All of them first: a rank that has heard of our part has to be waited for when it goes.
  for (std::uint32_t rank = 0; rank < options.world; ++rank) {
    MK_ASSIGN_OR_RETURN(parts[rank], Announced::unpack(blobs[rank], rank, kind, texts[rank]));
    const bool near = node_of(rank) == options.node_rank || local_of(rank) == options.local_rank;
    if (rank != options.rank && near && parts[rank].has_part())
      peer_buffers_.push_back({rank, parts[rank].head.workspace_handle});
  }
  for (std::uint32_t rank = 0; rank < options.world; ++rank) {
    const Announcement& head = parts[rank].head;
    if (!parts[rank].has_part()) {
      return fail(static_cast<ErrorCode>(head.flag_base), "rank {} cannot create {}: {}", rank,
                  kind, texts[rank]);
    }
    if (head.executor != own.head.executor) {
      return fail(ErrorCode::kShapeMismatch,
                  "rank {} creates {} on {}, rank {} on {}; they must be the same", options.rank,
                  kind, name_of_executor(own.head.executor), rank, name_of_executor(head.executor));
    }
    if (texts[rank] != parameters) {
      return fail(ErrorCode::kShapeMismatch,
                  "rank {} creates {} with {}, rank {} with {}; they must be the same",
                  options.rank, kind, parameters, rank, texts[rank]);
    }
  }
  const bool device = executor == Executor::kCuda;
  context_.world = {options.nodes, options.local_size, options.node_rank, options.local_rank};
  context_.workspace_handle = workspace_.handle;
  rail_peers_.resize(options.nodes);
  context_.rail_peers = rail_peers_.data();
  for (std::uint32_t rank = 0; rank < options.world; ++rank) {
    const Announced& theirs = parts[rank];
    const std::uint32_t local = local_of(rank);
    const bool sharing =
        theirs.key.process == own.key.process && theirs.key.device == own.key.device;
    if (device && sharing && rank != options.rank) ++ranks_per_device_;
    if (node_of(rank) != options.node_rank) {
      if (local == options.local_rank) {
        rail_peers_[node_of(rank)] = {static_cast<std::uint16_t>(rank),
                                      theirs.head.workspace_handle, theirs.head.flag_base};
      }
    } else if (local == options.local_rank) {
      context_.workspaces[local] = workspace_.data;
    } else if (device) {
      MK_RETURN_IF_ERROR(open_device_peer(local, theirs.key, workspace_bytes));
    } else {
      MK_RETURN_IF_ERROR(open_host_peer(local, theirs.head.workspace_handle, workspace_bytes));
    }
  }
  return {};
}

Status OperatorMemory::grow(std::string_view tag, std::string_view kind, std::uint64_t bytes) {
  const AttachOptions& options = session_->options();
  const std::string name = fmt::format("{} workspace", kind);
  const auto enlarge = [&]() -> Result<Buffer> {
    MK_RETURN_IF_ERROR(session_->check_room(name, bytes - workspace_.bytes, options.local_size,
                                            MemoryKind::kHost));
    return session_->with_room([&] { return session_->grow_buffer(workspace_, bytes, name); });
  };
  const Result<Buffer> grown = enlarge();
  const auto told = grown ? Announced::pack({0, grown->handle}, nullptr, "")
                          : Announced::pack(grown.error(), options.world);
  const auto blobs =
      session_->exchange(tag, told, grown ? options.timeout : Session::Impl::kRefusalTimeout);
  std::vector<std::uint16_t> handles(options.world);
  std::vector<shm::BufferFile> mapped;
  const auto take = [&]() -> Status {
    if (!grown) return propagate(grown);
    if (!blobs) return propagate(blobs);
    for (std::uint32_t rank = 0; rank < options.world; ++rank) {
      std::string text;
      MK_ASSIGN_OR_RETURN(const auto part, Announced::unpack((*blobs)[rank], rank, kind, text));
      if (!part.has_part()) {
        return fail(static_cast<ErrorCode>(part.head.flag_base), "rank {} cannot create {}: {}",
                    rank, kind, text);
      }
      handles[rank] = part.head.workspace_handle;
      const std::uint32_t local = rank % options.local_size;
      if (rank / options.local_size != options.node_rank || local == options.local_rank) continue;
      MK_ASSIGN_OR_RETURN(auto peer, session_->open_peer_buffer(local, handles[rank]));
      if (peer.bytes() < bytes) {
        return fail(ErrorCode::kProtocol, "local rank {}'s workspace has {} bytes instead of {}",
                    local, peer.bytes(), bytes);
      }
      mapped.push_back(std::move(peer));
    }
    return {};
  };
  // All or none, on all ranks: a rank that fails frees what the others would name. All take part
  // to the end.
  const Status taken = session_->agree(fmt::format("{}/ready", tag), kind, take());
  if (!taken) {
    if (grown) (void)session_->free_buffer(*grown);
    return taken;
  }
  std::vector<shm::Retire::PeerBuffer> before = peer_buffers_;
  for (auto& [rank, handle] : peer_buffers_) handle = handles[rank];
  auto peer = mapped.begin();
  for (std::uint32_t local = 0; local < options.local_size; ++local) {
    context_.workspaces[local] = local == options.local_rank ? grown->data : (peer++)->data();
  }
  std::ranges::move(mapped, std::back_inserter(peers_));
  for (std::uint32_t node = 0; node < options.nodes; ++node)
    rail_peers_[node].workspace_handle = handles[node * options.local_size + options.local_rank];
  context_.workspace_handle = grown->handle;
  session_->retire_ungrown(std::exchange(workspace_, *grown), *grown, std::move(before));
  return {};
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
      heads_(std::move(other.heads_)),
      rest_(std::move(other.rest_)),
      rail_peers_(std::move(other.rail_peers_)),
      flag_base_(other.flag_base_),
      peer_buffers_(std::move(other.peer_buffers_)),
      context_(other.context_) {}

void OperatorMemory::keep(std::shared_ptr<void> rest) {
  using Both = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
  rest_ = rest_ == nullptr ? std::move(rest)
                           : std::make_shared<Both>(std::move(rest_), std::move(rest));
}

Result<std::uint32_t> OperatorMemory::fetch_word(std::uint64_t at) const {
  std::uint32_t word = 0;
  MK_RETURN_IF_ERROR(
      gpu_->driver()->fetch(gpu_->device(), &word, workspace_.data + at, sizeof word));
  return word;
}

Status OperatorMemory::store(std::uint64_t at, const void* from, std::uint64_t bytes) {
  return gpu_->driver()->store(gpu_->device(), workspace_.data + at, from, bytes);
}

std::function<bool()> OperatorMemory::kernels_ended() const {
  // Local ranks say in our workspace which launch they have ended last.
  return
      [driver = gpu_->driver(), device = gpu_->device(), world = context_.world,
       memory = workspace_.data, heads = heads_.empty() ? std::vector<std::uint64_t>{0} : heads_] {
        const kernels::WorkspaceHead head{world.locals};
        return std::ranges::all_of(heads, [&](std::uint64_t words) {
          const auto ended_by = [&](std::uint32_t local) -> std::optional<std::uint32_t> {
            std::uint32_t epoch = 0;
            if (!driver->fetch(device, &epoch, memory + words + head.finished(local), sizeof epoch))
              return std::nullopt;
            return epoch;
          };
          const std::optional<std::uint32_t> own = ended_by(world.local);
          for (std::uint32_t local = 0; own && local < world.locals; ++local) {
            if (!shm::epoch_reached(ended_by(local).value_or(*own), *own)) return false;
          }
          return true;
        });
      };
}

OperatorMemory::~OperatorMemory() {
  if (session_ == nullptr || workspace_.data == nullptr) return;
  if (!session_->is_here()) {
    // A forked child: the GPU is its parent's.
    client::keep_for_ever(new (std::nothrow) std::vector<gpu::View>(std::move(device_peers_)));
    client::keep_for_ever(new (std::nothrow) std::shared_ptr<void>(std::move(rest_)));
    return;
  }
  peers_.clear();
  device_peers_.clear();
  session_->retire(workspace_, flag_base_, std::move(peer_buffers_),
                   gpu_ != nullptr ? kernels_ended() : nullptr, std::move(rest_));
}

}  // namespace mk
