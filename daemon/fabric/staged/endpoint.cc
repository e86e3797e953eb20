#include "daemon/fabric/staged/endpoint.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "daemon/fabric/staged/carrier.h"
#include "daemon/fabric/striped/pack.h"
#include "shm/host/memfd.h"

namespace mk::fabric {
namespace staged {
namespace {

/// Parts of a GPU buffer's key (wire.h).
constexpr std::size_t kStagedParts = 3;
constexpr std::size_t kDirectParts = 4;

class StagedEndpoint final : public Endpoint {
 public:
  StagedEndpoint(std::unique_ptr<Endpoint> plain, StagedOptions options)
      : plain_(std::move(plain)),
        options_(std::move(options)),
        ordered_(plain_->capabilities().contract == DeliveryContract::kOrdered),
        copier_(options_.load_gpu_driver),
        capabilities_(plain_->capabilities()) {
    capabilities_.device_memory = true;
    capabilities_.gpu_regions_max = kRegionsMax;
  }
  ~StagedEndpoint() override { copier_.stop(); }

  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override { return plain_->address(); }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override;
  Bytes personal(Bytes address, PeerNumber peer) const override {
    return plain_->personal(std::move(address), peer);
  }
  Result<LinkId> connect(std::span<const std::byte> address,
                         const std::string& peer_name) override {
    return connect_peer(kAnyPeer, address, peer_name);
  }
  Result<LinkId> connect_peer(PeerNumber peer, std::span<const std::byte> address,
                              const std::string& peer_name) override {
    MK_ASSIGN_OR_RETURN(const LinkId link, plain_->connect_peer(peer, address, peer_name));
    peers_[link_slot(link)] = {peer, peer_name};
    return link;
  }
  void disconnect(LinkId link) override {
    if (carrier_ != nullptr) carrier_->disconnect(link);
    plain_->disconnect(link);
  }
  Result<std::unique_ptr<RemoteRegion>> import_region(LinkId link,
                                                      std::span<const std::byte> key) override;
  std::string link_reason(LinkId link) const override {
    std::string reason = plain_->link_reason(link);
    if (reason.empty() && carrier_ != nullptr) reason = carrier_->reason(link);
    return reason;
  }

  std::string gpu_path() const override { return regions_->paths(); }

  std::size_t post(LinkId link, std::span<const Write> writes) override;
  std::size_t poll(std::span<Event> events) override;
  bool flush(const LocalRegion& region, std::uint64_t cookie) override {
    return plain_->flush(region, cookie);  // of what it registered itself
  }
  std::optional<std::uint64_t> next_due_ns() const override { return plain_->next_due_ns(); }
  std::uint64_t completed_on(LinkId link) const override { return plain_->completed_on(link); }
  bool shown(LinkId link, std::uint64_t mark) const override { return plain_->shown(link, mark); }

 private:
  Status open_carrier();
  Result<std::unique_ptr<LocalRegion>> register_gpu_memory(const MemoryDescriptor& memory);
  Result<std::string> reach_directly(const MemoryDescriptor& memory, Region& region);
  Status open_view(const MemoryDescriptor& memory, Region& region);
  Status make_image(Region& region);
  Result<std::unique_ptr<RemoteRegion>> import_gpu_region(LinkId link, const KeyHead& head,
                                                          const std::vector<Bytes>& parts);
  std::size_t poll_plain(Carrier& carrier, std::span<Event> events);

  const std::unique_ptr<Endpoint> plain_;
  const StagedOptions options_;
  const bool ordered_;
  GpuCopier copier_;
  Capabilities capabilities_;
  const std::shared_ptr<RegionTable> regions_ = std::make_shared<RegionTable>();
  const std::shared_ptr<FlagTable> flags_ = std::make_shared<FlagTable>();
  std::array<std::pair<PeerNumber, std::string>, kLinksMax> peers_;  ///< control thread: by link
  std::unique_ptr<Carrier> carrier_;              ///< control thread: null until a GPU buffer comes
  std::atomic<Carrier*> proxy_carrier_{nullptr};  ///< the same, for the proxy thread
  bool carrier_first_ = false;                    ///< proxy thread
};

Status StagedEndpoint::open_carrier() {
  if (carrier_ != nullptr) return {};
  auto opened = options_.open_carrier();
  if (!opened) {
    return fail(opened.error().code, "cannot open a second endpoint for GPU memory: {}",
                opened.error().message);
  }
  if ((*opened)->capabilities().contract != DeliveryContract::kUnordered)
    return fail(ErrorCode::kInternal, "the second endpoint shows no arrivals");
  carrier_ =
      std::make_unique<Carrier>(std::move(*opened), copier_, regions_, ordered_ ? flags_ : nullptr);
  proxy_carrier_.store(carrier_.get(), std::memory_order_release);
  return {};
}

Result<std::unique_ptr<LocalRegion>> StagedEndpoint::register_memory(
    const MemoryDescriptor& memory) {
  if (memory.device) return register_gpu_memory(memory);
  MK_ASSIGN_OR_RETURN(auto region, plain_->register_memory(memory));
  if (!ordered_ || !memory.strictly_ordered) return region;
  return std::make_unique<FlagsLocalRegion>(flags_, std::move(region), memory);
}

Result<std::unique_ptr<LocalRegion>> StagedEndpoint::register_gpu_memory(
    const MemoryDescriptor& memory) {
  MK_RETURN_IF_ERROR(open_carrier());
  MK_ASSIGN_OR_RETURN(auto records, shm::BufferFile::create("mkernel-records", kImageOffset));
  auto region = std::make_shared<Region>(std::move(records));
  region->bytes = memory.bytes;
  const auto direct = reach_directly(memory, *region);
  if (!direct) {
    if (!memory.no_image.empty()) {
      return fail(ErrorCode::kLimitExceeded, "{}; and the NIC does not reach it directly: {}",
                  memory.no_image, direct.error().message);
    }
    if (region->view.data() == nullptr) MK_RETURN_IF_ERROR(open_view(memory, *region));
    MK_RETURN_IF_ERROR(make_image(*region));
  }
  Endpoint& carrier = carrier_->endpoint();
  MK_ASSIGN_OR_RETURN(region->host,
                      carrier.register_memory(
                          {region->memory.data(), region->memory.bytes(), region->memory.fd(), 0}));
  region->path = direct ? *direct : "staged through host memory";
  MK_RETURN_IF_ERROR(regions_->add(region));
  KeyHead head;
  head.bytes = memory.bytes;
  head.region = region->number;
  head.direct = region->direct != nullptr ? 1 : 0;
  region->key_parts = {to_blob(head), carrier.address(), region->host->key()};
  if (region->direct != nullptr) region->key_parts.push_back(region->direct->key());
  region->personal = [&carrier](Bytes address, PeerNumber peer) {
    return carrier.personal(std::move(address), peer);
  };
  auto made = std::make_unique<StagedLocalRegion>(regions_, region);
  const std::size_t key_bytes = made->key().size();
  if (key_bytes > kKeyBytesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "fabric {} needs {} bytes to name a GPU buffer to its peers: {} at most",
                capabilities_.name, key_bytes, kKeyBytesMax);
  }
  made->image_bytes = direct ? 0 : region->memory.bytes();
  made->gpu_path = region->path;
  if (!direct) made->gpu_path_why = direct.error().message;
  return made;
}

/// The NIC's own way to the buffer, by really registering it; or why there is none.
Result<std::string> StagedEndpoint::reach_directly(const MemoryDescriptor& memory, Region& region) {
  Endpoint& carrier = carrier_->endpoint();
  if (!options_.direct) return fail(ErrorCode::kUnsupported, "fabric.verbs.gpu_direct is false");
  if (!carrier.capabilities().gpu_direct) {
    const std::string& why = carrier.capabilities().gpu_direct_why;
    return fail(ErrorCode::kUnsupported, "fabric {} registers host memory only{}{}",
                capabilities_.name, why.empty() ? "" : ": ", why);
  }
  MemoryDescriptor window{.bytes = memory.bytes};
  std::string no_dmabuf = "its owner exported none";
  if (memory.dmabuf >= 0) {
    window.address =
        reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(memory.device->address));
    window.dmabuf = memory.dmabuf;
    window.dmabuf_offset = memory.dmabuf_offset;
    window.direct = GpuWindow::kDmabuf;
    auto registered = carrier.register_memory(window);
    if (registered) {
      region.direct = std::move(*registered);
      return "by dmabuf";
    }
    no_dmabuf = registered.error().message;
  }
  // The module knows what this process has mapped, so the buffer is opened here.
  Status module = open_view(memory, region);
  if (module) {
    window.address = region.view.data();
    window.dmabuf = -1;
    window.direct = GpuWindow::kPeerMemory;
    auto registered = carrier.register_memory(window);
    if (registered) {
      region.direct = std::move(*registered);
      return "by the peer-memory module";
    }
    module = propagate(registered);
  }
  return fail(ErrorCode::kUnsupported, "by dmabuf: {}; by the peer-memory module: {}", no_dmabuf,
              module.error().message);
}

/// The buffer, mapped into this process for its GPU.
Status StagedEndpoint::open_view(const MemoryDescriptor& memory, Region& region) {
  auto driver = copier_.driver();
  if (!driver) {
    return fail(ErrorCode::kUnsupported,
                "fabric {} needs this daemon's CUDA driver for this GPU memory: {}",
                capabilities_.name, driver.error().message);
  }
  MK_ASSIGN_OR_RETURN(region.device, (*driver)->device_of(memory.device->device));
  MK_ASSIGN_OR_RETURN(region.view, gpu::View::open(*driver, region.device, *memory.device));
  if (region.view.bytes() >= memory.bytes) return {};
  const std::uint64_t there = region.view.bytes();
  region.view = {};
  return fail(ErrorCode::kInvalidArgument, "a GPU buffer of {} bytes lies in an allocation of {}",
              memory.bytes, there);
}

Status StagedEndpoint::make_image(Region& region) {
  MK_ASSIGN_OR_RETURN(auto driver, copier_.driver());
  MK_ASSIGN_OR_RETURN(region.memory,
                      shm::BufferFile::create("mkernel-staging", kImageOffset + region.bytes));
  shm::exclude_from_dumps(region.memory.data(), region.memory.bytes());
  MK_ASSIGN_OR_RETURN(region.gpu_slot, copier_.use(region.device));
  std::byte* const image = region.memory.data() + kImageOffset;
  MK_ASSIGN_OR_RETURN(region.pinned, gpu::PinnedPages::pin(driver, region.device, image,
                                                           region.memory.bytes() - kImageOffset));
  region.image = region.pinned.on_device(image);
  return {};
}

Result<std::unique_ptr<RemoteRegion>> StagedEndpoint::import_region(
    LinkId link, std::span<const std::byte> key) {
  for (const std::size_t count : {kStagedParts, kDirectParts}) {
    const auto parts = unpack(key, count);
    const auto head = parts ? from_blob<KeyHead>(parts->front()) : std::nullopt;
    if (head) return import_gpu_region(link, *head, *parts);
  }
  MK_ASSIGN_OR_RETURN(auto region, plain_->import_region(link, key));
  if (ordered_) region->key_digest = digest_of(key);
  return region;
}

Result<std::unique_ptr<RemoteRegion>> StagedEndpoint::import_gpu_region(
    LinkId link, const KeyHead& head, const std::vector<Bytes>& parts) {
  if (head.bytes == 0 || head.bytes > shm::kBufferBytesMax || head.region >= kRegionsMax ||
      (head.direct != 0) != (parts.size() == kDirectParts)) {
    return fail(ErrorCode::kInvalidArgument, "the key is not one of a GPU buffer");
  }
  MK_RETURN_IF_ERROR(open_carrier());
  const auto& [peer, peer_name] = peers_[link_slot(link)];
  auto carried = carrier_->link_to(link, peer, parts[1], peer_name + " (GPU memory)",
                                   capabilities_.link_depth);
  if (!carried) {
    return fail(carried.error().code, "cannot reach a GPU buffer of {}: {}", peer_name,
                carried.error().message);
  }
  MK_ASSIGN_OR_RETURN(auto memory,
                      carrier_->endpoint().import_region((*carried)->over(), parts[2]));
  std::unique_ptr<RemoteRegion> direct;
  if (head.direct != 0) {
    MK_ASSIGN_OR_RETURN(direct, carrier_->endpoint().import_region((*carried)->over(), parts[3]));
  }
  return std::make_unique<StagedRemoteRegion>(head, std::move(memory), std::move(direct));
}

// -- data path --------------------------------------------------------------------------------

std::size_t StagedEndpoint::post(LinkId link, std::span<const Write> writes) {
  Carrier* const carrier = proxy_carrier_.load(std::memory_order_acquire);
  if (carrier == nullptr) return plain_->post(link, writes);
  const auto of_gpu = [](const Write& write) {
    return (write.src != nullptr && write.src->of_gpu) ||
           (write.dst != nullptr && write.dst->of_gpu);
  };
  // Neighbours that go the same way stay one submission; what is taken is taken from the front.
  std::size_t taken = 0;
  while (taken < writes.size()) {
    const bool by_carrier = of_gpu(writes[taken]);
    std::size_t end = taken + 1;
    while (end < writes.size() && of_gpu(writes[end]) == by_carrier) ++end;
    const auto run = writes.subspan(taken, end - taken);
    taken += by_carrier ? carrier->post(link, run) : plain_->post(link, run);
    if (taken < end) break;
  }
  return taken;
}

/// A link is down when either of its two is, and is said to be so once.
std::size_t StagedEndpoint::poll_plain(Carrier& carrier, std::span<Event> events) {
  const std::size_t count = plain_->poll(events);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (events[i].kind == Event::Kind::kLinkDown) {
      if (Link* const link = carrier.find(events[i].link)) {
        link->fail(ErrorCode::kLinkDown);
        if (std::exchange(link->down_reported, true)) continue;
      }
    }
    events[kept++] = events[i];
  }
  return kept;
}

std::size_t StagedEndpoint::poll(std::span<Event> events) {
  Carrier* const carrier = proxy_carrier_.load(std::memory_order_acquire);
  if (carrier == nullptr) return plain_->poll(events);
  carrier_first_ = !carrier_first_;
  if (carrier_first_) {
    const std::size_t count = carrier->poll(events);
    return count == events.size() ? count : count + poll_plain(*carrier, events.subspan(count));
  }
  const std::size_t count = poll_plain(*carrier, events);
  return count + carrier->poll(events.subspan(count));
}

}  // namespace
}  // namespace staged

std::unique_ptr<Endpoint> make_staged_endpoint(std::unique_ptr<Endpoint> plain,
                                               StagedOptions options) {
  return std::make_unique<staged::StagedEndpoint>(std::move(plain), std::move(options));
}

}  // namespace mk::fabric
