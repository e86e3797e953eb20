// What links, queue pairs and sessions of the verbs fabric take at cluster sizes that are not here:
// arithmetic on the structures of this build, one link really made. Prints JSON.
#include <fmt/format.h>
#include <malloc.h>

#include <bit>
#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/fabric/null_fabric.h"
#include "daemon/fabric/staged/link.h"
#include "daemon/fabric/verbs/link.h"
#include "daemon/fabric/verbs/region.h"
#include "daemon/proxy/session_table.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::bench {
namespace {

using namespace fabric::verbs;
using nlohmann::ordered_json;

constexpr std::uint32_t kDepth = 256;
constexpr std::uint32_t kRails = 8;
constexpr std::uint32_t kLanesPerSession = 4;
constexpr std::uint32_t kBuffersPerSession = 4;
// mlx5: a work request of one source piece, or of 4 inline bytes, is one 64-byte block of the send
// queue, and so is a completion.
constexpr std::uint64_t kRequestBytes = 64, kCompletionBytes = 64, kPage = 4096;

std::uint64_t power_of_two(std::uint64_t value) { return std::bit_ceil(value); }

/// Bytes of this process's heap that what `make` answers takes, with everything that hangs from it.
template <class Make>
std::uint64_t heap_bytes(Make&& make) {
  const auto used = [] { return static_cast<std::uint64_t>(::mallinfo2().uordblks); };
  const std::uint64_t before = used();
  const auto made = make();
  return used() - before;
}

std::uint64_t link_heap_bytes(std::uint32_t queues) {
  LinkQueues parts;
  parts.sending.resize(queues);
  return heap_bytes([&] {
    return std::make_unique<Link>(Remote{}, "node 1000 (host-1000.cluster:7171) rail 7", 1,
                                  std::move(parts),
                                  Sender::Options{.depth = kDepth, .stop = [] {}, .peer_name = ""});
  });
}

/// What GPU memory adds to a link beside the second endpoint's own: a ring of writes, and a page or
/// more of their records.
std::uint64_t staged_link_bytes() {
  const auto carrier = fabric::make_null_endpoint({});
  const std::uint64_t ring = heap_bytes([&] {
    return std::make_unique<fabric::staged::Link>(
        0, *carrier, 0, fabric::Bytes{}, kDepth,
        shm::BufferFile::create("mkernel-records", kPage).value(), nullptr);
  });
  const std::uint64_t records = kDepth * sizeof(fabric::staged::Record);
  return ring + (records + kPage - 1) / kPage * kPage;
}

/// What the driver holds in host memory for one link: the sending end here, the receiving end
/// there.
std::uint64_t sending_end_bytes(std::uint32_t queues) {
  const std::uint64_t requests = power_of_two(kRequestsPerWrite * std::uint64_t{kDepth});
  return queues * requests * kRequestBytes +
         power_of_two(queues * kRequestsPerWrite * std::uint64_t{kDepth}) * kCompletionBytes;
}
constexpr std::uint64_t receiving_end_bytes(std::uint32_t queues) { return queues * kPage; }

/// The shared receives of an endpoint whose arrivals are immediates, and their completions.
constexpr std::uint64_t kReceivesBytes = 4096 * (16 + kCompletionBytes);

ordered_json cluster(std::uint32_t nodes, std::uint32_t queues, std::uint64_t link_bytes,
                     std::uint64_t staged_bytes) {
  const std::uint64_t links = nodes - 1;
  // A link goes one way: to each peer one to send on, from each peer one to receive on, and one
  // datagram queue per endpoint.
  const std::uint64_t pairs_per_rail = 2 * links * queues + 1;
  const std::uint64_t bytes_per_rail =
      links * (link_bytes + sending_end_bytes(queues) + receiving_end_bytes(queues));
  ordered_json row;
  row["nodes"] = nodes;
  row["queues_per_link"] = queues;
  row["links_per_rail"] = links;
  row["queue_pairs_per_rail"] = pairs_per_rail;
  row["queue_pairs_per_node"] = kRails * pairs_per_rail;
  row["link_memory_per_node_bytes"] = kRails * bytes_per_rail;
  // Jobs with GPU memory: a second endpoint per rail, and a queue pair that flushes.
  row["with_gpu_memory"] = {
      {"queue_pairs_per_node", kRails * (2 * pairs_per_rail + 1)},
      {"link_memory_per_node_bytes",
       kRails * (2 * bytes_per_rail + links * staged_bytes + kReceivesBytes)}};
  // A session knows every peer's regions: flags, and its buffers.
  row["session_peer_regions_bytes"] = links * (1 + kBuffersPerSession) * sizeof(VerbsRemoteRegion);
  row["within_this_build"] = nodes <= shm::kNodesMax;
  return row;
}

void print() {
  const shm::SegmentShape shape{
      .lane_count = kLanesPerSession, .slot_count_log2 = 10, .flag_count = shm::kFlagsDefault};
  const std::uint64_t link_bytes = link_heap_bytes(1);
  const std::uint64_t staged_bytes = staged_link_bytes();
  ordered_json report;
  report["what"] =
      "verbs fabric on paper: structure sizes of this build, mlx5's 64-byte queue entries";
  report["rails"] = kRails;
  report["link_depth"] = kDepth;
  report["per_link"] = {{"daemon_heap_bytes", link_bytes},
                        {"driver_bytes_sending_end", sending_end_bytes(1)},
                        {"driver_bytes_receiving_end", receiving_end_bytes(1)},
                        {"total_bytes", link_bytes + sending_end_bytes(1) + receiving_end_bytes(1)},
                        {"gpu_memory_adds_bytes", link_bytes + sending_end_bytes(1) +
                                                      receiving_end_bytes(1) + staged_bytes}};
  report["per_session"] = {
      {"lanes", kLanesPerSession},
      {"segment_bytes", shm::layout_of(shape).segment_bytes},
      {"proxy_bytes", sizeof(daemon::Session) + kLanesPerSession * sizeof(daemon::Lane)},
      {"region_bytes_each", sizeof(VerbsLocalRegion) + sizeof(Registration)},
      {"peer_region_bytes_each", sizeof(VerbsRemoteRegion)}};
  report["clusters"] = ordered_json::array();
  for (const std::uint32_t nodes : {2u, 16u, 128u, 1024u})
    report["clusters"].push_back(cluster(nodes, 1, link_bytes, staged_bytes));
  fmt::print("{}\n", report.dump(1));
}

}  // namespace
}  // namespace mk::bench

int main() { mk::bench::print(); }
