/// \file
/// The ranks of one job, whatever their operator is, as partition_bench times them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/launch_stats.h"
#include "kernels/cuda/host/cuda_options.h"
#include "shm/host/result.h"
#include "tests/gpu/products.h"
#include "tests/gpu/rank_operator.h"

namespace mk::test {

/// A rank's groups outside the compute blocks, which an adaptive partition moves.
struct CommGroups {
  std::uint32_t streams = 0;  ///< without the watchers
  std::uint32_t receives = 0;
  std::uint32_t watchers = 0;
  std::uint32_t compute_blocks = 0;
};

class PartitionRanks {
 public:
  virtual ~PartitionRanks() = default;
  virtual std::uint32_t world() const = 0;
  virtual int device(std::uint32_t rank) const = 0;
  virtual cudaStream_t stream(std::uint32_t rank) const = 0;
  virtual Status launch(std::uint32_t rank) = 0;
  virtual Result<kernels::LaunchStats> finish(std::uint32_t rank) = 0;
  virtual CommGroups groups(std::uint32_t rank) = 0;
  virtual std::string progress(std::uint32_t rank) = 0;
  /// Whether the outputs of a launch after the last `poison` are right.
  virtual void poison() = 0;
  virtual bool right() = 0;
};

/// An operator with a shape: of the products as in BenchRun, of `ring` rows x heads x a head's
/// elements, of `moe` and `combine` tokens of a rank x hidden x features.
struct PartitionCase {
  std::string op;
  Shape shape{};
  std::uint32_t experts = 64, top_k = 4;
  /// So much of the tokens' choices goes to rank 0's experts beyond its part.
  double hot = 0;
};
/// With inputs. Ends the process on any failure.
std::unique_ptr<PartitionRanks> make_partition_ranks(const PartitionCase& what,
                                                     const PlacedSetup& job);
std::vector<Shape> partition_shapes(const std::string& op);

}  // namespace mk::test
