/// \file
/// Makes what all ranks agree on about one gather, and places it in an operator's workspace and
/// among its flags. Host only.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/comm/plan_tools.h"
#include "kernels/gather/geometry.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// What is gathered from every rank.
struct GatherShape {
  std::uint32_t rows_max = 0;   ///< 1 .. kGatherRowsMax; a launch gathers 0 .. rows_max of any rank
  std::uint32_t row_bytes = 0;  ///< 1 .. kGatherRowBytesMax
  /// Arrival flags at most, unless a header and one chunk of every sender need more.
  std::uint32_t flags_max = kOperatorFlagsMax;
};
inline constexpr std::uint32_t kGatherRowBytesMax = 1u << 26;
inline constexpr std::uint32_t kGatherRowsMax = 1u << 30;

/// An operator's plan makes one (or several), and places it:
///
///     MK_ASSIGN_OR_RETURN(plan.gather, GatherPlan::make("ag_gemm", nodes, locals, shape,
///                                                       GatherKind::kBroadcast, 0, banks));
///     WorkspaceLayout workspace(locals);
///     plan.gather.place(workspace, 0);      // a second one: from the first one's flag_count() on
///     workspace.begin_data();
///     plan.gather.place_rows(workspace);
///
/// Its flag_count() and its fingerprint() then go into the operator's.
struct GatherPlan : GatherGeometry {
  /// `chunk_bytes` 0: 128 rows, but 32 KiB to 4 MiB, halved (to 32 KiB at the least) while a full
  /// shard would have fewer than 4 chunks. Else it is what was asked for, rounded up to whole lines
  /// of 64 bytes. Either way doubled while the chunks need too many flags. `local_banks` 0, or more
  /// than `banks`: as those; of one node they are all there is. `op` names the operator in
  /// messages. Errors: kInvalidArgument, kLimitExceeded.
  static Result<GatherPlan> make(std::string_view op, std::uint32_t nodes, std::uint32_t locals,
                                 const GatherShape& shape, GatherKind kind,
                                 std::uint32_t chunk_bytes, std::uint32_t banks,
                                 std::uint32_t local_banks = 0);

  /// Takes its words of the workspace, and the operator's flags from `first_flag` on, a multiple of
  /// shm::kFlagGranule.
  void place(WorkspaceLayout& workspace, std::uint32_t first_flag);
  /// Takes its part of the data: where the rows lie.
  void place_rows(WorkspaceLayout& workspace);

  /// In whole granules; 0 with one node.
  std::uint32_t flag_count() const;
  std::uint64_t fingerprint() const;
};

}  // namespace mk::kernels
