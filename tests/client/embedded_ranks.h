/// \file
/// Jobs over embedded nodes of this process, every rank a thread.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/embedded/embedded.h"
#include "mkernel/mkernel_c.h"
#include "mkernel/types.h"

namespace mk {

/// How a rank of a job on that cluster attaches.
inline AttachOptions place(const EmbeddedCluster& cluster, std::uint32_t locals, std::uint32_t rank,
                           const std::string& job) {
  auto options = AttachOptions::of_rank(job, rank, cluster.nodes(), locals);
  options.socket = cluster.socket_path(options.node_rank);
  options.timeout = std::chrono::seconds(60);
  return options;
}

/// Runs `body(rank)` as one thread per rank.
inline void for_ranks(std::uint32_t world, const std::function<void(std::uint32_t)>& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < world; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

/// Null, and the test has failed, when it does not start.
inline std::unique_ptr<EmbeddedCluster> cluster_of(std::uint32_t nodes,
                                                   const std::string& fabric = "loopback") {
  EmbeddedOptions options;
  options.nodes = nodes;
  options.fabric = fabric;
  auto cluster = EmbeddedCluster::start(options);
  EXPECT_TRUE(cluster) << cluster.error().message;
  return cluster ? std::move(*cluster) : nullptr;
}

/// A world that every operator runs in, and in which element type.
struct EmbeddedWorld {
  std::uint32_t nodes, locals;
  const char* fabric;
  DataType type;
};
/// One node, one rank per node, and between; both fabrics.
inline constexpr EmbeddedWorld kEmbeddedWorlds[] = {
    {1, 1, "loopback", DataType::kBf16}, {1, 3, "loopback", DataType::kBf16},
    {2, 1, "loopback", DataType::kF16},  {2, 2, "loopback", DataType::kBf16},
    {3, 2, "loopback", DataType::kBf16}, {4, 1, "loopback", DataType::kBf16},
    {2, 2, "ofi", DataType::kBf16},      {3, 1, "ofi", DataType::kF16},
};
inline std::string name_of_world(const testing::TestParamInfo<EmbeddedWorld>& test) {
  return std::string(test.param.fabric) + std::to_string(test.param.nodes) + "x" +
         std::to_string(test.param.locals) + name_of(test.param.type);
}

/// The same through the C ABI; null, and the test has failed, when it does not attach.
inline mk_session* attach_through_c(const AttachOptions& at) {
  mk_attach_options options{};
  options.struct_bytes = sizeof(options);
  options.socket = at.socket.c_str();
  options.job = at.job.c_str();
  options.rank = at.rank;
  options.world = at.world;
  options.node_rank = at.node_rank;
  options.nodes = at.nodes;
  options.local_rank = at.local_rank;
  options.local_size = at.local_size;
  mk_session* session = nullptr;
  EXPECT_EQ(0, mk_session_attach(&options, &session)) << mk_last_error();
  return session;
}

}  // namespace mk
