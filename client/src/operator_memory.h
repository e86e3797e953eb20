/// \file
/// What every operator does when it is created, whatever it computes: allocate and register its
/// workspace, take its flag range, exchange handles with all ranks and check that they agree, and
/// map the local peers' workspaces.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "client/src/session_impl.h"
#include "kernels/comm/rank_context.h"

namespace mk {

/// The memory of one operator on one rank. Owns the peers' mappings; the workspace belongs to the
/// session until `release`.
class OperatorMemory {
 public:
  /// Collective. `kind` names the operator ("gemm-ar"); `parameters` is what must be equal on all
  /// ranks, spelled for people ("m_max=4096 n=4096 ..."): kShapeMismatch quotes both sides.
  static Result<OperatorMemory> create(Session::Impl& session, std::string_view kind,
                                       const std::string& parameters, std::uint64_t workspace_bytes,
                                       std::uint32_t flag_count);

  OperatorMemory(OperatorMemory&&) noexcept;
  OperatorMemory& operator=(OperatorMemory&&) = delete;
  /// Gives the workspace back to the session.
  ~OperatorMemory();

  const kernels::RankContext& context() const { return context_; }

 private:
  explicit OperatorMemory(Session::Impl& session) : session_(&session) {}

  Session::Impl* session_;
  Buffer workspace_;
  std::vector<shm::BufferFile> peers_;
  kernels::RankContext context_;
};

}  // namespace mk
