/// \file
/// `mkrun gemm-ar`: C = A B on the user's own tensors, the inner dimension split over the ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "client/tools/mkrun/safetensors.h"
#include "shm/host/result.h"

namespace mk::tools {

/// What the parent checked and every rank is told.
struct GemmArJob {
  std::string a_file, a_name;  ///< [m, k]
  std::string b_file, b_name;  ///< [k, n], or [n, k] when `b_transposed`
  std::string out_file, out_name;
  std::uint64_t m = 0, n = 0, k = 0;
  bool b_transposed = false;
  std::string dtype;  ///< computed and written in: "bf16", "f16"
  bool check = false;
  std::uint32_t nodes = 2, local = 2;
  std::uint64_t rows_per_launch = 1024;
  std::uint32_t timeout_ms = 120'000;

  std::uint32_t world() const { return nodes * local; }
  /// The slice [first, last) of the inner dimension that is `rank`'s.
  std::uint64_t k_first(std::uint32_t rank) const { return k * rank / world(); }
  std::uint64_t k_last(std::uint32_t rank) const { return k * (rank + 1) / world(); }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GemmArJob, a_file, a_name, b_file, b_name, out_file, out_name, m,
                                   n, k, b_transposed, dtype, check, nodes, local, rows_per_launch,
                                   timeout_ms)

/// What a rank reports after each launch.
struct RowsDone {
  std::uint64_t first = 0, rows = 0;
  std::uint64_t total_ns = 0, network_bytes = 0;
  std::uint64_t compared = 0, wrong = 0;
  double worst_ratio = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RowsDone, first, rows, total_ns, network_bytes, compared, wrong,
                                   worst_ratio)

struct GemmArJobOptions {
  std::string a, b,
      out;            ///< "file.safetensors:tensor"; the output's tensor name may be left out ("y")
  std::string dtype;  ///< empty: f16 if both inputs are, else bf16
  bool b_transposed = false;
  bool check = false;
  std::uint32_t nodes = 2, local = 2;
  std::uint64_t rows_per_launch = 1024;
  std::uint32_t timeout_ms = 120'000;
  std::string fabric = "loopback", link_bandwidth, link_latency;
  std::vector<std::string> join_sockets;
};

/// Opens the files, checks that the shapes fit, and says what will be computed. Errors name the
/// option at fault.
Result<GemmArJob> plan_gemm_ar_job(const GemmArJobOptions& options);

struct GemmArJobResult {
  std::uint64_t launches = 0, total_ns = 0, network_bytes = 0;
  std::uint64_t compared = 0, wrong = 0;
  double worst_ratio = 0;
};

/// Starts daemons (unless joined) and ranks, and waits; the output file appears when all of it is
/// there and no check failed. `progress(rows_done)` is called as it goes.
Result<GemmArJobResult> run_gemm_ar_job(const GemmArJobOptions& options, const GemmArJob& job,
                                        const std::function<void(std::uint64_t)>& progress);

/// A rank process: reads its slices, launches row block by row block, and, as rank 0, writes the
/// output.
Status run_gemm_ar_job_rank(const GemmArJob& job, std::uint32_t rank, const std::string& socket,
                            const std::string& name, int report_fd);

}  // namespace mk::tools
