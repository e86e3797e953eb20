/// \file
/// A whole job on a TestCluster: its ranks, and the calls that all of them make.
#pragma once

#include <vector>

#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {

class JobRun {
 public:
  JobRun(TestCluster& cluster, std::string job, std::uint32_t nodes, std::uint32_t local_size)
      : cluster_(cluster),
        job_(std::move(job)),
        nodes_(nodes),
        local_size_(local_size),
        clients_(nodes * local_size) {}

  std::uint32_t world() const { return nodes_ * local_size_; }
  TestNode& node_of(std::uint32_t rank) { return cluster_.node(rank / local_size_); }
  ClientId client(std::uint32_t rank) const { return clients_[rank]; }

  void attach(std::uint32_t rank) {
    clients_[rank] = node_of(rank).attach(rank_of(job_, nodes_, local_size_, rank));
  }
  void attach_all() {
    for (std::uint32_t rank = 0; rank < world(); ++rank) attach(rank);
    cluster_.settle();
  }
  template <class Message>
  std::optional<Message> take(std::uint32_t rank) {
    return node_of(rank).take<Message>(clients_[rank]);
  }
  template <class Message>
  void send(std::uint32_t rank, const Message& message) {
    node_of(rank).send(clients_[rank], message);
  }
  void hang_up(std::uint32_t rank) { node_of(rank).hang_up(clients_[rank]); }
  /// Whether every rank has been told that the job is up.
  bool all_up() {
    bool up = true;
    for (std::uint32_t rank = 0; rank < world(); ++rank) up = take<shm::JobUp>(rank) && up;
    return up;
  }
  void detach(std::uint32_t rank) {
    send(rank, shm::Detach{});
    cluster_.settle();
    EXPECT_TRUE(take<shm::Done>(rank)) << "rank " << rank;
  }
  void detach_all() {
    for (std::uint32_t rank = 0; rank < world(); ++rank) send(rank, shm::Detach{});
    cluster_.settle();
    for (std::uint32_t rank = 0; rank < world(); ++rank) {
      EXPECT_TRUE(take<shm::Done>(rank)) << "rank " << rank;
      EXPECT_TRUE(node_of(rank).closed(clients_[rank]));
    }
  }
  void hang_up_all() {
    for (std::uint32_t rank = 0; rank < world(); ++rank) {
      if (clients_[rank] != 0) hang_up(rank);
    }
    cluster_.settle();
  }

 private:
  TestCluster& cluster_;
  const std::string job_;
  const std::uint32_t nodes_, local_size_;
  std::vector<ClientId> clients_;  ///< 0: not attached yet
};

/// A job "job" whose ranks have all attached, on a cluster of daemons that know each other.
inline JobRun attached_job(TestCluster& cluster, std::uint32_t nodes, std::uint32_t local_size) {
  cluster.connect_all();
  JobRun job(cluster, "job", nodes, local_size);
  job.attach_all();
  return job;
}

}  // namespace mk::daemon::test
