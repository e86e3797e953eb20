/// \file
/// A rank's part of MoE Dispatch+GEMM in the tests of libmkclient on GPUs: what RankMatrices is
/// for the products.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "client/tools/numeric/moe_reference.h"
#include "mkernel/mkernel.h"
#include "tests/gpu/client_ranks.h"
#include "tests/gpu/gemm_reference.h"

namespace mk {

/// The tokens and the routing of all ranks, which a rank draws itself to judge by; its experts and
/// its output. Work::op "moe", or "moe-engines", by copy engines: k is the tokens' width, n that of
/// the output, m the most tokens of a rank.
class RankTokens {
 public:
  RankTokens(const Work& work, const AttachOptions& at);

  std::uint32_t least() const { return 0; }
  const MoeDispatchGemm::Shape& shape() const { return shape_; }
  Transport transport() const {
    return work_.op == "moe-engines" ? Transport::kEngines : Transport::kAuto;
  }
  /// Fresh inputs of all ranks, and NaN into the output.
  void draw(std::uint64_t launch, cudaStream_t stream);
  /// The first `count` tokens of each rank.
  Status launch(MoeDispatchGemm& op, cudaStream_t stream, std::uint32_t count) const;
  MoeDispatchGemm::Input input(std::uint32_t count) const;
  MoeDispatchGemm::Output output() const { return {y_.data(), shape_.rows_max}; }
  /// Elements of this rank's output of such a launch that are wrong.
  std::int64_t bad(std::uint32_t count, cudaStream_t stream) const;

 private:
  const Work work_;
  const AttachOptions at_;
  const MoeDispatchGemm::Shape shape_;
  const std::uint32_t experts_here_;
  std::vector<tools::MoeSource> routing_;   ///< by rank; without values
  std::vector<test::DeviceMemory> tokens_;  ///< by rank
  test::DeviceMemory ids_, weights_, experts_, y_;
};

/// Collective.
Result<MoeDispatchGemm> create_moe(Session& session, const RankTokens& tokens,
                                   std::chrono::seconds wait_timeout = std::chrono::seconds(8));

}  // namespace mk
