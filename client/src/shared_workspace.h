/// \file
/// Operators of a session that are not alike share the data of one workspace, and take turns in it
/// (kernels/comm/workspace_turn.h). Each has its own words there, its own flags and its own epochs.
/// The workspace has the data of the largest: a larger operator enlarges it. Memory of the host
/// grows where it is. On a GPU another one takes its place, and operators move there, with new
/// flags: their epochs begin anew.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "client/src/operator_memory.h"
#include "client/src/session_impl.h"
#include "client/src/shared_core.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/workspace_turn.h"

namespace mk {

/// The memory that operators have in common, on one rank: goes with the last of them.
class SharedMemory {
 public:
  /// Its sizes, but for flags. Words come first.
  struct Room {
    std::uint64_t words = 0;
    std::uint64_t spare = 0;  ///< of the words, for operators that may come
    std::uint64_t data = 0;
  };
  /// For an operator with `parts`, for others that have `words` there already, and for more.
  static Room room_for(const kernels::WorkspaceParts& parts, std::uint64_t words = 0);

  /// Collective. `flag_count` flags are the first operator's, behind those of turns. `so_far`: see
  /// OperatorMemory::create.
  static Result<std::shared_ptr<SharedMemory>> make(Session::Impl& session, std::string_view kind,
                                                    const std::string& parameters, const Room& room,
                                                    std::uint32_t flag_count, Executor executor,
                                                    const Status& so_far = {});

  /// Whether it has room for the words of one more operator.
  bool has_room(std::uint64_t words) const;
  /// Whether an operator can still launch here.
  bool usable() const;
  /// Equal on ranks that have made the same of it so far.
  std::string history() const;
  std::uint64_t data_bytes() const { return memory_.bytes() - data_begin_; }
  /// Collective, in memory of the host, while no rank launches: has `bytes` of data then, or more.
  Status grow_data(std::string_view tag, std::string_view kind, std::uint64_t bytes);

  /// One more operator is there.
  struct Place {
    std::uint32_t sharer = 0;
    std::uint64_t words_at = 0;
    std::uint64_t data_at = 0;  ///< from there
  };
  /// kLimitExceeded on all ranks alike.
  Result<Place> add(std::string_view kind, std::uint64_t words);
  /// For that operator's kernels: `own` has its flags. `alone`: it takes no turns.
  kernels::RankContext context_of(const Place& place, const kernels::RankContext& own,
                                  bool alone = false);
  /// For the first operator's, which has the memory's.
  kernels::RankContext context_of(const Place& place);

  /// On a GPU: launches that the operator has put on streams.
  std::uint32_t queued(std::uint32_t sharer) const { return turn_.queued[sharer]; }
  /// On a GPU: whether these have ended well by then, and no graph has any.
  bool is_quiet(std::uint32_t sharer, std::chrono::steady_clock::time_point deadline) const;
  /// See OperatorMemory.
  void keep(std::shared_ptr<void> rest) { memory_.keep(std::move(rest)); }

 private:
  SharedMemory(OperatorMemory memory, Executor executor);

  OperatorMemory memory_;
  const Executor executor_;
  kernels::WorkspaceTurn turn_;
  std::uint64_t data_begin_ = 0;
  std::uint64_t words_end_ = 0;
  std::uint32_t sharers_ = 0;
  std::deque<kernels::WorkspaceShare> shares_;             ///< of the operators' contexts
  std::deque<std::string> names_;                          ///< turn_'s
  std::deque<std::vector<kernels::RailPeer>> rail_peers_;  ///< of the operators' contexts
};

class OperatorWorkspace;

/// An operator on a GPU that can go on in other memory, with kernels' state and epochs anew.
class MovingOperator {
 public:
  virtual ~MovingOperator() = default;
  /// Whether nobody holds on to what it has there; of those that have ended all launches.
  virtual bool may_move() = 0;
  /// Makes ready for a context and data there (OperatorWorkspace). Then one of the others.
  virtual Status prepare_move(const kernels::RankContext& context, std::uint64_t data_moved) = 0;
  virtual void stay() = 0;
  /// `old`: keeps what kernels of the old place may yet use.
  virtual void move(SharedMemory& old) = 0;
};

/// One rank's. As a core, its users are the operators that have words there.
class SharedWorkspace final : public OperatorCore {
 public:
  SharedWorkspace(std::shared_ptr<SharedMemory> memory, Executor executor)
      : memory_(std::move(memory)), executor_(executor) {}

  bool usable() const override { return memory_->usable(); }
  Executor executor() const { return executor_; }
  /// The newest.
  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }
  /// Collective, while no rank launches: has room for an operator with `parts` then. `tag`: for
  /// that. `so_far`: see OperatorMemory::create.
  Status ensure(Session::Impl& session, const std::string& tag, std::string_view kind,
                const std::string& parameters, const kernels::WorkspaceParts& parts,
                const Status& so_far);

  // Operators that may move, in the order of their creation; until they go.
  void add_mover(OperatorWorkspace& workspace, MovingOperator& mover);
  void remove_mover(const MovingOperator& mover);

 private:
  struct Mover {
    OperatorWorkspace* workspace;
    MovingOperator* op;
  };
  Status replace(Session::Impl& session, const std::string& tag, std::string_view kind,
                 const std::string& parameters, const kernels::WorkspaceParts& parts,
                 const Status& so_far);
  /// The movers in the newest memory that all ranks let go.
  Result<std::vector<Mover>> agreed_movers(Session::Impl& session, const std::string& tag);

  std::shared_ptr<SharedMemory> memory_;
  const Executor executor_;
  std::vector<Mover> movers_;
};

/// The memory of one operator on one rank: words and flags of its own, and data that it shares or
/// has for itself.
class OperatorWorkspace {
 public:
  /// Collective; `kind` and `parameters`: see OperatorMemory. `own`: this rank's operator shares
  /// with none, and therefore no rank's does.
  static Result<OperatorWorkspace> create(Session::Impl& session, std::string_view kind,
                                          const std::string& parameters,
                                          const kernels::WorkspaceParts& parts,
                                          std::uint32_t flag_count, bool own,
                                          Executor executor = Executor::kCpu);

  const kernels::RankContext& context() const { return context_; }
  /// By how much the plan's data is to be moved (kernels/comm/plan_tools.h).
  std::uint64_t data_moved() const { return data_moved_; }
  /// See OperatorCore.
  bool usable() const { return memory_->usable(); }
  bool claim() const { return shared_->claim(); }

  // On a GPU.

  /// See OperatorMemory.
  void keep(std::shared_ptr<void> rest) { own_->keep(std::move(rest)); }
  /// The operator moves from now on, if it shares, until it says that it goes. This object stays
  /// where it is.
  void let_move(MovingOperator& mover);
  void let_move_no_more(const MovingOperator& mover);
  /// Whether it has launched in the memory where it is.
  bool has_launched() const { return memory_->queued(place_.sharer) != 0; }

 private:
  friend class SharedWorkspace;
  OperatorWorkspace() = default;

  /// To a place in other memory.
  struct Move {
    std::unique_ptr<OperatorMemory> own;  ///< null: it keeps what it has
    std::shared_ptr<SharedMemory> memory;
    SharedMemory::Place place;
    kernels::RankContext context;
    std::uint64_t data_moved = 0;
  };
  /// Collective. `so_far`: see OperatorMemory::create.
  Result<std::unique_ptr<OperatorMemory>> make_own(Session::Impl& session, Executor executor,
                                                   const Status& so_far = {}) const;
  /// Collective, on a GPU: flags that show no old epoch.
  Status renew_flags(Session::Impl& session, Move& move, const Status& so_far) const;
  Status place_in(const std::shared_ptr<SharedMemory>& memory, Move& move) const;
  void take(Move move);

  std::string kind_;
  std::string parameters_;
  kernels::WorkspaceParts parts_;
  std::uint32_t flag_count_ = 0;
  bool alone_ = false;
  CoreShare<SharedWorkspace> shared_;
  std::shared_ptr<SharedMemory> memory_;  ///< where it is
  /// Its flags, but of the first operator on CPUs; the daemon hears by it when the operator goes.
  std::unique_ptr<OperatorMemory> own_;
  SharedMemory::Place place_;
  kernels::RankContext context_;
  std::uint64_t data_moved_ = 0;
};

}  // namespace mk
