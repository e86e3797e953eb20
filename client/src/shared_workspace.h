/// \file
/// Operators of a session that are not alike share the data of one workspace, and take turns in it
/// (kernels/comm/workspace_turn.h). Each has its own words there, its own flags and its own epochs.
/// The workspace has the data of the largest: it grows when a larger operator is created.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
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

/// One rank's. As a core, its users are the operators that have words there.
class SharedWorkspace final : public OperatorCore {
 public:
  /// Collective. With room for an operator that needs `parts`, and for words of more. The flags of
  /// that first operator come with it, behind those of turns: one exchange makes both.
  static Result<std::shared_ptr<SharedWorkspace>> make(Session::Impl& session,
                                                       std::string_view kind,
                                                       const std::string& parameters,
                                                       const kernels::WorkspaceParts& parts,
                                                       std::uint32_t flag_count);

  bool usable() const override;
  /// Whether it has room for the words of one more operator.
  bool has_room(std::uint64_t words) const;
  /// Equal on ranks that have made the same of it so far.
  std::string history() const;
  /// Collective, while no rank launches: has `bytes` of data then, or more.
  Status ensure_data(std::string_view tag, std::string_view kind, std::uint64_t bytes);

  /// One more operator is there.
  struct Place {
    std::uint32_t sharer = 0;
    std::uint64_t words_at = 0;
    std::uint64_t data_at = 0;  ///< from there
  };
  Place add(std::string_view kind, std::uint64_t words);
  /// For that operator's kernels: `own` has its flags.
  kernels::RankContext context_of(const Place& place, const kernels::RankContext& own);
  /// For the first operator's.
  kernels::RankContext context_of(const Place& place);

 private:
  explicit SharedWorkspace(OperatorMemory memory);

  OperatorMemory memory_;
  kernels::WorkspaceTurn turn_;
  std::uint64_t data_begin_ = 0;
  std::uint64_t words_end_ = 0;
  std::uint32_t sharers_ = 0;
  std::deque<kernels::WorkspaceShare> shares_;             ///< of the operators' contexts
  std::deque<std::string> names_;                          ///< turn_'s
  std::deque<std::vector<kernels::RailPeer>> rail_peers_;  ///< of the operators' contexts
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
                                          std::uint32_t flag_count, bool own);

  const kernels::RankContext& context() const { return context_; }
  /// By how much the plan's data is to be moved (kernels/comm/plan_tools.h).
  std::uint64_t data_moved() const { return data_moved_; }
  /// See OperatorCore.
  bool usable() const { return shared_->usable(); }
  bool claim() const { return shared_->claim(); }

 private:
  explicit OperatorWorkspace(CoreShare<SharedWorkspace> shared) : shared_(std::move(shared)) {}

  CoreShare<SharedWorkspace> shared_;
  /// Its flags, but the first operator's; the daemon hears by it when the operator goes.
  std::optional<OperatorMemory> own_;
  kernels::RankContext context_;
  std::uint64_t data_moved_ = 0;
};

}  // namespace mk
