/// \file
/// Inputs that any rank can make again, of any rank; who has which rows; and what moving them
/// takes.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "client/tools/numeric/random_matrix.h"
#include "kernels/plan/candidate.h"
#include "mkernel/mkernel.h"
#include "tests/bench/mkbench/spec.h"

namespace mk::bench {

using Elements = std::vector<std::uint16_t>;

inline DataType data_type_of(const BenchSpec& spec) {
  return spec.dtype == "f16" ? DataType::kF16 : DataType::kBf16;
}

/// A problem of the run's world and type, without a shape.
inline kernels::plan::Problem planned_problem(kernels::plan::Op op, const BenchSpec& spec) {
  kernels::plan::Problem problem;
  problem.op = op;
  problem.nodes = spec.nodes;
  problem.locals = spec.local;
  if (spec.dtype == "f16") problem.dtype = kernels::DType::kF16;
  return problem;
}

/// Input `which` of `rank` in launch `launch`, all elements within +-1.
inline tools::RandomMatrix input_matrix(const BenchSpec& spec, std::uint32_t launch,
                                        std::uint32_t rank, std::uint32_t which,
                                        std::uint64_t columns) {
  return {spec.seed, std::uint64_t{launch} << 32 | std::uint64_t{which} << 24 | rank, columns,
          data_type_of(spec)};
}
inline Elements rows_of(const tools::RandomMatrix& matrix, std::uint64_t first,
                        std::uint64_t count) {
  Elements rows(count * matrix.columns);
  matrix.rows(first, count, rows.data());
  return rows;
}

/// Rows [first, first + count).
struct RankShare {
  std::uint64_t first = 0, count = 0;
};
/// The operators' rule: rank r of W has the rows [r m / W, (r + 1) m / W), rounded down.
constexpr RankShare share_of(std::uint64_t rows, std::uint32_t parts, std::uint32_t part) {
  const std::uint64_t first = rows * part / parts;
  return {first, rows * (part + 1) / parts - first};
}

/// The network's part of gathering every rank's bytes on every node. Each node hands on to the next
/// one what it has of its rail, round the ring, except what that node had first. `bytes_of(rank)`:
/// what a rank brings.
template <class BytesOf>
Work ring_work(const BenchSpec& spec, std::uint32_t rank, const BytesOf& bytes_of) {
  Work work;
  const std::uint32_t next = (rank / spec.local + 1) % spec.nodes;
  for (std::uint32_t node = 0; node < spec.nodes; ++node) {
    if (node != next) work.network_bytes += bytes_of(node * spec.local + rank % spec.local);
  }
  work.link_bytes = work.network_bytes;
  return work;
}

}  // namespace mk::bench
