/// \file
/// `mkrun OPERATOR`: an operator on the user's own tensors, split over ranks. The parent plans a
/// job and runs it; each rank process does its part. operators.h has the operators.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/tools/mkrun/safetensors.h"
#include "shm/host/result.h"

namespace mk::tools {

struct TensorName {
  std::string file, name;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TensorName, file, name)

/// What the parent checked and every rank is told.
struct Job {
  std::string op;
  std::map<std::string, TensorName> inputs;  ///< by the operator's names for them
  TensorName out;
  std::vector<std::uint64_t> out_shape;
  std::string dtype;  ///< computed and written in: "bf16", "f16"
  std::string activation = "none", partials = "element";  ///< of the products
  std::string partition = "planned";                      ///< partition_choice.h
  std::string executor = "cpu";  ///< "cpu", "cuda": rank r on GPU r modulo their number
  bool transposed = false, causal = false, interleaved = false, check = false;
  std::uint32_t nodes = 2, local = 2;
  std::uint64_t rows = 0;  ///< of the whole, as the operator counts them: rows, tokens, positions
  std::uint64_t rows_per_launch = 1024;
  std::vector<std::uint32_t> lengths;  ///< of packed sequences; none: there is one
  std::uint32_t timeout_ms = 120'000;
  int out_fd = -1;  ///< of a rank process: where the result goes

  std::uint32_t world() const { return nodes * local; }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Job, op, inputs, out, out_shape, dtype, activation, partials,
                                   partition, executor, transposed, causal, interleaved, check,
                                   nodes, local, rows, rows_per_launch, lengths, timeout_ms, out_fd)

/// What a rank reports after each launch.
struct LaunchDone {
  std::uint64_t total_ns = 0, network_bytes = 0;
  std::uint64_t nonfinite_partials = 0;  ///< see LaunchStats
  std::uint64_t compared = 0, wrong = 0;
  std::uint64_t copy_hash = 0;  ///< RankWork::copy_hash
  double worst_ratio = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LaunchDone, total_ns, network_bytes, nonfinite_partials,
                                   compared, wrong, copy_hash, worst_ratio)

struct JobOptions {
  std::string op;
  std::map<std::string, std::string> inputs;  ///< "file.safetensors:tensor"
  std::string out;                            ///< the tensor's name may be left out ("y")
  std::string dtype;                          ///< empty: f16 if all inputs are, else bf16
  std::string activation = "none", partials = "element", partition = "planned";
  std::string executor = "cpu";
  bool overwrite = false;  ///< `out` may be any file but an input
  bool transposed = false, causal = false, interleaved = false, check = false;
  std::uint32_t nodes = 2, local = 2;
  std::uint64_t rows_per_launch = 1024;
  std::vector<std::uint32_t> lengths;
  std::uint32_t timeout_ms = 120'000;
  std::string fabric = "loopback", link_bandwidth, link_latency;
  std::vector<std::string> join_sockets;
};

/// Opens the files, checks that shapes and values fit, and says what will be computed. Errors name
/// the option at fault.
Result<Job> plan_job(const JobOptions& options);
/// The job's output file, as a draft. Errors: see OutputFile::create.
Result<SafetensorsWriter> open_output(const JobOptions& options, const Job& job);

struct JobResult {
  std::uint64_t launches = 0, total_ns = 0, network_bytes = 0;
  std::uint64_t nonfinite_partials = 0;
  std::uint64_t compared = 0, wrong = 0;
  std::uint64_t unlike = 0;  ///< launches after which ranks' copies of the same thing differed
  double worst_ratio = 0;

  bool right() const { return wrong == 0 && unlike == 0; }
  /// One launch, as all ranks report it.
  void add(const std::vector<LaunchDone>& ranks);
};

/// Starts daemons (unless joined) and ranks, and waits. The output file appears when all of it is
/// there and no check failed. `progress(rows_done)` is called as it goes.
Result<JobResult> run_job(const JobOptions& options, const Job& job, SafetensorsWriter& writer,
                          const std::function<void(std::uint64_t)>& progress);

/// A rank process: launch after launch, of each it writes its part of the result.
Status run_job_rank(const Job& job, std::uint32_t rank, const std::string& socket,
                    const std::string& name, int report_fd);

}  // namespace mk::tools
