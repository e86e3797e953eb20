/// \file
/// The memory of all ranks of a job in one process: workspaces, rings, flags, abort words. What
/// mkerneld and libmkclient set up between processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "shm/progress.h"
#include "shm/ring.h"

namespace mk::kernels::testing {

struct ClusterShape {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint64_t workspace_bytes = 0;
  std::uint32_t flag_count = 0;  ///< of the operator
  std::uint32_t lanes = 1;
  std::uint32_t slot_count_log2 = 6;
};

/// One rank's memory, zeroed. Addresses stay.
struct RankMemory {
  struct PageDeleter {
    void operator()(std::byte* memory) const;
  };
  World world;
  std::unique_ptr<std::byte, PageDeleter> workspace;
  std::uint64_t workspace_bytes = 0;
  std::uint16_t workspace_handle = 0;
  std::vector<shm::CommandSlot> slots;
  std::vector<shm::LaneControl> controls;
  std::vector<shm::RingProducer> producers;
  std::vector<RailPeer> rail_peers;
  std::vector<std::uint32_t> flags;  ///< of the session: the operator's begin at flag_base
  std::uint32_t flag_base = 0;
  std::uint32_t session_abort = 0;
  std::uint32_t process_abort = 0;
  shm::Progress progress{};
};

class Cluster {
 public:
  explicit Cluster(const ClusterShape& shape);

  std::uint32_t size() const { return static_cast<std::uint32_t>(ranks_.size()); }
  RankMemory& rank(std::uint32_t rank) { return *ranks_[rank]; }
  const ClusterShape& shape() const { return shape_; }
  /// As libmkclient fills it in for that rank.
  RankContext context(std::uint32_t rank);
  /// That rank's options, which tell people of its launches.
  template <class Options>
  Options with_progress(Options options, std::uint32_t rank) {
    options.progress = &ranks_[rank]->progress;
    return options;
  }

 private:
  ClusterShape shape_;
  std::vector<std::unique_ptr<RankMemory>> ranks_;
};

}  // namespace mk::kernels::testing
