#include "client/src/shared_workspace.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shm/atomic.h"
#include "shm/limits.h"

namespace mk {
namespace {

using kernels::kPage;
using kernels::round_up_to;
using kernels::WorkspaceTurn;

/// Room for the words of operators that may come: of so many like the first, within these bounds.
constexpr std::uint64_t kFollowersPlanned = 7;
constexpr std::uint64_t kRoomMin = 256 << 10;
constexpr std::uint64_t kRoomMax = 32 << 20;

/// In whole granules: the first operator's begin behind them.
std::uint32_t turn_flags(std::uint32_t nodes) {
  return static_cast<std::uint32_t>(round_up_to(WorkspaceTurn::flags(nodes), shm::kFlagGranule));
}

/// The newest workspace with room for the words is taken.
struct WorkspaceRequest final : SharedCores::Request {
  explicit WorkspaceRequest(const kernels::WorkspaceParts& of) : parts(of) {}

  bool equals(const SharedCores::Request& other) const override {
    const auto* const asked = dynamic_cast<const WorkspaceRequest*>(&other);
    const auto workspace = made.lock();
    return asked != nullptr && workspace != nullptr && workspace->has_room(asked->parts.words);
  }
  std::string details(const OperatorCore& found) const override {
    return fmt::format(" {} {} {}", parts.words, parts.data,
                       static_cast<const SharedWorkspace&>(found).history());
  }

  kernels::WorkspaceParts parts;
  std::weak_ptr<SharedWorkspace> made;
};

}  // namespace

SharedWorkspace::SharedWorkspace(OperatorMemory memory) : memory_(std::move(memory)) {
  turn_.context = memory_.context();
}

Result<std::shared_ptr<SharedWorkspace>> SharedWorkspace::make(Session::Impl& session,
                                                               std::string_view kind,
                                                               const std::string& parameters,
                                                               const kernels::WorkspaceParts& parts,
                                                               std::uint32_t flag_count) {
  const std::uint64_t head = round_up_to(WorkspaceTurn::kHeadBytes, kPage);
  const std::uint64_t words =
      parts.words + std::clamp(kFollowersPlanned * parts.words, kRoomMin, kRoomMax);
  MK_ASSIGN_OR_RETURN(auto memory,
                      OperatorMemory::create(session, kind, parameters, head + words + parts.data,
                                             turn_flags(session.options().nodes) + flag_count,
                                             Executor::kCpu, head + words - parts.words));
  std::shared_ptr<SharedWorkspace> made(new SharedWorkspace(std::move(memory)));
  made->words_end_ = head;
  made->data_begin_ = head + words;
  return made;
}

bool SharedWorkspace::usable() const { return shm::load_acquire(&turn_.failed) == 0; }

bool SharedWorkspace::has_room(std::uint64_t words) const {
  return sharers_ < kernels::kSharersMax && words <= data_begin_ - words_end_;
}

std::string SharedWorkspace::history() const {
  return fmt::format("{} {} {}", sharers_, words_end_, memory_.bytes());
}

Status SharedWorkspace::ensure_data(std::string_view tag, std::string_view kind,
                                    std::uint64_t bytes) {
  if (bytes <= memory_.bytes() - data_begin_) return {};
  MK_RETURN_IF_ERROR(memory_.grow(tag, kind, data_begin_ + bytes));
  turn_.context = memory_.context();
  for (std::vector<kernels::RailPeer>& peers : rail_peers_) {
    for (std::size_t node = 0; node < peers.size(); ++node)
      peers[node].workspace_handle = turn_.context.rail_peers[node].workspace_handle;
  }
  return {};
}

SharedWorkspace::Place SharedWorkspace::add(std::string_view kind, std::uint64_t words) {
  const Place place{sharers_++, std::exchange(words_end_, words_end_ + words), data_begin_};
  names_.emplace_back(kind);
  turn_.words_at[place.sharer] = place.words_at;
  turn_.names[place.sharer] = names_.back().c_str();
  return place;
}

kernels::RankContext SharedWorkspace::context_of(const Place& place,
                                                 const kernels::RankContext& own) {
  kernels::RankContext context = own;
  for (std::uint32_t local = 0; local < own.world.locals; ++local)
    context.workspaces[local] = turn_.context.workspaces[local] + place.words_at;
  context.workspace_handle = turn_.context.workspace_handle;
  context.shared =
      &shares_.emplace_back(kernels::WorkspaceShare{&turn_, place.sharer, place.words_at});
  std::vector<kernels::RailPeer>& peers =
      rail_peers_.emplace_back(own.rail_peers, own.rail_peers + own.world.nodes);
  for (std::uint32_t node = 0; node < own.world.nodes; ++node)
    peers[node].workspace_handle = turn_.context.rail_peers[node].workspace_handle;
  context.rail_peers = peers.data();
  return context;
}

kernels::RankContext SharedWorkspace::context_of(const Place& place) {
  kernels::RankContext context = context_of(place, turn_.context);
  const std::uint32_t before = turn_flags(context.world.nodes);
  context.arrival_flags += before;
  context.flag_base += before;
  context.flag_count -= before;
  for (kernels::RailPeer& peer : rail_peers_.back()) peer.flag_base += before;
  return context;
}

Result<OperatorWorkspace> OperatorWorkspace::create(Session::Impl& session, std::string_view kind,
                                                    const std::string& parameters,
                                                    const kernels::WorkspaceParts& parts,
                                                    std::uint32_t flag_count, bool own) {
  // First: ranks count tags alike, also when a creation fails on some.
  const std::string tag = session.next_operator_tag("grow");
  auto request = std::make_unique<WorkspaceRequest>(parts);
  WorkspaceRequest* const asked = request.get();
  bool first = false;
  const auto make = [&]() -> Result<std::shared_ptr<SharedWorkspace>> {
    MK_ASSIGN_OR_RETURN(auto made,
                        SharedWorkspace::make(session, kind, parameters, parts, flag_count));
    asked->made = made;
    first = true;
    return made;
  };
  MK_ASSIGN_OR_RETURN(auto shared, SharedCores::find_or_make<SharedWorkspace>(
                                       session, "workspace", own, make,
                                       std::unique_ptr<SharedCores::Request>(std::move(request))));
  MK_RETURN_IF_ERROR(shared->ensure_data(tag, kind, parts.data));
  const SharedWorkspace::Place place = shared->add(kind, parts.words);
  OperatorWorkspace made(std::move(shared));
  if (first) {
    made.context_ = made.shared_->context_of(place);
  } else {
    MK_ASSIGN_OR_RETURN(auto memory,
                        OperatorMemory::create(session, kind, parameters, kPage, flag_count));
    made.own_.emplace(std::move(memory));
    made.context_ = made.shared_->context_of(place, made.own_->context());
  }
  made.data_moved_ = place.data_at - place.words_at - parts.data_at;
  return made;
}

}  // namespace mk
