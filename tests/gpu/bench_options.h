/// \file
/// What operators_bench and mirror_bench are told in the same words, how they go through it, and
/// what their JSON says of it.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/host/cuda_options.h"
#include "tests/gpu/products.h"
#include "tests/gpu/rank_operator.h"

namespace mk::test {

/// Lists are of what is measured one after the other.
struct BenchOptions {
  std::vector<Op> ops;
  std::uint32_t ranks = 0;  ///< of all nodes
  std::uint32_t nodes = 1;
  std::string mkerneld;  ///< the program that joins nodes
  std::string link_bandwidth = "50GB/s";
  double link_bytes_per_s = 0;  ///< the same
  std::vector<Shape> shapes;    ///< none: bench_shapes
  int launches = 20;
  kernels::CudaOptions cuda;
  std::vector<std::uint32_t> streams;   ///< CudaOptions::stream_groups
  std::vector<std::uint32_t> chunks;    ///< bytes
  std::vector<std::uint32_t> receives;  ///< CudaOptions::receive_groups
  int check_up_to = 8192;               ///< rows
  std::string json;

  /// How usage() spells them; a program may add its own.
  static constexpr std::string_view kUsage =
      "[--op ag_gemm|gemm_rs|gemm_ar]... [--ranks R] [--nodes N] [--mkerneld PROGRAM] "
      "[--link-bandwidth 50GB/s] [--shape MxNxK]... [--launches L] [--streams G]... "
      "[--chunk BYTES]... [--receive G]... [--compute B] [--dma on|off] "
      "[--dma-bytes BYTES] [--sums-once on|off] [--spans on|off] [--piece-ns NS] [--check-up-to M] "
      "[--json FILE]";

  enum class Taken { kYes, kUnknown, kWrong };
  /// An argument and its value. kUnknown: it is none of these.
  Taken take(const std::string& argument, const std::string& value);
  /// After the last one: what was left open. False, having said why: the bandwidth is none.
  bool settle();
  std::uint32_t locals() const { return ranks / nodes; }
};

/// Of one run what its options leave to choose; 0: the operator's own choice.
struct BenchRun {
  Op op = Op::kAgGemm;
  Shape shape{};
  std::uint32_t streams = 0;
  std::uint32_t chunk_bytes = 0;
  std::uint32_t receives = 0;
  bool first = true;  ///< of those with this operator and shape
};
/// Every run, one after the other; whether all were right.
bool run_all(const BenchOptions& options, const std::function<bool(const BenchRun&)>& run);

/// A job of all ranks, as the run wants it.
JobSetup setup_of(const BenchOptions& options, const BenchRun& run);

/// What a row begins with. `op`: rank 0's.
nlohmann::ordered_json row_of(const BenchOptions& options, const BenchRun& run, RankOperator& op);

/// Microseconds of some launches: median, least and most.
nlohmann::ordered_json summary_of(const std::vector<double>& us);
/// When a launch's roles besides compute were done, in microseconds, for users.
std::string role_ends(const kernels::LaunchStats& stats);

/// What a document begins with: program, command, GPU and what was checked.
nlohmann::ordered_json document_of(const BenchOptions& options, const char* program, int argc,
                                   char** argv, int devices);
/// Of one node "none", else the paced fabric, with daemons `where`.
std::string network_of(const BenchOptions& options, std::string_view where);
/// Into BenchOptions::json, if it names a file. False: it could not be written.
bool write(const BenchOptions& options, const nlohmann::ordered_json& document);

}  // namespace mk::test
