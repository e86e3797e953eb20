/// \file
/// Whole nodes with real threads, sockets and fabrics in one process, and ranks that move data
/// between two of them.
#pragma once

#include <unistd.h>

#include <atomic>
#include <thread>

#include "daemon/control/local_peer_transport.h"
#include "daemon/control/node.h"
#include "shm/flag.h"
#include "tests/daemon/control/rig.h"
#include "tests/daemon/control/socket_client.h"

namespace mk::daemon::test {

inline std::string unique_socket() {
  static std::atomic<int> count{0};
  return fmt::format("@mkernel-node-test-{}-{}", ::getpid(), count++);
}

inline std::chrono::steady_clock::time_point soon() {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
}

/// Daemons of one cluster, all in this process.
class Nodes {
 public:
  explicit Nodes(std::uint32_t count, const std::string& fabric = "loopback",
                 std::function<void(NodeOptions&)> change = {})
      : peers_(count) {
    for (NodeId id = 0; id < count; ++id) {
      NodeOptions options;
      options.control.node = id;
      options.control.version = "test";
      options.loop.socket_path = unique_socket();
      options.rails[0].endpoint.fabric = fabric;
      if (change) change(options);
      auto node = Node::create(std::move(options));
      EXPECT_TRUE(node) << node.error().message;
      nodes_.push_back(std::move(*node));
    }
    for (NodeId id = 0; id < count; ++id) {
      EXPECT_TRUE(nodes_[id]->start(peers_.transport(id)));
      peers_.join(id, nodes_[id]->peer_sink());
    }
  }
  ~Nodes() {
    for (auto& node : nodes_) {
      node->stop(soon());
      peers_.leave(node->id(), "stopped");
    }
  }
  Node& operator[](NodeId id) { return *nodes_[id]; }
  LocalCluster& peers() { return peers_; }
  bool idle() {
    return std::ranges::all_of(nodes_, [](const auto& node) {
      const auto counts = node->loop().run_sync([](ControlPlane& plane) { return plane.counts(); });
      return counts && counts->sessions == 0 && counts->clients == 0 && counts->jobs == 0;
    });
  }

 private:
  LocalCluster peers_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

/// A rank of a job of two nodes of two ranks each, that sends to its like on the other node and
/// receives from it.
class PairedRank {
 public:
  static constexpr std::uint32_t kBytes = 1 << 20;

  PairedRank(Nodes& nodes, std::string job, std::uint32_t rank)
      : client(nodes[rank / 2].socket_path()), job_(std::move(job)), rank_(rank) {}

  Status attach() {
    auto attach = rank_of(job_, 2, 2, rank_);
    attach.timeout_ms = 60'000;
    return client.attach(attach);
  }
  /// Waits for the job, and tells the others where this rank receives.
  void meet() {
    const auto up = client.await<shm::JobUp>();
    ASSERT_TRUE(up) << up.error().message;
    const auto handle = client.add_buffer(2 * kBytes);
    ASSERT_TRUE(handle) << handle.error().message;
    const auto flags = client.call<shm::AllocFlagsReply>(shm::AllocFlags{64});
    ASSERT_TRUE(flags);
    std::vector<std::byte> blob(sizeof(std::uint16_t));
    std::memcpy(blob.data(), &*handle, blob.size());
    const auto handles = client.call<shm::ExchangeReply>(shm::Exchange{"handles", blob, 60'000});
    ASSERT_TRUE(handles) << handles.error().message;
    std::memcpy(&peer_handle_, handles->blobs.at(peer()).data(), sizeof peer_handle_);
    handle_ = *handle;
    flag_ = flags->base + 3;
  }
  /// Sends the first half of the buffer, and receives into the second. The session's error when
  /// that failed.
  Status move(std::uint32_t epoch) {
    std::memset(client.buffer->data(), static_cast<int>(rank_ * 16 + epoch), kBytes);
    const bool pushed = client.producer.try_push({.opcode = shm::Opcode::kWrite,
                                                  .peer = static_cast<std::uint16_t>(peer()),
                                                  .src_handle = handle_,
                                                  .dst_handle = peer_handle_,
                                                  .src_offset = 0,
                                                  .dst_offset = kBytes,
                                                  .bytes = kBytes,
                                                  .flag_index = flag_,
                                                  .epoch = epoch});
    EXPECT_TRUE(pushed);
    const auto flag = client.segment->flags() + flag_;
    MK_RETURN_IF_ERROR(reaches("arrival", [&] { return shm::flag_reached(flag, epoch); }));
    for (const std::uint32_t at : {kBytes, 3 * kBytes / 2, 2 * kBytes - 1})
      EXPECT_EQ(client.buffer->data()[at], static_cast<std::byte>(peer() * 16 + epoch));
    MK_RETURN_IF_ERROR(reaches("completion", [&] { return client.producer.completed() == epoch; }));
    // Nobody overwrites what the peer has not looked at yet.
    const auto all = client.call<shm::ExchangeReply>(shm::Exchange{"next", {}, 60'000});
    return all ? Status() : propagate(all);
  }

  SocketClient client;

 private:
  std::uint32_t peer() const { return (rank_ + 2) % 4; }
  template <class Done>
  Status reaches(const char* what, Done done) {
    Status failure;
    const bool ended = eventually([&] {
      failure = client.segment->failure();
      return done() || !failure;
    });
    if (!failure) return failure;
    return ended ? Status() : fail(ErrorCode::kTimeout, "rank {} waits for its {}", rank_, what);
  }

  const std::string job_;
  const std::uint32_t rank_;
  std::uint16_t handle_ = 0;
  std::uint16_t peer_handle_ = 0;
  std::uint32_t flag_ = 0;
};

}  // namespace mk::daemon::test
