#include "tests/gpu/daemon_nodes.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <variant>

#include "client/embedded/embedded.h"
#include "client/src/operator_memory.h"
#include "client/src/session_impl.h"
#include "client/tools/launch/daemons.h"
#include "daemon/config/units.h"
#include "daemon/fabric/gpu_copier.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {
namespace {

template <class T>
T or_exit(Result<T> result, const char* what) {
  if (result) return std::move(*result);
  fmt::print(stderr, "{}: {}\n", what, result.error().message);
  std::exit(1);
}

using Daemons = tools::DaemonSet;
using Embedded = std::unique_ptr<EmbeddedCluster>;
using Hosts = std::variant<Daemons, Embedded>;

/// Daemons of this process: their copies must not get in line behind a launch that waits for them,
/// so every stream on a GPU wants a connection of its own, a rank's and its rail's. To be called
/// before CUDA is asked anything, even how many devices there are.
void claim_connections(std::uint32_t ranks_of_gpu) {
  constexpr std::uint32_t kConnectionsMax = 32;  // CUDA's, to one GPU
  constexpr std::uint32_t kOfRank = fabric::kGpuStreams + 1;
  if (ranks_of_gpu * kOfRank > kConnectionsMax) {
    fmt::print(stderr,
               "{} ranks share a GPU with their daemons; at most {} do without getting in line "
               "behind each other: use more GPUs, or daemons beside this process\n",
               ranks_of_gpu, kConnectionsMax / kOfRank);
    std::exit(1);
  }
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kConnectionsMax).c_str(), 1);
}

Hosts start_hosts(std::uint32_t nodes, std::uint32_t locals, const std::string& program,
                  const std::string& link_bandwidth, const std::string& fabric) {
  if (!program.empty()) {
    tools::DaemonSetOptions options;
    options.nodes = nodes;
    options.rails = locals;
    options.fabric = fabric;
    options.link_bandwidth = link_bandwidth;
    options.program = program;
    return or_exit(Daemons::start(options), "daemons");
  }
  EmbeddedOptions options;
  options.nodes = nodes;
  options.rails = locals;
  options.fabric = fabric;
  if (!link_bandwidth.empty())
    options.link_bytes_per_second = or_exit(daemon::parse_bandwidth(link_bandwidth), "bandwidth");
  // Longer than what a benchmark does between launches.
  options.spin = std::chrono::milliseconds(200);
  return or_exit(EmbeddedCluster::start(options), "nodes");
}

}  // namespace

struct DaemonNodes::Ranks {
  std::uint32_t nodes;
  std::uint32_t locals;
  std::vector<int> devices;  ///< by rank
  Hosts hosts;
  int jobs = 0;
  std::vector<std::optional<Session>> sessions;
  std::vector<std::vector<OperatorMemory>> memories;  ///< by rank

  std::uint32_t world() const { return nodes * locals; }
  const std::string& socket(std::uint32_t node) const {
    const auto* const daemons = std::get_if<Daemons>(&hosts);
    return daemons != nullptr ? daemons->client_socket(node)
                              : std::get<Embedded>(hosts)->socket_path(node);
  }
  /// `body(rank)` for all at once, each with its GPU.
  void for_all(const std::function<void(std::uint32_t)>& body) const {
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < world(); ++rank) {
      threads.emplace_back([this, &body, rank] {
        require(cudaSetDevice(devices[rank]), "cudaSetDevice");
        body(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

std::vector<int> dealt_out(std::uint32_t ranks, std::uint32_t devices) {
  std::vector<int> device_of(ranks);
  for (std::uint32_t rank = 0; rank < ranks; ++rank)
    device_of[rank] = static_cast<int>(rank % devices);
  return device_of;
}

DaemonNodes::DaemonNodes(std::uint32_t nodes, std::uint32_t locals, const std::vector<int>& devices,
                         const std::string& program, const std::string& link_bandwidth,
                         const std::string& fabric) {
  if (program.empty()) {
    std::uint32_t most = 0;
    for (const int device : devices) {
      const auto sharers = std::count(devices.begin(), devices.end(), device);
      most = std::max(most, static_cast<std::uint32_t>(sharers));
    }
    claim_connections(most);
  }
  ranks_.reset(new Ranks{nodes,
                         locals,
                         devices,
                         start_hosts(nodes, locals, program, link_bandwidth, fabric),
                         0,
                         {},
                         {}});
}

DaemonNodes::~DaemonNodes() {
  detach();
  constexpr std::chrono::seconds kStop{10};
  auto* const daemons = std::get_if<Daemons>(&ranks_->hosts);
  if (daemons == nullptr) return;
  if (const Status stopped = daemons->stop(kStop); !stopped)
    fmt::print(stderr, "{}\n", stopped.error().message);
}

void DaemonNodes::attach() {
  detach();
  Ranks& ranks = *ranks_;
  ranks.sessions = std::vector<std::optional<Session>>(ranks.world());
  ranks.memories = std::vector<std::vector<OperatorMemory>>(ranks.world());
  const std::string job = fmt::format("bench-{}", ranks.jobs++);
  ranks.for_all([&](std::uint32_t rank) {
    auto at = AttachOptions::of_rank(job, rank, ranks.nodes, ranks.locals);
    at.socket = ranks.socket(at.node_rank);
    ranks.sessions[rank] = or_exit(Session::attach(at), "attach");
  });
}

std::vector<kernels::RankContext> DaemonNodes::memory(std::uint64_t bytes, std::uint32_t flags) {
  Ranks& ranks = *ranks_;
  std::vector<kernels::RankContext> contexts(ranks.world());
  ranks.for_all([&](std::uint32_t rank) {
    Session::Impl& session = *ranks.sessions[rank]->impl();
    auto memory = or_exit(OperatorMemory::create(session, "bench", fmt::format("bytes={}", bytes),
                                                 bytes, flags, Executor::kCuda),
                          "memory");
    contexts[rank] = memory.context();
    ranks.memories[rank].push_back(std::move(memory));
    require(cudaDeviceSynchronize(), "memory");
  });
  return contexts;
}

const std::string& DaemonNodes::admin_address(std::uint32_t node) const {
  return std::get<Daemons>(ranks_->hosts).admin_address(node);
}

void DaemonNodes::detach() {
  Ranks& ranks = *ranks_;
  if (ranks.sessions.empty()) return;
  ranks.for_all([&](std::uint32_t rank) {
    ranks.memories[rank].clear();
    if (const Status left = ranks.sessions[rank]->detach(); !left)
      fmt::print(stderr, "detach: {}\n", left.error().message);
  });
  ranks.sessions.clear();
  ranks.memories.clear();
}

}  // namespace mk::test
