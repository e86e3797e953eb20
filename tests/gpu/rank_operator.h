/// \file
/// One rank of an operator, whichever of the three: how a test or benchmark describes the job it is
/// part of, plans it, and makes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/ops/ag_gemm/sm90.h"
#include "kernels/ops/gemm_ar/sm90.h"
#include "kernels/ops/gemm_rs/sm90.h"
#include "tests/gpu/placed_ranks.h"

namespace mk::test {

/// The multiprocessors of a GPU, an H100 or H200.
inline constexpr std::uint32_t kMultiprocessors = 132;

enum class Op { kAgGemm, kGemmRs, kGemmAr };
const char* name(Op op);

struct JobSetup : PlacedSetup {
  Op op = Op::kGemmAr;
  std::uint32_t m = 0, n = 0;
  std::vector<std::uint32_t> k;  ///< by rank; AG+GEMM: all the same
  kernels::DType dtype = kernels::DType::kBf16;
  kernels::GemmResult result;                ///< AG+GEMM: its partials are of no effect
  kernels::Tiling tiling;                    ///< tile_m 0: the operator's own
  std::uint32_t local_banks = 0;             ///< 0: the tiling's
  std::uint32_t banks = 0;                   ///< likewise
  std::uint32_t chunk_bytes = 0;             ///< 0: the tiling's
  std::vector<std::uint32_t> stream_groups;  ///< by rank; none: all as the options say
  bool gathers = false;                      ///< AG+GEMM: the caller wants the whole A, too
  std::uint32_t gap = 0;  ///< elements (a multiple of 8) between the caller's rows of A, B and C
  /// GEMM+AR: the caller reads C there; AG+GEMM: the caller's A lies there. (Not of one rank.)
  bool in_workspace = false;

  /// Columns of C.
  std::uint32_t c_columns() const { return result.epilogue.columns_of(n); }
};

/// What the operators have in common.
class RankOperator {
 public:
  virtual ~RankOperator() = default;
  virtual Status launch(cudaStream_t stream, const void* a, const void* b, void* c, void* gathered,
                        const void* bias, std::uint32_t m, kernels::Mode mode) = 0;
  virtual Status status() const = 0;
  virtual Result<kernels::LaunchStats> finish(cudaStream_t stream) = 0;
  virtual const kernels::RoleBlocks& blocks() const = 0;
  virtual std::uint32_t stream_groups() const = 0;                        ///< OperatorBase
  virtual const kernels::AgGemmCuda* ag_gemm() const { return nullptr; }  ///< if it is one
  virtual std::string progress() const = 0;
  /// In the workspace, GEMM+AR's C and AG+GEMM's A.
  virtual const void* output() const { return nullptr; }
  virtual void* input() const { return nullptr; }
};

/// An operator's plan, whichever it is.
struct Plan {
  kernels::AgGemmPlan ag;
  kernels::GemmRsPlan rs;
  kernels::GemmArPlan ar;
  std::uint64_t workspace_bytes = 0;
  std::uint32_t flags = 0;
};

/// `blocks`: the SMs of a rank. Ends the process where there is no such plan.
Plan make_plan(const JobSetup& setup, std::uint32_t blocks);

/// On the current device; ends the process on any failure. `options`: those of this rank.
std::unique_ptr<RankOperator> make_operator(const JobSetup& setup, const Plan& plan,
                                            std::uint32_t rank, const kernels::RankContext& context,
                                            const kernels::CudaOptions& options);

}  // namespace mk::test
