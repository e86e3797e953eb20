#include "client/src/shared_workspace.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "kernels/comm/workspace_head.h"
#include "shm/atomic.h"
#include "shm/limits.h"

namespace mk {
namespace {

using kernels::kPage;
using kernels::round_up_to;
using kernels::WorkspaceHead;
using kernels::WorkspaceTurn;

/// Room for the words of operators that may come: of so many like the first, within these bounds.
constexpr std::uint64_t kFollowersPlanned = 7;
constexpr std::uint64_t kRoomMin = 256 << 10;
constexpr std::uint64_t kRoomMax = 32 << 20;
/// How long operators' launches may go on before they count as ones that stay where they are.
constexpr std::chrono::milliseconds kQuietTimeout{1'000};
constexpr std::chrono::microseconds kLookInterval{100};

std::uint64_t head_bytes(std::uint32_t nodes) {
  return round_up_to(WorkspaceTurn::head_bytes(nodes), kPage);
}
/// In whole granules: the first operator's begin behind them.
std::uint32_t turn_flags(std::uint32_t nodes) {
  return static_cast<std::uint32_t>(round_up_to(WorkspaceTurn::flags(nodes), shm::kFlagGranule));
}

/// The newest workspace is taken that has room for the words, or can be given it.
struct WorkspaceRequest final : SharedCores::Request {
  WorkspaceRequest(const kernels::WorkspaceParts& of, Executor on) : parts(of), executor(on) {}

  bool equals(const SharedCores::Request& other) const override {
    const auto* const asked = dynamic_cast<const WorkspaceRequest*>(&other);
    if (asked == nullptr || asked->executor != executor) return false;
    const auto workspace = made.lock();
    return workspace != nullptr &&
           (executor == Executor::kCuda || workspace->memory()->has_room(asked->parts.words));
  }
  std::string details(const OperatorCore& found) const override {
    return fmt::format(" {} {} {}", parts.words, parts.data,
                       static_cast<const SharedWorkspace&>(found).memory()->history());
  }

  kernels::WorkspaceParts parts;
  Executor executor;
  std::weak_ptr<SharedWorkspace> made;
};

}  // namespace

// --- SharedMemory ---

SharedMemory::SharedMemory(OperatorMemory memory, Executor executor)
    : memory_(std::move(memory)), executor_(executor) {
  turn_.context = memory_.context();
}

SharedMemory::Room SharedMemory::room_for(const kernels::WorkspaceParts& parts,
                                          std::uint64_t words) {
  const std::uint64_t spare = std::clamp(kFollowersPlanned * parts.words, kRoomMin, kRoomMax);
  return {words + parts.words + spare, spare, parts.data};
}

Result<std::shared_ptr<SharedMemory>> SharedMemory::make(Session::Impl& session,
                                                         std::string_view kind,
                                                         const std::string& parameters,
                                                         const Room& room, std::uint32_t flag_count,
                                                         Executor executor, const Status& so_far) {
  const bool host = executor == Executor::kCpu;
  const std::uint32_t nodes = session.options().nodes;
  const std::uint64_t head = head_bytes(nodes);
  MK_ASSIGN_OR_RETURN(
      auto memory, OperatorMemory::create(session, kind, parameters, head + room.words + room.data,
                                          turn_flags(nodes) + (host ? flag_count : 0), executor,
                                          host ? head + room.spare : 0, so_far));
  std::shared_ptr<SharedMemory> made(new SharedMemory(std::move(memory), executor));
  made->words_end_ = head;
  made->data_begin_ = head + room.words;
  if (!host && nodes > 1) {
    MK_RETURN_IF_ERROR(made->memory_.store(WorkspaceTurn::kPeersAt,
                                           made->memory_.context().rail_peers,
                                           nodes * sizeof(kernels::RailPeer)));
  }
  return made;
}

bool SharedMemory::has_room(std::uint64_t words) const {
  return sharers_ < kernels::kSharersMax && words <= data_begin_ - words_end_;
}

bool SharedMemory::usable() const {
  if (executor_ == Executor::kCpu) return shm::load_acquire(&turn_.failed) == 0;
  for (std::uint32_t sharer = 0; sharer < sharers_; ++sharer) {
    const auto failed = memory_.fetch_word(turn_.words_at[sharer] + WorkspaceHead::failed());
    if (!failed || *failed != 0) return false;
  }
  return true;
}

std::string SharedMemory::history() const {
  return fmt::format("{} {} {}", sharers_, words_end_, memory_.bytes());
}

Status SharedMemory::grow_data(std::string_view tag, std::string_view kind, std::uint64_t bytes) {
  if (bytes <= data_bytes()) return {};
  MK_RETURN_IF_ERROR(memory_.grow(tag, kind, data_begin_ + bytes));
  turn_.context = memory_.context();
  for (std::vector<kernels::RailPeer>& peers : rail_peers_) {
    for (std::size_t node = 0; node < peers.size(); ++node)
      peers[node].workspace_handle = turn_.context.rail_peers[node].workspace_handle;
  }
  return {};
}

Result<SharedMemory::Place> SharedMemory::add(std::string_view kind, std::uint64_t words) {
  if (!has_room(words)) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: a workspace takes {} operators in its life, and this one has had {}; set "
                "Tuning::own_workspace",
                kind, kernels::kSharersMax, sharers_);
  }
  const Place place{sharers_++, std::exchange(words_end_, words_end_ + words), data_begin_};
  names_.emplace_back(kind);
  turn_.words_at[place.sharer] = place.words_at;
  turn_.names[place.sharer] = names_.back().c_str();
  if (executor_ == Executor::kCuda) memory_.add_head(place.words_at);
  return place;
}

kernels::RankContext SharedMemory::context_of(const Place& place, const kernels::RankContext& own,
                                              bool alone) {
  kernels::RankContext context = own;
  for (std::uint32_t local = 0; local < own.world.locals; ++local)
    context.workspaces[local] = turn_.context.workspaces[local] + place.words_at;
  context.workspace_handle = turn_.context.workspace_handle;
  if (!alone) {
    context.shared =
        &shares_.emplace_back(kernels::WorkspaceShare{&turn_, place.sharer, place.words_at});
  }
  std::vector<kernels::RailPeer>& peers =
      rail_peers_.emplace_back(own.rail_peers, own.rail_peers + own.world.nodes);
  for (std::uint32_t node = 0; node < own.world.nodes; ++node) {
    peers[node].workspace_handle = turn_.context.rail_peers[node].workspace_handle;
    peers[node].begin = place.words_at;
  }
  context.rail_peers = peers.data();
  return context;
}

kernels::RankContext SharedMemory::context_of(const Place& place) {
  kernels::RankContext context = context_of(place, turn_.context);
  const std::uint32_t before = turn_flags(context.world.nodes);
  context.arrival_flags += before;
  context.flag_base += before;
  context.flag_count -= before;
  for (kernels::RailPeer& peer : rail_peers_.back()) peer.flag_base += before;
  return context;
}

bool SharedMemory::is_quiet(std::uint32_t sharer,
                            std::chrono::steady_clock::time_point deadline) const {
  if (turn_.in_graph[sharer]) return false;
  const kernels::World& world = turn_.context.world;
  const std::uint64_t word =
      turn_.words_at[sharer] + WorkspaceHead{world.locals}.finished(world.local);
  for (;;) {
    const auto ended = memory_.fetch_word(word);
    if (ended && *ended == turn_.queued[sharer]) return true;
    if (!ended || std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kLookInterval);
  }
}

// --- SharedWorkspace ---

void SharedWorkspace::add_mover(OperatorWorkspace& workspace, MovingOperator& mover) {
  movers_.push_back({&workspace, &mover});
}
void SharedWorkspace::remove_mover(const MovingOperator& mover) {
  std::erase_if(movers_, [&](const Mover& one) { return one.op == &mover; });
}

Status SharedWorkspace::ensure(Session::Impl& session, const std::string& tag,
                               std::string_view kind, const std::string& parameters,
                               const kernels::WorkspaceParts& parts, const Status& so_far) {
  if (executor_ == Executor::kCpu) return memory_->grow_data(tag, kind, parts.data);
  if (memory_->has_room(parts.words) && parts.data <= memory_->data_bytes()) return so_far;
  return replace(session, tag, kind, parameters, parts, so_far);
}

Result<std::vector<SharedWorkspace::Mover>> SharedWorkspace::agreed_movers(Session::Impl& session,
                                                                           const std::string& tag) {
  // By their numbers in the memory, which ranks have alike; some may have gone on some ranks.
  std::vector<std::byte> moving(kernels::kSharersMax);
  const auto deadline = std::chrono::steady_clock::now() + kQuietTimeout;
  for (const Mover& one : movers_) {
    const OperatorWorkspace& its = *one.workspace;
    if (its.memory_ == memory_ && memory_->is_quiet(its.place_.sharer, deadline) &&
        one.op->may_move())
      moving[its.place_.sharer] = std::byte{1};
  }
  const AttachOptions& options = session.options();
  if (options.world > 1) {
    MK_ASSIGN_OR_RETURN(const auto blobs, session.exchange(tag, moving, options.timeout));
    for (const std::vector<std::byte>& blob : blobs) {
      for (std::size_t i = 0; i < moving.size(); ++i)
        moving[i] &= i < blob.size() ? blob[i] : std::byte{0};
    }
  }
  std::vector<Mover> agreed;
  std::ranges::copy_if(movers_, std::back_inserter(agreed), [&](const Mover& one) {
    const OperatorWorkspace& its = *one.workspace;
    return its.memory_ == memory_ && moving[its.place_.sharer] != std::byte{0};
  });
  // With the one that comes they would be more than a workspace takes: it begins another.
  if (agreed.size() >= kernels::kSharersMax) agreed.clear();
  return agreed;
}

Status SharedWorkspace::replace(Session::Impl& session, const std::string& tag,
                                std::string_view kind, const std::string& parameters,
                                const kernels::WorkspaceParts& parts, const Status& so_far) {
  MK_ASSIGN_OR_RETURN(std::vector<Mover> moving, agreed_movers(session, tag));
  // An operator holds its old flags until it has moved: where flags run out, the rest stay. A rank
  // that fails goes on to the end, as all take part in the same exchanges.
  std::vector<OperatorWorkspace::Move> moves(moving.size());
  Status prepared = so_far;
  for (std::size_t i = 0; i < moving.size(); ++i) {
    const Status renewed = moving[i].workspace->renew_flags(session, moves[i], prepared);
    if (!renewed && renewed.error().code == ErrorCode::kLimitExceeded && prepared) {
      moving.resize(i);
      moves.resize(i);
    } else if (!renewed && prepared) {
      prepared = renewed;
    }
  }
  std::uint64_t words = 0;
  std::uint64_t data = parts.data;
  for (const Mover& one : moving) {
    words += one.workspace->parts_.words;
    data = std::max(data, one.workspace->parts_.data);
  }
  SharedMemory::Room room = SharedMemory::room_for(parts, words);
  room.data = data;
  const auto made = SharedMemory::make(session, kind, parameters, room, 0, executor_, prepared);
  const auto prepare = [&]() -> Status {
    if (!made) return propagate(made);
    for (std::size_t i = 0; i < moving.size(); ++i) {
      MK_RETURN_IF_ERROR(moving[i].workspace->place_in(*made, moves[i]));
      MK_RETURN_IF_ERROR(moving[i].op->prepare_move(moves[i].context, moves[i].data_moved));
    }
    return {};
  };
  if (prepared) prepared = prepare();
  // All or none, on all ranks.
  prepared = session.agree(tag + "/ready", kind, prepared);
  for (std::size_t i = 0; i < moving.size(); ++i) {
    if (prepared) {
      moving[i].op->move(*moving[i].workspace->memory_);
      moving[i].workspace->take(std::move(moves[i]));
    } else {
      moving[i].op->stay();
    }
  }
  if (prepared) memory_ = *made;
  return prepared;
}

// --- OperatorWorkspace ---

Result<OperatorWorkspace> OperatorWorkspace::create(Session::Impl& session, std::string_view kind,
                                                    const std::string& parameters,
                                                    const kernels::WorkspaceParts& parts,
                                                    std::uint32_t flag_count, bool own,
                                                    Executor executor) {
  const bool on_gpu = executor == Executor::kCuda;
  OperatorWorkspace made;
  made.kind_ = kind;
  made.parameters_ = parameters;
  made.parts_ = parts;
  made.flag_count_ = flag_count;
  // First: ranks count tags alike, also when a creation fails on some.
  const std::string tag = session.next_operator_tag("grow");
  auto request = std::make_unique<WorkspaceRequest>(parts, executor);
  WorkspaceRequest* const asked = request.get();
  // On a GPU a rank that fails takes part to the end, so that the others hear of it. Its own flags
  // come first: those of operators that move may take the rest.
  Move move;
  Status so_far;
  if (on_gpu) {
    auto own_memory = made.make_own(session, executor);
    so_far = own_memory.map([](const auto&) {});
    if (own_memory) move.own = std::move(*own_memory);
  }
  bool first = false;
  const auto make = [&]() -> Result<std::shared_ptr<SharedWorkspace>> {
    MK_ASSIGN_OR_RETURN(auto memory,
                        SharedMemory::make(session, kind, parameters, SharedMemory::room_for(parts),
                                           flag_count, executor, so_far));
    auto workspace = std::make_shared<SharedWorkspace>(std::move(memory), executor);
    asked->made = workspace;
    first = true;
    return workspace;
  };
  MK_ASSIGN_OR_RETURN(made.shared_,
                      SharedCores::find_or_make<SharedWorkspace>(
                          session, on_gpu ? "workspace on a GPU" : "workspace", own, make,
                          std::unique_ptr<SharedCores::Request>(std::move(request))));
  MK_RETURN_IF_ERROR(made.shared_->ensure(session, tag, kind, parameters, parts, so_far));
  made.alone_ = own;
  if (on_gpu || !first) {
    if (!on_gpu) {
      MK_ASSIGN_OR_RETURN(move.own, made.make_own(session, executor));
    }
    MK_RETURN_IF_ERROR(made.place_in(made.shared_->memory(), move));
    made.take(std::move(move));
    return made;
  }
  made.memory_ = made.shared_->memory();
  MK_ASSIGN_OR_RETURN(made.place_, made.memory_->add(kind, parts.words));
  made.context_ = made.memory_->context_of(made.place_);
  made.data_moved_ = made.place_.data_at - made.place_.words_at - parts.data_at;
  return made;
}

Result<std::unique_ptr<OperatorMemory>> OperatorWorkspace::make_own(Session::Impl& session,
                                                                    Executor executor,
                                                                    const Status& so_far) const {
  MK_ASSIGN_OR_RETURN(auto memory, OperatorMemory::create(session, kind_, parameters_, kPage,
                                                          flag_count_, executor, 0, so_far));
  return std::make_unique<OperatorMemory>(std::move(memory));
}

Status OperatorWorkspace::renew_flags(Session::Impl& session, Move& move,
                                      const Status& so_far) const {
  // Within a node kernels have none.
  if (session.options().nodes == 1) return {};
  MK_ASSIGN_OR_RETURN(move.own, make_own(session, Executor::kCuda, so_far));
  return {};
}

Status OperatorWorkspace::place_in(const std::shared_ptr<SharedMemory>& memory, Move& move) const {
  const OperatorMemory& own = move.own != nullptr ? *move.own : *own_;
  move.memory = memory;
  MK_ASSIGN_OR_RETURN(move.place, memory->add(kind_, parts_.words));
  move.context = memory->context_of(move.place, own.context(), alone_);
  move.data_moved = move.place.data_at - move.place.words_at - parts_.data_at;
  return {};
}

void OperatorWorkspace::take(Move move) {
  if (move.own != nullptr) own_ = std::move(move.own);
  memory_ = std::move(move.memory);
  place_ = move.place;
  context_ = move.context;
  data_moved_ = move.data_moved;
}

void OperatorWorkspace::let_move(MovingOperator& mover) {
  if (!alone_) shared_->add_mover(*this, mover);
}
void OperatorWorkspace::let_move_no_more(const MovingOperator& mover) {
  if (!alone_) shared_->remove_mover(mover);
}

}  // namespace mk
