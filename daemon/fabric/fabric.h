/// \file
/// The one interface to a network. An Endpoint is one NIC (one rail) of this daemon: it registers
/// memory, connects links to rail peers' endpoints, takes batches of writes and reports completions
/// and arrivals.
///
/// Threads: everything under "control" is called by the control thread and may block briefly.
/// Everything under "data path" is called by the one proxy thread that owns the endpoint, never
/// blocks, never allocates after warm-up and never throws. The two may run at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/fabric/verbs_options.h"
#include "shm/gpu/memory.h"
#include "shm/host/result.h"

namespace mk::fabric {

using Bytes = std::vector<std::byte>;

/// What one NIC's keys and addresses may have.
inline constexpr std::size_t kKeyBytesMax = 1024;
inline constexpr std::size_t kAddressBytesMax = 512;

/// Which other daemon: its node id, below shm::kNodesMax. kAnyPeer: not known, in tests of one
/// fabric.
using PeerNumber = std::uint32_t;
inline constexpr PeerNumber kAnyPeer = UINT32_MAX;

/// How an arrival becomes visible at the receiver. The engine has one path per contract, not per
/// vendor.
enum class DeliveryContract {
  /// Writes of one link arrive in order: the endpoint writes the data, then the flag word, into the
  /// peer's memory.
  kOrdered,
  /// No order is assumed: a write carries an immediate, and the receiving proxy publishes the flag
  /// on its event.
  kUnordered,
};

struct Capabilities {
  std::string name;  ///< for users, e.g. "loopback", "ofi:tcp;ofi_rxm"; the same on all nodes
  DeliveryContract contract = DeliveryContract::kOrdered;
  std::uint32_t link_depth = 256;  ///< writes in flight on one link before `post` takes no more
  bool device_memory = false;
  std::uint32_t gpu_regions_max = 0;  ///< GPU buffers registered at once; 0: it sets no bound
  /// The NIC itself reaches memory of GPUs: `register_memory` takes `MemoryDescriptor::direct`, and
  /// there is `flush`.
  bool gpu_direct = false;
  std::string gpu_direct_why = {};  ///< why not, where one may ask; for users
  std::string explanation = {};     ///< for the log: which device was chosen and why; may be empty
  std::string device = {};          ///< its name, e.g. "mlx5_0:1"; empty: there is none to name
  /// The unordered contract: kArrival says which peer wrote, and no other peer could make it say
  /// so.
  bool arrivals_named = false;
  /// That every link is paced to; 0: as fast as it can. Links are measured besides.
  double link_bytes_per_second = 0;
};

/// A window through which a NIC reaches memory of a GPU by itself.
enum class GpuWindow : std::uint8_t {
  kNone,
  kDmabuf,      ///< `MemoryDescriptor::dmabuf`
  kPeerMemory,  ///< the memory's address in this process: a kernel module (nvidia-peermem) knows it
};

/// Memory to register: a mapped host range, backed by `fd` (a sealed memfd) where another process
/// may have to map it; or memory of a GPU, only where `Capabilities::device_memory`. The caller
/// keeps the mapping and the descriptor alive until it is deregistered.
struct MemoryDescriptor {
  std::byte* address = nullptr;
  std::uint64_t bytes = 0;
  int fd = -1;  ///< -1: anonymous memory; loopback then serves only links within this process
  std::uint64_t fd_offset = 0;  ///< where `address` lies in `fd`
  /// Arrival flags: a device may never write this memory earlier than data it was given before.
  bool strictly_ordered = false;
  /// Of a GPU: then `address` is null and `fd` -1. A write goes from host to host or from GPU to
  /// GPU.
  std::optional<gpu::MemoryKey> device = {};
  /// Beside `device`, or for `kDmabuf`: a file that stands for the GPU's memory, which begins at
  /// `dmabuf_offset` in it; -1: there is none. Needed for the call only.
  int dmabuf = -1;
  std::uint64_t dmabuf_offset = 0;
  /// Why the GPU's memory may have no image in host memory, of the same size: its user's limit.
  /// Empty: it may.
  std::string no_image = {};
  /// Only where `Capabilities::gpu_direct`: `address` is the GPU's, and never used by us.
  GpuWindow direct = GpuWindow::kNone;
};

/// Registered memory of this daemon. Destroying it deregisters: only after no write that names it
/// is in flight.
class LocalRegion {
 public:
  virtual ~LocalRegion() = default;
  /// What a peer's endpoint needs to write here; travels over the Peer service. At most
  /// kKeyBytesMax.
  virtual Bytes key() const = 0;
  /// The same for `peer` alone, where what it needs differs from peer to peer.
  virtual Bytes key_for(PeerNumber /*peer*/) const { return key(); }

  bool of_gpu = false;            ///< staged/ takes it, directly or by way of host memory
  std::uint64_t image_bytes = 0;  ///< of host memory that stands for a GPU's
  std::string gpu_path = {};      ///< of a GPU: how it goes, for users ("by dmabuf")
  std::string gpu_path_why = {};  ///< why not directly; empty when it does
};

/// A peer's region as this endpoint sees it. Destroying it releases what `import_region` took.
class RemoteRegion {
 public:
  virtual ~RemoteRegion() = default;

  bool of_gpu = false;           ///< staged/ takes it, directly or by way of host memory
  std::uint64_t key_digest = 0;  ///< tells staged/ what region this is; 0: not needed
};

/// Counts up from 0; an endpoint never uses a number twice.
using LinkId = std::uint32_t;

/// One transfer. Bounds have been checked against the regions' sizes by the proxy.
struct Write {
  const LocalRegion* src = nullptr;   ///< null when bytes == 0
  const RemoteRegion* dst = nullptr;  ///< null when bytes == 0
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint32_t bytes = 0;  ///< 0: only the arrival
  // Ordered: the 4-byte word `epoch` goes to `flags` at 4 * flag_index, after the data.
  const RemoteRegion* flags = nullptr;
  std::uint32_t flag_index = 0;
  std::uint32_t epoch = 0;
  // Unordered: what the receiving endpoint reports as kArrival.
  std::uint32_t immediate = 0;
  std::uint64_t cookie = 0;  ///< returned with the completion
};

struct Event {
  enum class Kind : std::uint8_t {
    /// `cookie`: its source bytes may be reused and its data will arrive. On a paced link its flag
    /// may show later, by a
    /// poll: `shown` tells.
    kCompleted,
    kFailed,    ///< `cookie`: it will not arrive (or may have arrived in part)
    kArrival,   ///< `immediate`: a peer's write is visible in our memory (unordered contract only)
    kLinkDown,  ///< `link`: in error; every outstanding cookie of it has been or will be reported
                ///< as kFailed
    kFlushed,   ///< `cookie`: of a `flush`; unless `code` says that it failed: with kNotFound for
                ///< ever, its memory is not registered any more
  };
  Kind kind = Kind::kCompleted;
  LinkId link = 0;
  std::uint64_t cookie = 0;
  std::uint32_t immediate = 0;
  ErrorCode code = ErrorCode::kOk;
  PeerNumber peer = kAnyPeer;  ///< of kArrival, with Capabilities::arrivals_named
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // -- control --
  virtual const Capabilities& capabilities() const = 0;
  /// What a peer needs to connect here; travels over the Peer service. At most
  /// kAddressBytesMax. It may change, and peers are then told: asked for several times a second.
  virtual Bytes address() const = 0;
  /// What `peer`, and nobody else, is told instead of `address`, which this endpoint gave out: by
  /// what is in it the endpoint knows later who speaks. Any thread.
  virtual Bytes personal(Bytes address, PeerNumber /*peer*/) const { return address; }
  virtual Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) = 0;
  /// Connects to the endpoint that gave out `address`. `peer_name` is for messages ("node 1
  /// rail 0").
  virtual Result<LinkId> connect(std::span<const std::byte> address,
                                 const std::string& peer_name) = 0;
  /// The same to an endpoint of `peer`: nobody else's word counts for the link.
  virtual Result<LinkId> connect_peer(PeerNumber /*peer*/, std::span<const std::byte> address,
                                      const std::string& peer_name) {
    return connect(address, peer_name);
  }
  /// Gives the link up; outstanding writes are reported as kFailed by later polls.
  virtual void disconnect(LinkId link) = 0;
  /// Makes a peer's region (its `key()`) a possible destination of `link`.
  virtual Result<std::unique_ptr<RemoteRegion>> import_region(LinkId link,
                                                              std::span<const std::byte> key) = 0;
  /// Why a link went down, for logs and status; empty while it is up. Valid until `disconnect`.
  virtual std::string link_reason(LinkId /*link*/) const { return {}; }
  /// How the GPU memory that is registered goes, for users ("by dmabuf"); empty: there is none.
  virtual std::string gpu_path() const { return {}; }

  // -- data path --
  /// Submits `writes` (at most kBatchMax) as one submission where the network can; returns how
  /// many, from the front, were taken. Fewer than all is back-pressure, not an error: try the rest
  /// later.
  virtual std::size_t post(LinkId link, std::span<const Write> writes) = 0;
  /// Makes progress and reports up to `events.size()` events; returns how many.
  virtual std::size_t poll(std::span<Event> events) = 0;
  /// Begins to make visible to the GPU what has arrived in its memory, as far as `poll` has said so
  /// before; kFlushed tells when that is over. False: not now. `region`: one of `direct`.
  virtual bool flush(const LocalRegion& /*region*/, std::uint64_t /*cookie*/) { return false; }
  /// How many writes of `link` have been reported as completed: a mark for `shown`. Always 0 where
  /// a flag shows before its write is completed, or where the receiver shows it.
  virtual std::uint64_t completed_on(LinkId /*link*/) const { return 0; }
  /// Whether the flags of the first `mark` writes of `link` show, or never will.
  virtual bool shown(LinkId /*link*/, std::uint64_t /*mark*/) const { return true; }
  /// When the endpoint next has something to do by itself (paced links), CLOCK_MONOTONIC ns;
  /// nullopt: unknown, keep polling while writes are in flight. Lets an idle proxy sleep.
  virtual std::optional<std::uint64_t> next_due_ns() const { return std::nullopt; }
};

/// The paced link of the loopback fabric. Zero bandwidth means unpaced.
struct LinkModel {
  double bytes_per_second = 0;
  std::uint64_t latency_ns = 0;
};

struct EndpointConfig {
  /// "loopback", "ofi", "verbs", "null" (takes everything, moves nothing: benchmarks)
  std::string fabric = "loopback";
  std::uint32_t rail = 0;
  LinkModel link_model;          ///< loopback
  std::string provider = "tcp";  ///< ofi: libfabric provider
  std::string bind_address;      ///< ofi: local address or interface; empty: the provider's choice
  std::string nic_why = {};      ///< why this rail has the NICs named here, where not by the user
  /// Told what people should know of the endpoint while it runs, a sentence for the log; from any
  /// thread, must not block. May be empty.
  std::function<void(const std::string&)> notice = {};
  VerbsOptions verbs;
  /// ofi: the endpoint is to reach memory of GPUs by itself, where the provider can.
  bool gpu_memory = false;
  std::uint64_t connect_timeout_ns =
      5'000'000'000;  ///< how long `connect`, or ofi's first write, waits for the peer
  std::uint64_t write_timeout_ns =
      30'000'000'000;  ///< ofi, verbs: a link whose writes make no progress so long is down
};

/// Opens an endpoint of the configured fabric; kUnsupported (naming the build option or package)
/// when this build lacks it.
Result<std::unique_ptr<Endpoint>> open_endpoint(const EndpointConfig& config);

}  // namespace mk::fabric
