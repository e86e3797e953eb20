#include "client/tools/mkrun/job.h"

#include <algorithm>
#include <filesystem>

#include "client/tools/launch/local_job.h"

namespace mk::tools {
namespace {

struct TensorName {
  std::string file, name;
};

/// "file:tensor"; the last colon separates.
TensorName split_name(const std::string& text, const std::string& default_name) {
  const auto colon = text.rfind(':');
  if (colon == std::string::npos) return {text, default_name};
  return {text.substr(0, colon), text.substr(colon + 1)};
}

struct Matrix {
  TensorName name;
  TensorInfo info;
};

Result<Matrix> open_matrix(const char* option, const std::string& text) {
  Matrix matrix{split_name(text, ""), {}};
  if (matrix.name.name.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "{} '{}' names no tensor: write FILE.safetensors:TENSOR", option, text);
  }
  MK_ASSIGN_OR_RETURN(const auto file, SafetensorsFile::open(matrix.name.file));
  auto info = file.find(matrix.name.name);
  if (!info)
    return fail(info.error().code, "{} {}: {}", option, matrix.name.file, info.error().message);
  matrix.info = std::move(*info);
  if (dtype_bytes(matrix.info.dtype) == 0) {
    return fail(ErrorCode::kInvalidArgument, "{} '{}' is {}; mkrun takes BF16, F16 and F32", option,
                text, matrix.info.dtype);
  }
  if (matrix.info.shape.size() != 2 || matrix.info.shape[0] == 0 || matrix.info.shape[1] == 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{} '{}' has shape [{}]; mkrun takes matrices that are not empty", option, text,
                fmt::join(matrix.info.shape, ", "));
  }
  return matrix;
}

}  // namespace

Result<GemmArJob> plan_gemm_ar_job(const GemmArJobOptions& options) {
  MK_ASSIGN_OR_RETURN(const Matrix a, open_matrix("--a", options.a));
  MK_ASSIGN_OR_RETURN(const Matrix b, open_matrix("--b", options.b));
  const TensorName out = split_name(options.out, "y");
  if (out.file.empty() || out.name.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--out '{}' is not FILE.safetensors or FILE.safetensors:TENSOR", options.out);
  }
  GemmArJob job;
  // Ranks may run in another working directory's daemon, never in another file: pass absolute
  // paths.
  job.a_file = std::filesystem::absolute(a.name.file);
  job.b_file = std::filesystem::absolute(b.name.file);
  job.out_file = std::filesystem::absolute(out.file);
  job.a_name = a.name.name;
  job.b_name = b.name.name;
  job.out_name = out.name;
  job.b_transposed = options.b_transposed;
  job.m = a.info.shape[0];
  job.k = a.info.shape[1];
  job.n = b.info.shape[options.b_transposed ? 0 : 1];
  if (const std::uint64_t b_k = b.info.shape[options.b_transposed ? 1 : 0]; b_k != job.k) {
    return fail(ErrorCode::kShapeMismatch,
                "--a is [{}] and --b [{}]: the inner dimensions {} and {} differ{}",
                fmt::join(a.info.shape, ", "), fmt::join(b.info.shape, ", "), job.k, b_k,
                b.info.shape[options.b_transposed ? 0 : 1] == job.k
                    ? (options.b_transposed ? "; without --b-transposed they fit"
                                            : "; with --b-transposed they fit")
                    : "");
  }
  job.nodes = options.nodes;
  job.local = options.local;
  if (job.k < job.world()) {
    return fail(ErrorCode::kInvalidArgument,
                "the inner dimension {} can't be split over {} ranks; use fewer", job.k,
                job.world());
  }
  job.dtype = options.dtype;
  if (job.dtype.empty())
    job.dtype = a.info.dtype == "F16" && b.info.dtype == "F16" ? "f16" : "bf16";
  job.check = options.check;
  job.rows_per_launch = std::min(options.rows_per_launch, job.m);
  job.timeout_ms = options.timeout_ms;
  return job;
}

namespace {

/// Daemons, ranks, and the finished output as OUT.partial.
Result<GemmArJobResult> run_ranks(const GemmArJobOptions& options, const GemmArJob& job,
                                  const std::function<void(std::uint64_t)>& progress) {
  LocalJobOptions local;
  local.name = "mkrun";
  local.local = job.local;
  local.daemons.nodes = job.nodes;
  local.daemons.fabric = options.fabric;
  local.daemons.link_bandwidth = options.link_bandwidth;
  local.daemons.link_latency = options.link_latency;
  local.join_sockets = options.join_sockets;
  MK_ASSIGN_OR_RETURN(auto ranks, LocalJob::start(local, job));
  GemmArJobResult result;
  // Reading inputs, a launch and its check; every wait inside ends much earlier when something is
  // wrong.
  const auto patience = std::chrono::milliseconds{job.timeout_ms} * 4;
  for (std::uint64_t first = 0; first < job.m; first += job.rows_per_launch) {
    const std::string what = fmt::format("rows {} on", first);
    MK_ASSIGN_OR_RETURN(const auto reports, ranks.read_reports(patience, what));
    std::uint64_t slowest_ns = 0;
    for (const auto& report : reports) {
      const auto done = report.get<RowsDone>();
      slowest_ns = std::max(slowest_ns, done.total_ns);
      result.network_bytes += done.network_bytes;
      result.compared += done.compared;
      result.wrong += done.wrong;
      result.worst_ratio = std::max(result.worst_ratio, done.worst_ratio);
    }
    ++result.launches;
    result.total_ns += slowest_ns;
    progress(std::min(first + job.rows_per_launch, job.m));
  }
  MK_RETURN_IF_ERROR(ranks.finish_ranks(patience));
  MK_RETURN_IF_ERROR(ranks.stop_daemons());
  return result;
}

}  // namespace

Result<GemmArJobResult> run_gemm_ar_job(const GemmArJobOptions& options, const GemmArJob& job,
                                        const std::function<void(std::uint64_t)>& progress) {
  auto result = run_ranks(options, job, progress);
  if (!result || result->wrong != 0) {
    SafetensorsWriter::discard(job.out_file);
    return result;
  }
  MK_RETURN_IF_ERROR(SafetensorsWriter::publish(job.out_file));
  return result;
}

}  // namespace mk::tools
