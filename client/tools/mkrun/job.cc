#include "client/tools/mkrun/job.h"

#include <algorithm>
#include <filesystem>

#include "client/tools/launch/local_job.h"
#include "client/tools/mkrun/operators.h"

namespace mk::tools {
namespace {

/// "file:tensor"; the last colon separates.
TensorName split_name(const std::string& text, const std::string& default_name) {
  const auto colon = text.rfind(':');
  if (colon == std::string::npos) return {text, default_name};
  return {text.substr(0, colon), text.substr(colon + 1)};
}

Result<Tensor> open_input(const InputSpec& input, const std::string& text, const TensorName& name) {
  if (name.name.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--{} '{}' names no tensor: write FILE.safetensors:TENSOR", input.name, text);
  }
  auto tensor = Tensor::open(name.file, name.name);
  if (!tensor)
    return fail(tensor.error().code, "--{} {}: {}", input.name, name.file, tensor.error().message);
  const std::string& dtype = tensor->dtype();
  const bool whole = dtype == "I32" || dtype == "I64";
  if (dtype_bytes(dtype) == 0 || whole != input.whole_numbers) {
    return fail(ErrorCode::kInvalidArgument, "--{} '{}' is {}; mkrun takes {} here", input.name,
                text, dtype, input.whole_numbers ? "I32 and I64" : "BF16, F16 and F32");
  }
  const auto& shape = tensor->shape();
  if (shape.size() != input.dimensions ||
      std::find(shape.begin(), shape.end(), 0u) != shape.end()) {
    return fail(ErrorCode::kInvalidArgument,
                "--{} '{}' has shape [{}]; mkrun takes {} dimensions here, none of them 0",
                input.name, text, fmt::join(shape, ", "), input.dimensions);
  }
  return tensor;
}

/// No finite element may become an infinity on its way into the job's type.
Status check_range(const InputSpec& input, const std::string& text, const Tensor& tensor,
                   const Job& job) {
  const auto overflow = tensor.overflow_in(type_of(job));
  if (overflow.count == 0) return {};
  const bool bf16_holds_it =
      type_of(job) == DataType::kF16 && tensor.overflow_in(DataType::kBf16).count == 0;
  return fail(ErrorCode::kInvalidArgument,
              "--{} '{}': {} of its elements are beyond the range of {} (at most {:.6g} in "
              "magnitude) and would become infinite; the first is {} = {:.6g}. {}",
              input.name, text, overflow.count, job.dtype,
              type_of(job) == DataType::kF16 ? 65504.0 : (2 - 0x1p-7) * 0x1p127,
              tensor.place_of(overflow.first), overflow.value,
              bf16_holds_it ? "Say --dtype bf16, or scale the tensor" : "Scale the tensor");
}

}  // namespace

const std::vector<const JobOperator*>& job_operators() {
#define MK_OPERATOR(id, name, Class) &id##_operator(),
  static const std::vector<const JobOperator*> all = {MK_OPERATORS(MK_OPERATOR)};
#undef MK_OPERATOR
  return all;
}

const JobOperator* find_job_operator(const std::string& name) {
  for (const JobOperator* op : job_operators())
    if (op->name() == name) return op;
  return nullptr;
}

Result<Job> plan_job(const JobOptions& options) {
  const JobOperator* op = find_job_operator(options.op);
  if (op == nullptr) return fail(ErrorCode::kNotFound, "there is no operator '{}'", options.op);
  Job job;
  job.op = options.op;
  job.activation = options.activation;
  job.partials = options.partials;
  job.partition = options.partition;
  job.transposed = options.transposed;
  job.causal = options.causal;
  job.interleaved = options.interleaved;
  job.check = options.check;
  job.executor = options.executor;
  job.nodes = options.nodes;
  job.local = options.local;
  job.rows_per_launch = options.rows_per_launch;
  job.lengths = options.lengths;
  job.timeout_ms = options.timeout_ms;
  Tensors tensors;
  bool all_f16 = true;
  for (const InputSpec& input : op->inputs()) {
    const auto given = options.inputs.find(input.name);
    const bool missing = given == options.inputs.end() || given->second.empty();
    if (missing && input.optional) continue;
    if (missing) return fail(ErrorCode::kInvalidArgument, "--{} is missing", input.name);
    const TensorName name = split_name(given->second, "");
    MK_ASSIGN_OR_RETURN(auto tensor, open_input(input, given->second, name));
    if (!input.whole_numbers) all_f16 = all_f16 && tensor.dtype() == "F16";
    tensors.emplace(input.name, std::move(tensor));
    // Ranks may run in another working directory's daemon, never in another file.
    job.inputs[input.name] = {std::filesystem::absolute(name.file), name.name};
  }
  job.dtype = !options.dtype.empty() ? options.dtype : all_f16 ? "f16" : "bf16";
  const TensorName out = split_name(options.out, "y");
  if (out.file.empty() || out.name.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--out '{}' is not FILE.safetensors or FILE.safetensors:TENSOR", options.out);
  }
  job.out = {std::filesystem::absolute(out.file), out.name};
  MK_RETURN_IF_ERROR(op->plan(tensors, job));
  for (const InputSpec& input : op->inputs()) {
    if (input.whole_numbers || tensors.count(input.name) == 0) continue;
    MK_RETURN_IF_ERROR(
        check_range(input, options.inputs.at(input.name), tensors.at(input.name), job));
  }
  job.rows_per_launch = std::min(job.rows_per_launch, job.rows);
  return job;
}

Result<SafetensorsWriter> open_output(const JobOptions& options, const Job& job) {
  std::uint64_t bytes = 2;
  for (const std::uint64_t side : job.out_shape) bytes *= side;
  OutputRules rules;
  rules.option = "--out";
  rules.overwrite = options.overwrite;
  for (const auto& input : job.inputs) rules.inputs.push_back(input.second.file);
  return SafetensorsWriter::create(job.out.file, job.out.name,
                                   {job.dtype == "f16" ? "F16" : "BF16", job.out_shape, 0, bytes},
                                   std::move(rules));
}

void JobResult::add(const std::vector<LaunchDone>& ranks) {
  std::uint64_t slowest_ns = 0;
  bool alike = true;
  for (const LaunchDone& done : ranks) {
    slowest_ns = std::max(slowest_ns, done.total_ns);
    network_bytes += done.network_bytes;
    nonfinite_partials += done.nonfinite_partials;
    compared += done.compared;
    wrong += done.wrong;
    alike = alike && done.copy_hash == ranks.front().copy_hash;
    worst_ratio = std::max(worst_ratio, done.worst_ratio);
  }
  ++launches;
  total_ns += slowest_ns;
  if (!alike) ++unlike;
}

Result<JobResult> run_job(const JobOptions& options, const Job& job, SafetensorsWriter& writer,
                          const std::function<void(std::uint64_t)>& progress) {
  LocalJobOptions local;
  local.name = "mkrun";
  local.local = job.local;
  local.daemons.nodes = job.nodes;
  local.daemons.fabric = options.fabric;
  local.daemons.link_bandwidth = options.link_bandwidth;
  local.daemons.link_latency = options.link_latency;
  local.join_sockets = options.join_sockets;
  local.inherited = {writer.fd()};
  Job spec = job;
  spec.out_fd = writer.fd();
  MK_ASSIGN_OR_RETURN(auto ranks, LocalJob::start(local, spec));
  JobResult result;
  // Reading inputs, a launch and its check; every wait inside ends much earlier when something is
  // wrong.
  const auto patience = std::chrono::milliseconds{job.timeout_ms} * 4;
  for (std::uint64_t first = 0; first < job.rows; first += job.rows_per_launch) {
    const std::string what = fmt::format("rows {} on", first);
    MK_ASSIGN_OR_RETURN(const auto reports, ranks.read_reports(patience, what));
    std::vector<LaunchDone> done;
    for (const auto& report : reports) done.push_back(report.get<LaunchDone>());
    result.add(done);
    progress(std::min(first + job.rows_per_launch, job.rows));
  }
  MK_RETURN_IF_ERROR(ranks.finish_ranks(patience));
  MK_RETURN_IF_ERROR(ranks.stop_daemons());
  if (result.right()) MK_RETURN_IF_ERROR(writer.publish());
  return result;
}

}  // namespace mk::tools
