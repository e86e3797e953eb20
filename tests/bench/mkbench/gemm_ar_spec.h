/// \file
/// One GEMM+AllReduce measurement: what the parent tells its rank processes, and what a rank
/// reports back, as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace mk::bench {

struct GemmArSpec {
  std::uint32_t nodes = 2, local = 2;
  std::uint64_t m = 1024, n = 1024, k = 512;  ///< k: each rank's share
  std::string dtype = "bf16";
  std::uint32_t warmup = 2, iterations = 10;
  std::string verify = "all";  ///< "all" launches, "first" of each mode, "none"
  std::string modes = "both";  ///< "both", "fused", "unfused"
  std::uint64_t seed = 0;
  std::uint32_t tile_m = 0, tile_n = 0, chunk_bytes = 0, compute_blocks = 0;
  std::uint32_t timeout_ms = 60'000;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GemmArSpec, nodes, local, m, n, k, dtype, warmup, iterations,
                                   verify, modes, seed, tile_m, tile_n, chunk_bytes, compute_blocks,
                                   timeout_ms)

/// One launch on one rank. Every launch of a run has its own number, so that its inputs are its
/// own.
struct LaunchReport {
  std::uint32_t launch = 0;
  std::string fabric;  ///< as the daemon names it
  bool fused = true;
  bool warmup = false;
  std::uint64_t total_ns = 0, compute_ns = 0;
  std::uint64_t network_bytes = 0, network_commands = 0;
  std::uint64_t output_hash = 0;
  bool verified = false;
  std::uint64_t wrong = 0, compared = 0;
  double worst_ratio = 0, max_error = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LaunchReport, launch, fabric, fused, warmup, total_ns,
                                   compute_ns, network_bytes, network_commands, output_hash,
                                   verified, wrong, compared, worst_ratio, max_error)

}  // namespace mk::bench
