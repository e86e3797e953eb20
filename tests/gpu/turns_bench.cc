/// \file
/// turns_bench: what a turn in a shared workspace costs. Two unlike operators are launched
/// alternately, in a workspace that they share and in one of their own each; then five shapes'
/// workspaces are added up.
///
///     turns_bench [--nodes N] [--locals N] [--launches N] [--json FILE]
///
/// Ranks are threads, over embedded daemons. They share the GPUs where there are fewer.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "client/embedded/embedded.h"
#include "tests/gpu/client_ranks.h"
#include "tests/gpu/client_unlike.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/graphs.h"
#include "tests/gpu/stopwatch.h"

namespace {

using mk::Session;
using mk::Status;
using mk::UnlikeOperator;
using mk::Work;
using mk::test::require;

[[maybe_unused]] const int kConnections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

constexpr int kRounds = 9;
/// Pairs of launches in one graph.
constexpr int kPairsOfGraph = 25;

struct Options {
  std::uint32_t nodes = 1, locals = 2;
  int launches = 400;
  std::string json;
};

/// Answers what `made` has, or ends the process with its error.
template <class T>
T or_exit(mk::Result<T> made) {
  if (made) return std::move(*made);
  fmt::print(stderr, "{}\n", made.error().message);
  std::exit(1);
}
void or_exit(const Status& done) {
  if (done) return;
  fmt::print(stderr, "{}\n", done.error().message);
  std::exit(1);
}

/// A row of the table: one way to launch the pair.
struct Row {
  std::string operators;
  bool shares = false;
  bool graph = false;
  std::vector<double> us;  ///< per launch, of the slowest rank, by round
};

struct Pair {
  Work first, second;
};
const Pair kPairs[] = {
    {{.op = "gemm-ar", .m = 64, .n = 512, .k = 128},
     {.op = "gemm-rs", .m = 128, .n = 512, .k = 128}},
    {{.op = "ag-gemm", .m = 128, .n = 512, .k = 128},
     {.op = "gemm-ar", .m = 64, .n = 512, .k = 128}},
};

/// One rank's pair of operators.
class PairOfRank {
 public:
  PairOfRank(Session& session, Pair pair, bool shares, cudaStream_t stream)
      : stream_(stream),
        first_(create(session, pair.first, shares)),
        second_(create(session, pair.second, shares)) {
    for (UnlikeOperator* const op : {&first_, &second_}) op->draw(1, stream);
    require(cudaStreamSynchronize(stream), "inputs");
    or_exit(session.barrier());
    launch(1);
    finish();
    or_exit(graphs_.capture(stream, [&]() -> Status { return put(kPairsOfGraph); }));
    or_exit(session.barrier());
  }
  std::string name() const { return first_.name() + ", " + second_.name(); }
  void launch(int pairs) { or_exit(put(pairs)); }
  void replay() const { graphs_.replay(0, stream_); }
  void finish() {
    for (const UnlikeOperator* const op : {&first_, &second_}) or_exit(op->finish(stream_));
  }
  bool right() const { return first_.bad(stream_) == 0 && second_.bad(stream_) == 0; }

 private:
  static UnlikeOperator create(Session& session, Work work, bool shares) {
    work.own_workspace = !shares;
    return or_exit(UnlikeOperator::create(session, work));
  }
  Status put(int pairs) {
    for (int i = 0; i < pairs; ++i) {
      if (const Status first = first_.launch(stream_); !first) return first;
      if (const Status second = second_.launch(stream_); !second) return second;
    }
    return {};
  }

  cudaStream_t stream_;
  UnlikeOperator first_, second_;
  mk::test::Graphs graphs_;
};

/// All rows of one rank: each round has every way once. Times are this rank's.
std::vector<Row> measure(Session& session, const Options& options) {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  require(cudaEventCreate(&begin), "event");
  require(cudaEventCreate(&end), "event");
  std::vector<Row> rows;
  for (const Pair& pair : kPairs) {
    const std::size_t first_row = rows.size();
    std::vector<std::unique_ptr<PairOfRank>> pairs;
    for (const bool shares : {true, false}) {
      pairs.push_back(std::make_unique<PairOfRank>(session, pair, shares, stream));
      for (const bool graph : {false, true})
        rows.push_back({pairs.back()->name(), shares, graph, {}});
    }
    for (int round = 0; round < kRounds; ++round) {
      for (std::size_t way = 0; way < 4; ++way) {
        PairOfRank& its = *pairs[way / 2];
        Row& row = rows[first_row + way];
        const int repeats = std::max(1, options.launches / (2 * kPairsOfGraph));
        or_exit(session.barrier());
        require(cudaEventRecord(begin, stream), "event");
        for (int i = 0; i < repeats; ++i) {
          if (row.graph) {
            its.replay();
          } else {
            its.launch(kPairsOfGraph);
          }
        }
        require(cudaEventRecord(end, stream), "event");
        its.finish();
        float ms = 0;
        require(cudaEventElapsedTime(&ms, begin, end), "time");
        row.us.push_back(ms * 1e3 / (2.0 * kPairsOfGraph * repeats));
      }
    }
    for (const auto& its : pairs) {
      or_exit(session.barrier());
      if (!its->right()) {
        fmt::print(stderr, "rank {}: results are wrong\n", session.options().rank);
        std::exit(1);
      }
    }
    or_exit(session.barrier());
  }
  cudaStreamDestroy(stream);
  return rows;
}

/// What the products of a model's layers take on this rank, in bytes: width 8192, 28672 in
/// between, 4096 rows.
nlohmann::json layer_memory(Session& session) {
  const std::uint64_t ranks = session.options().world;
  mk::Tuning tuning;
  tuning.executor = mk::Executor::kCuda;
  nlohmann::json shapes = nlohmann::json::array();
  const auto add = [&]<class Op>(const char* name, std::uint64_t m, std::uint64_t n,
                                 std::uint64_t k) {
    typename Op::Shape shape;
    shape.m_max = m;
    shape.n = n;
    shape.k = k;
    shape.b_layout = mk::BLayout::kNK;
    const std::uint64_t bytes = or_exit(Op::workspace_bytes(session, shape, tuning));
    shapes.push_back({{"op", name}, {"m", m}, {"n", n}, {"k", k}, {"bytes", bytes}});
  };
  add.operator()<mk::AllGatherGemm>("ag-gemm", 4096, 10240 / ranks, 8192);
  add.operator()<mk::GemmReduceScatter>("gemm-rs", 4096, 8192, 8192 / ranks);
  add.operator()<mk::AllGatherGemm>("ag-gemm", 4096, 57344 / ranks, 8192);
  add.operator()<mk::GemmReduceScatter>("gemm-rs", 4096, 8192, 28672 / ranks);
  add.operator()<mk::GemmAllReduce>("gemm-ar", 256, 8192, 28672 / ranks);
  return shapes;
}

int usage() {
  fmt::print(stderr, "turns_bench [--nodes N] [--locals N] [--launches N] [--json FILE]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (i + 1 == argc) return usage();
    const std::string value = argv[i + 1];
    if (flag == "--nodes") {
      options.nodes = static_cast<std::uint32_t>(std::atoi(value.c_str()));
    } else if (flag == "--locals") {
      options.locals = static_cast<std::uint32_t>(std::atoi(value.c_str()));
    } else if (flag == "--launches") {
      options.launches = std::atoi(value.c_str());
    } else if (flag == "--json") {
      options.json = value;
    } else {
      return usage();
    }
  }
  if (options.nodes == 0 || options.locals == 0 || options.launches < 1) return usage();
  if (mk::test::device_count() == 0) {
    fmt::print(stderr, "turns_bench measures on GPUs, and there is none\n");
    return 1;
  }
  mk::EmbeddedOptions embedded;
  embedded.nodes = options.nodes;
  embedded.fabric = "loopback";
  const auto cluster = or_exit(mk::EmbeddedCluster::start(embedded));
  const std::uint32_t world = options.nodes * options.locals;
  std::vector<std::vector<Row>> by_rank(world);
  nlohmann::json memory;
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      require(cudaSetDevice(mk::device_of(rank)), "device");
      auto at = mk::AttachOptions::of_rank("turns", rank, options.nodes, options.locals);
      at.socket = cluster->socket_path(at.node_rank);
      auto session = or_exit(Session::attach(at));
      by_rank[rank] = measure(session, options);
      auto shapes = layer_memory(session);
      if (rank == 0) memory = std::move(shapes);
      or_exit(session.barrier());
      or_exit(session.detach());
    });
  }
  for (std::thread& thread : threads) thread.join();

  nlohmann::json report;
  cudaDeviceProp device{};
  require(cudaGetDeviceProperties(&device, 0), "device");
  report["command"] = fmt::format("turns_bench --nodes {} --locals {} --launches {}", options.nodes,
                                  options.locals, options.launches);
  report["gpu"] = device.name;
  report["checked"] =
      "every element of the last launches; a workspace of their own is the baseline";
  report["nodes"] = options.nodes;
  report["locals"] = options.locals;
  report["devices"] = mk::test::device_count();
  report["memory"] = memory;
  for (std::size_t i = 0; i < by_rank[0].size(); ++i) {
    Row row = by_rank[0][i];
    for (const std::vector<Row>& rows : by_rank) {
      for (std::size_t round = 0; round < row.us.size(); ++round)
        row.us[round] = std::max(row.us[round], rows[i].us[round]);
    }
    const auto [least, most] = std::ranges::minmax(row.us);
    const double median = mk::test::median(row.us);
    fmt::print("{}x{} | {:60} | {:6} | {:5} | {:7.2f} us a launch ({:.2f} to {:.2f})\n",
               options.nodes, options.locals, row.operators, row.shares ? "shared" : "own",
               row.graph ? "graph" : "eager", median, least, most);
    report["rows"].push_back({{"operators", row.operators},
                              {"shares", row.shares},
                              {"graph", row.graph},
                              {"us", median},
                              {"us_by_round", row.us}});
  }
  std::uint64_t largest = 0, sum = 0;
  for (const auto& shape : memory) {
    const auto bytes = shape["bytes"].get<std::uint64_t>();
    largest = std::max(largest, bytes);
    sum += bytes;
  }
  fmt::print("{}x{} | five shapes: the largest takes {} MiB of a rank, all of them {} MiB\n",
             options.nodes, options.locals, largest >> 20, sum >> 20);
  if (!options.json.empty()) std::ofstream(options.json) << report.dump(2) << "\n";
  return 0;
}
