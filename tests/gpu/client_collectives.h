/// \file
/// The inputs and the output of a rank of a collective, for client_ranks.h. Work::op is the
/// operator's name; m rows of n elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "client/tools/numeric/sum_reference.h"
#include "mkernel/mkernel.h"
#include "tests/gpu/client_ranks.h"
#include "tests/gpu/gemm_reference.h"

namespace mk {

/// The inputs of all ranks, which a rank draws itself to judge by.
template <class Op>
class RankParts {
 public:
  RankParts(const Work& work, const AttachOptions& at) : work_(work), at_(at) {
    for (std::uint32_t rank = 0; rank < at.world; ++rank) inputs_.emplace_back(bytes());
  }

  std::uint32_t least() const { return 1; }
  /// Fresh inputs of all ranks, and NaN into the output.
  void draw(std::uint64_t launch, cudaStream_t stream) {
    for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
      test::fill_normal(inputs_[rank].data(), kernels::cuda::DType::kBf16,
                        std::int64_t{work_.m} * work_.n, (work_.seed + launch) * 64 + rank, stream);
    }
    test::poison(output_.data(), std::int64_t{work_.m} * work_.n, stream);
  }
  Status launch(Op& op, cudaStream_t stream, std::uint32_t m) const {
    return op.launch_on(stream, input_at(Op::input_rows(m, at_.world, at_.rank).first),
                        output_.data(), m);
  }
  /// Elements of this rank's output of a launch with m that are wrong.
  std::int64_t bad(std::uint32_t m, cudaStream_t stream) const {
    const RowRange rows = Op::output_rows(m, at_.world, at_.rank);
    tools::Comparison result;
    const auto found = rows_of(output_, 0, rows.count, stream);
    if constexpr (Op::kSums) {
      tools::SumReference sums(found.size(), at_.nodes, at_.local_size, DataType::kBf16);
      for (const test::DeviceMemory& input : inputs_)
        sums.add_rank(rows_of(input, rows.first, rows.count, stream).data());
      result = sums.compare(found.data());
    } else {
      for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
        const RowRange own = Op::input_rows(m, at_.world, rank);
        const auto brought = rows_of(inputs_[rank], own.first, own.count, stream);
        for (std::size_t i = 0; i < brought.size(); ++i)
          result.add(i, found[own.first * work_.n + i], brought[i], 0);
      }
    }
    return static_cast<std::int64_t>(result.wrong);
  }

 private:
  std::size_t bytes() const { return std::size_t{work_.m} * work_.n * 2; }
  const void* input_at(std::uint64_t row) const {
    return static_cast<const std::byte*>(inputs_[at_.rank].data()) + row * work_.n * 2;
  }
  std::vector<std::uint16_t> rows_of(const test::DeviceMemory& memory, std::uint64_t first,
                                     std::uint64_t count, cudaStream_t stream) const {
    std::vector<std::uint16_t> rows(count * work_.n);
    const auto* from = static_cast<const std::byte*>(memory.data()) + first * work_.n * 2;
    test::require(
        cudaMemcpyAsync(rows.data(), from, rows.size() * 2, cudaMemcpyDeviceToHost, stream),
        "rows");
    test::require(cudaStreamSynchronize(stream), "rows");
    return rows;
  }

  const Work work_;
  const AttachOptions at_;
  std::vector<test::DeviceMemory> inputs_;
  test::DeviceMemory output_{bytes()};
};

/// Collective.
template <class Op>
Result<Op> create_collective(Session& session, const Work& work) {
  Tuning tuning;
  tuning.executor = Executor::kCuda;
  tuning.wait_timeout = std::chrono::seconds(8);
  return Op::create(session, {work.m, work.n}, tuning);
}

}  // namespace mk
