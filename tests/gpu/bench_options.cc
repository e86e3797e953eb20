#include "tests/gpu/bench_options.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "daemon/config/units.h"
#include "tests/gpu/bench_shapes.h"
#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/stopwatch.h"

namespace mk::test {

using Json = nlohmann::ordered_json;

BenchOptions::Taken BenchOptions::take(const std::string& argument, const std::string& value) {
  const auto number = [&] { return static_cast<std::uint32_t>(std::atoi(value.c_str())); };
  if (argument == "--op") {
    for (const Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
      if (value == name(op)) {
        ops.push_back(op);
        return Taken::kYes;
      }
    }
    return Taken::kWrong;
  }
  if (argument == "--shape") {
    Shape shape{};
    if (std::sscanf(value.c_str(), "%dx%dx%d", &shape.m, &shape.n, &shape.k) != 3)
      return Taken::kWrong;
    shapes.push_back(shape);
  } else if (argument == "--dma" || argument == "--sums-once" || argument == "--spans") {
    if (value != "on" && value != "off") return Taken::kWrong;
    (argument == "--dma"         ? cuda.dma
     : argument == "--sums-once" ? cuda.sums_once
                                 : cuda.spans) = value == "on";
  } else if (argument == "--dma-bytes") {
    cuda.dma_bytes = number();
  } else if (argument == "--piece-ns") {
    cuda.piece_ns = number();
  } else if (argument == "--ranks") {
    ranks = number();
  } else if (argument == "--nodes") {
    nodes = number();
  } else if (argument == "--mkerneld") {
    mkerneld = value;
  } else if (argument == "--link-bandwidth") {
    link_bandwidth = value;
  } else if (argument == "--launches") {
    launches = static_cast<int>(number());
  } else if (argument == "--streams") {
    streams.push_back(number());
  } else if (argument == "--chunk") {
    chunks.push_back(number());
  } else if (argument == "--receive") {
    receives.push_back(number());
  } else if (argument == "--compute") {
    cuda.compute_blocks = number();
  } else if (argument == "--check-up-to") {
    check_up_to = static_cast<int>(number());
  } else if (argument == "--json") {
    json = value;
  } else {
    return Taken::kUnknown;
  }
  return Taken::kYes;
}

bool BenchOptions::settle() {
  if (ops.empty()) ops = {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr};
  for (auto* const list : {&streams, &chunks, &receives}) {
    if (list->empty()) *list = {0};
  }
  const auto link = daemon::parse_bandwidth(link_bandwidth);
  if (!link) {
    fmt::print(stderr, "--link-bandwidth: {}\n", link.error().message);
    return false;
  }
  link_bytes_per_s = *link;
  return true;
}

bool run_all(const BenchOptions& options, const std::function<bool(const BenchRun&)>& run) {
  bool right = true;
  for (const Op op : options.ops) {
    const auto shapes = options.shapes.empty() ? bench_shapes(op, options.nodes) : options.shapes;
    for (const Shape& shape : shapes) {
      BenchRun one{op, shape};
      for (const std::uint32_t streams : options.streams) {
        for (const std::uint32_t chunk : options.chunks) {
          for (const std::uint32_t receive : options.receives) {
            one.streams = streams;
            one.chunk_bytes = chunk;
            one.receives = receive;
            right = run(one) && right;
            one.first = false;
          }
        }
      }
    }
  }
  return right;
}

JobSetup setup_of(const BenchOptions& options, const BenchRun& run) {
  JobSetup setup;
  setup.op = run.op;
  setup.nodes = options.nodes;
  setup.locals = options.locals();
  setup.m = static_cast<std::uint32_t>(run.shape.m);
  setup.n = static_cast<std::uint32_t>(run.shape.n);
  setup.k.assign(options.ranks, static_cast<std::uint32_t>(run.shape.k));
  setup.options = options.cuda;
  setup.options.wait_timeout = std::chrono::seconds(5);
  setup.options.stream_groups = run.streams;
  setup.options.receive_groups = run.receives;
  setup.chunk_bytes = run.chunk_bytes;
  return setup;
}

Json row_of(const BenchOptions& options, const BenchRun& run, RankOperator& op) {
  const kernels::RoleBlocks& blocks = op.blocks();
  return {{"op", name(run.op)},
          {"nodes", options.nodes},
          {"ranks", options.ranks},
          {"m", run.shape.m},
          {"n_per_rank", run.shape.n},
          {"k_per_rank", run.shape.k},
          {"compute_blocks", blocks.compute.count()},
          {"stream_groups", op.stream_groups()},
          {"by_dma", op.ag_gemm() != nullptr && op.ag_gemm()->shares_by_dma()},
          {"receive_groups", blocks.receive.count()},
          {"chunk_bytes", run.chunk_bytes}};
}

Json summary_of(const std::vector<double>& us) {
  return {{"median", median(us)},
          {"min", *std::min_element(us.begin(), us.end())},
          {"max", *std::max_element(us.begin(), us.end())}};
}

std::string role_ends(const kernels::LaunchStats& stats) {
  using kernels::Role;
  std::string ends;
  for (const Role role : {Role::kShare, Role::kReduce, Role::kSend, Role::kReceive}) {
    const kernels::RoleStats& done = stats.role(role);
    if (done.blocks != 0) ends += fmt::format(" {} {}", name_of(role), done.end_ns / 1000);
  }
  return ends;
}

Json document_of(const BenchOptions& options, const char* program, int argc, char** argv,
                 int devices) {
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::string command = program;
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  return {{"bench", program},
          {"command", command},
          {"checked", fmt::format("every element of the rows up to M {}, float64 on the GPUs",
                                  options.check_up_to)},
          {"gpu", properties.name},
          {"devices", devices},
          {"inputs", "standard normal, fresh seed, bf16, B as [N,K]"}};
}

std::string network_of(const BenchOptions& options, std::string_view where) {
  if (options.nodes == 1) return "none";
  return fmt::format("loopback, GPU memory, {} per rail, daemons {}", options.link_bandwidth,
                     where);
}

bool write(const BenchOptions& options, const Json& document) {
  if (options.json.empty()) return true;
  std::ofstream file(options.json);
  file << document.dump(1) << "\n";
  file.flush();
  if (!file) fmt::print(stderr, "{} cannot be written\n", options.json);
  return static_cast<bool>(file);
}

}  // namespace mk::test
