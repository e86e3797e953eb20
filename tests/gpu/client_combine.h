/// \file
/// A rank's part of GEMM+Combine in the tests of libmkclient on GPUs: what RankMatrices is for
/// the products.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "mkernel/mkernel.h"
#include "tests/gpu/client_ranks.h"
#include "tests/gpu/combine_reference.h"
#include "tests/kernels/combine/handles.h"

namespace mk {

/// The routing, the rows and the experts of all ranks, which a rank draws itself to judge by; its
/// handles and its output. Work::op "combine": n is the width of tokens, k that of rows, m the most
/// tokens of a rank.
class RankRows {
 public:
  RankRows(const Work& work, const AttachOptions& at);

  std::uint32_t least() const { return 0; }
  const GemmCombine::Shape& shape() const { return shape_; }
  /// Fresh inputs of all ranks, and NaN into the output.
  void draw(std::uint64_t launch, cudaStream_t stream);
  /// The first `count` tokens of each rank. A handle of another number of tokens than ever before
  /// takes memory, which a captured launch may not.
  Status launch(GemmCombine& op, cudaStream_t stream, std::uint32_t count) const;
  /// Elements of this rank's output of such a launch that are wrong.
  std::int64_t bad(std::uint32_t count, cudaStream_t stream) const;

 private:
  /// What this rank's launches with one number of tokens get.
  struct DeviceHandle {
    std::unique_ptr<test::DeviceMemory> rows, offsets;
    std::size_t room = 0;
  };
  /// Of `rank`, when each rank has `count` tokens.
  kernels::testing::Handle handle_of(std::uint32_t rank, std::uint32_t count) const;
  void bring(std::uint32_t count, cudaStream_t stream) const;

  const Work work_;
  const AttachOptions at_;
  const GemmCombine::Shape shape_;
  const std::size_t rows_max_;
  std::uint64_t seed_ = 0;                              ///< of the last draw
  std::vector<kernels::testing::RankRouting> routing_;  ///< by rank
  std::vector<test::DeviceMemory> y_, experts_;         ///< by rank
  test::DeviceMemory ids_, residual_, out_;
  mutable std::map<std::uint32_t, DeviceHandle> handles_;  ///< by the number of tokens
};

/// Collective.
Result<GemmCombine> create_combine(Session& session, const RankRows& rows,
                                   std::chrono::seconds wait_timeout = std::chrono::seconds(8));

}  // namespace mk
