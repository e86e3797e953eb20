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
#include "mkernel/session.h"

namespace mk {

/// How a rank of a job on that cluster attaches.
inline AttachOptions place(const EmbeddedCluster& cluster, std::uint32_t locals, std::uint32_t rank,
                           const std::string& job) {
  AttachOptions options;
  options.job = job;
  options.rank = rank;
  options.nodes = cluster.nodes();
  options.local_size = locals;
  options.world = options.nodes * locals;
  options.node_rank = rank / locals;
  options.local_rank = rank % locals;
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

}  // namespace mk
