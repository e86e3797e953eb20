#include "client/src/operator_memory.h"

#include <cstring>
#include <utility>

namespace mk {
namespace {

/// What ranks tell each other about one operator: this struct's bytes, then the parameters' text.
struct Announcement {
  std::uint32_t flag_base = 0;
  std::uint16_t workspace_handle = 0;
  std::uint16_t reserved = 0;
};

std::vector<std::byte> pack(const Announcement& announcement, const std::string& parameters) {
  std::vector<std::byte> blob(sizeof(announcement) + parameters.size());
  std::memcpy(blob.data(), &announcement, sizeof(announcement));
  std::memcpy(blob.data() + sizeof(announcement), parameters.data(), parameters.size());
  return blob;
}

Result<Announcement> unpack(const std::vector<std::byte>& blob, std::uint32_t rank,
                            std::uint32_t own_rank, std::string_view kind,
                            const std::string& parameters) {
  Announcement announcement;
  if (blob.size() < sizeof(announcement)) {
    return fail(ErrorCode::kProtocol, "rank {} announced its {} in {} bytes", rank, kind,
                blob.size());
  }
  std::memcpy(&announcement, blob.data(), sizeof(announcement));
  const std::string theirs(reinterpret_cast<const char*>(blob.data()) + sizeof(announcement),
                           blob.size() - sizeof(announcement));
  if (theirs != parameters) {
    return fail(ErrorCode::kShapeMismatch,
                "rank {} creates {} with {}, rank {} with {}; they must be the same", own_rank,
                kind, parameters, rank, theirs);
  }
  return announcement;
}

}  // namespace

Result<OperatorMemory> OperatorMemory::create(Session::Impl& session, std::string_view kind,
                                              const std::string& parameters,
                                              std::uint64_t workspace_bytes,
                                              std::uint32_t flag_count) {
  const AttachOptions& options = session.options();
  OperatorMemory memory(session);
  MK_ASSIGN_OR_RETURN(memory.workspace_,
                      session.alloc_buffer(workspace_bytes, fmt::format("{} workspace", kind)));
  std::uint32_t flag_base = 0;
  if (flag_count > 0) {
    MK_ASSIGN_OR_RETURN(flag_base, session.alloc_flags(flag_count));
  }
  const Announcement own{flag_base, memory.workspace_.handle, 0};
  MK_ASSIGN_OR_RETURN(const auto blobs, session.exchange(session.next_operator_tag(kind),
                                                         pack(own, parameters), options.timeout));

  kernels::RankContext& context = memory.context_;
  context.world = {options.nodes, options.local_size, options.node_rank, options.local_rank};
  context.workspace_handle = memory.workspace_.handle;
  for (std::uint32_t rank = 0; rank < options.world; ++rank) {
    MK_ASSIGN_OR_RETURN(const Announcement theirs,
                        unpack(blobs[rank], rank, options.rank, kind, parameters));
    const std::uint32_t node = rank / options.local_size;
    const std::uint32_t local = rank % options.local_size;
    if (node != options.node_rank) {
      if (local == options.local_rank) {
        context.rail_peers[node] = {static_cast<std::uint16_t>(rank), theirs.workspace_handle,
                                    theirs.flag_base};
      }
    } else if (local == options.local_rank) {
      context.workspaces[local] = memory.workspace_.data;
    } else {
      MK_ASSIGN_OR_RETURN(auto peer, session.open_peer_buffer(local, theirs.workspace_handle));
      if (peer.bytes() < workspace_bytes) {
        return fail(ErrorCode::kProtocol, "local rank {}'s workspace has {} bytes instead of {}",
                    local, peer.bytes(), workspace_bytes);
      }
      context.workspaces[local] = peer.data();
      memory.peers_.push_back(std::move(peer));
    }
  }
  context.lanes = session.lanes().data();
  context.lane_count = static_cast<std::uint32_t>(session.lanes().size());
  context.arrival_flags = session.segment().flags() + flag_base;
  context.flag_base = flag_base;
  context.flag_count = flag_count;
  context.session_abort = &session.segment().header().abort_flag;
  context.process_abort = session.connection().abort_word();
  return memory;
}

OperatorMemory::OperatorMemory(OperatorMemory&& other) noexcept
    : session_(std::exchange(other.session_, nullptr)),
      workspace_(other.workspace_),
      peers_(std::move(other.peers_)),
      context_(other.context_) {}

OperatorMemory::~OperatorMemory() {
  // A session that failed has nothing left to give back to; the daemon cleans up by itself.
  if (session_ != nullptr && workspace_.data != nullptr) (void)session_->free_buffer(workspace_);
}

}  // namespace mk
