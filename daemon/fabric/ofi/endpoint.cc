#include "daemon/fabric/ofi/endpoint.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

#include "daemon/fabric/ofi/flusher.h"
#include "daemon/fabric/ofi/link.h"
#include "daemon/fabric/ofi/probe.h"
#include "daemon/fabric/ofi/sender_tags.h"

namespace mk::fabric {
namespace ofi {
namespace {

constexpr std::uint32_t kLinkDepth = 256;
constexpr std::size_t kArrivalQueue =
    4096;  // what the receiving queue holds before libfabric spills to the heap

/// Eight bytes that any peer may write and nobody reads, and eight zeros to write from.
struct alignas(64) Doorbell {
  std::array<std::byte, 8> target{};
  std::array<std::byte, 8> zeros{};
};

class OfiEndpoint final : public Endpoint {
 public:
  OfiEndpoint(const EndpointConfig& config, std::shared_ptr<const Domain> domain, const Token& id)
      : config_(config), domain_(std::move(domain)), id_(id) {}
  /// Opens the receiving side; before anything else. `why_no_gpus`: for the capabilities.
  Status open(const std::string& why_no_gpus);

  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override { return to_blob(address_); }
  Bytes personal(Bytes address, PeerNumber peer) const override;
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override;
  Result<LinkId> connect(std::span<const std::byte> address, const std::string& peer_name) override;
  void disconnect(LinkId link) override;
  Result<std::unique_ptr<RemoteRegion>> import_region(LinkId link,
                                                      std::span<const std::byte> key) override;
  std::string link_reason(LinkId link) const override;

  std::size_t post(LinkId link, std::span<const Write> writes) override;
  std::size_t poll(std::span<Event> events) override;
  bool flush(const LocalRegion& region, std::uint64_t cookie) override {
    return flusher_ != nullptr &&
           flusher_->flush(static_cast<const OfiLocalRegion&>(region), cookie);
  }

 private:
  static std::uint64_t now_ns() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  Result<std::unique_ptr<OfiLocalRegion>> make_region(const MemoryDescriptor& memory);
  std::size_t progress(std::span<Event> events);
  std::size_t poll_links(std::span<Event> events);
  std::size_t poll_arrivals(std::span<Event> events);

  // Declared in the order in which they may be closed backwards: links before the doorbell's
  // registration, memory before the endpoint it is bound to.
  const EndpointConfig config_;
  const std::shared_ptr<const Domain> domain_;
  const Token id_;
  Capabilities capabilities_;
  Address address_;
  SenderTags tags_;
  Doorbell doorbell_;
  std::unique_ptr<Reception> reception_;  ///< null where senders need not be known
  Port receiver_;
  std::unique_ptr<OfiLocalRegion> doorbell_target_;
  std::unique_ptr<OfiLocalRegion> doorbell_zeros_;
  std::unique_ptr<Flusher> flusher_;  ///< null where GPUs' memory is not reached
  LinkTable<Link> links_;
  OrphanQueue orphans_;           ///< proxy thread
  std::uint32_t first_link_ = 0;  ///< proxy thread: who is polled first, in turn
  bool arrivals_first_ = false;   ///< proxy thread
};

Status OfiEndpoint::open(const std::string& why_no_gpus) {
  MK_ASSIGN_OR_RETURN(receiver_, domain_->open_port(kArrivalQueue));
  MK_ASSIGN_OR_RETURN(doorbell_target_,
                      make_region({doorbell_.target.data(), doorbell_.target.size(), -1, 0}));
  MK_ASSIGN_OR_RETURN(doorbell_zeros_,
                      make_region({doorbell_.zeros.data(), doorbell_.zeros.size(), -1, 0}));

  if (domain_->tags_writes() || domain_->introduces()) MK_RETURN_IF_ERROR(tags_.draw());
  if (domain_->introduces()) {
    MK_ASSIGN_OR_RETURN(reception_, Reception::open(*domain_, receiver_, id_, tags_));
  }
  const std::string provider = domain_->provider();
  const std::size_t depth = std::min<std::size_t>(kLinkDepth, domain_->info().tx_attr->size);
  capabilities_.name = "ofi:" + provider;
  capabilities_.contract = DeliveryContract::kUnordered;
  capabilities_.arrivals_named = tags_.usable();
  capabilities_.link_depth = static_cast<std::uint32_t>(depth);
  capabilities_.device = domain_->device();
  if (domain_->reaches_gpus()) {
    MK_ASSIGN_OR_RETURN(flusher_, Flusher::open(*domain_));
    capabilities_.gpu_direct = true;
  } else {
    capabilities_.gpu_direct_why = why_no_gpus;
  }

  address_.endpoint = id_;
  address_.tag = tags_.of(kAnyPeer);
  address_.doorbell_key = doorbell_target_->wire_key();
  address_.doorbell_base = doorbell_target_->wire_base();
  provider.copy(address_.provider, sizeof(address_.provider) - 1);
  address_.format = domain_->info().addr_format;
  std::size_t bytes = sizeof(address_.name);
  if (const int rc = ::fi_getname(&receiver_.endpoint->fid, address_.name, &bytes)) {
    return fail_fi(rc, "provider {} does not tell its endpoint's address", provider);
  }
  address_.name_bytes = static_cast<std::uint32_t>(bytes);
  return {};
}

Bytes OfiEndpoint::personal(Bytes address, PeerNumber peer) const {
  auto own = from_blob<Address>(address);
  if (!own) return address;
  own->tag = tags_.of(peer);
  return to_blob(*own);
}

Result<std::unique_ptr<OfiLocalRegion>> OfiEndpoint::make_region(const MemoryDescriptor& memory) {
  MK_ASSIGN_OR_RETURN(auto region, domain_->register_memory(memory.address, memory.bytes,
                                                            receiver_.endpoint.get()));
  return std::make_unique<OfiLocalRegion>(domain_, std::move(region), memory, id_);
}

Result<std::unique_ptr<LocalRegion>> OfiEndpoint::register_memory(const MemoryDescriptor& memory) {
  if (memory.address == nullptr || memory.bytes == 0) {
    return fail(ErrorCode::kInvalidArgument, "cannot register an empty memory range");
  }
  if (memory.direct == GpuWindow::kNone) return make_region(memory);
  if (memory.direct != GpuWindow::kDmabuf || flusher_ == nullptr) {
    return fail(ErrorCode::kUnsupported, "fabric {} takes GPU memory by dmabuf only, if at all",
                capabilities_.name);
  }
  MK_ASSIGN_OR_RETURN(auto region, domain_->register_dmabuf(memory));
  return std::make_unique<OfiLocalRegion>(domain_, std::move(region), memory, id_);
}

Result<LinkId> OfiEndpoint::connect(std::span<const std::byte> bytes,
                                    const std::string& peer_name) {
  const auto peer = from_blob<Address>(bytes);
  if (!peer || peer->name_bytes > sizeof(peer->name) ||
      peer->provider[sizeof(peer->provider) - 1] != '\0') {
    return fail(ErrorCode::kInvalidArgument,
                "cannot connect to {}: its address is not one of the ofi fabric; is its daemon "
                "configured for the same "
                "fabric, and of the same version?",
                peer_name);
  }
  if (domain_->provider() != peer->provider || domain_->info().addr_format != peer->format) {
    return fail(ErrorCode::kInvalidArgument,
                "cannot connect to {}: it uses libfabric's provider '{}' (address format {}), this "
                "daemon '{}' ({}); "
                "configure the same provider, and addresses of one family",
                peer_name, peer->provider, peer->format, domain_->provider(),
                domain_->info().addr_format);
  }
  // libfabric connects with the first write and retries for ever, so whether anybody is there is
  // asked for here.
  if (domain_->stream_addresses()) {
    const Status alive = probe_listener({peer->name, peer->name_bytes}, config_.connect_timeout_ns);
    if (!alive) {
      return fail(alive.error().code, "cannot connect to {}: {}; is its daemon still running?",
                  peer_name, alive.error().message);
    }
  }
  links_.sweep();
  // Data and notification of each write, one empty write before them, and one for the rest.
  MK_ASSIGN_OR_RETURN(Port port, domain_->open_port(2 * std::size_t{capabilities_.link_depth} + 2));
  fi_addr_t to = FI_ADDR_UNSPEC;
  if (const int rc = ::fi_av_insert(port.addresses.get(), peer->name, 1, &to, 0, nullptr);
      rc != 1) {
    return fail_fi(rc < 0 ? rc : -FI_EADDRNOTAVAIL,
                   "cannot connect to {}: provider {} does not take its address", peer_name,
                   domain_->provider());
  }
  std::unique_ptr<Introduction> introduction;
  if (domain_->introduces()) {
    auto prepared = Introduction::prepare(*domain_, port, to, *peer);
    if (!prepared) {
      return fail(prepared.error().code, "cannot connect to {}: {}", peer_name,
                  prepared.error().message);
    }
    introduction = std::move(*prepared);
  }
  auto made = std::make_unique<Link>(
      std::move(port), to, *peer, peer_name, *doorbell_zeros_,
      Link::Manner{domain_->notify_apart(), domain_->inject_bytes(), domain_->completes_early(),
                   domain_->tags_writes()},
      capabilities_.link_depth, Link::Limits{config_.connect_timeout_ns, config_.write_timeout_ns},
      std::move(introduction), id_);
  MK_ASSIGN_OR_RETURN(Link* const link, links_.add(std::move(made)));
  links_.publish(*link);
  return link->id;
}

void OfiEndpoint::disconnect(LinkId id) {
  if (Link* const link = links_.owned(id)) link->closing.store(true, std::memory_order_release);
}

Result<std::unique_ptr<RemoteRegion>> OfiEndpoint::import_region(LinkId id,
                                                                 std::span<const std::byte> bytes) {
  const Link* const link = links_.owned(id);
  if (link == nullptr) return fail(ErrorCode::kNotFound, "there is no link {}", id);
  const auto key = from_blob<Key>(bytes);
  if (!key || !same_token(key->endpoint, link->peer_endpoint()) || key->bytes == 0) {
    return fail(ErrorCode::kInvalidArgument, "the key of {} bytes is not one of a region of {}",
                bytes.size(), link->peer_name());
  }
  return std::make_unique<OfiRemoteRegion>(*key);
}

std::string OfiEndpoint::link_reason(LinkId id) const {
  const Link* const link = links_.owned(id);
  return link == nullptr ? std::string() : link->reason();
}

std::size_t OfiEndpoint::post(LinkId id, std::span<const Write> writes) {
  Link* const link = links_.find(id);
  if (link == nullptr) return orphans_.take(id, writes);
  std::size_t taken = 0;
  domain_->gate().pass([&] { taken = link->post(writes, now_ns()); });
  return taken;
}

std::size_t OfiEndpoint::poll_links(std::span<Event> events) {
  std::size_t count = orphans_.report(events);
  const std::uint64_t now = now_ns();
  first_link_ = links_.each(first_link_, [&](Link& link) {
    const bool closing = link.closing.load(std::memory_order_acquire);
    if (closing) link.close("given up");
    link.progress(now);
    count += link.report(events.subspan(count));
    if (link.down() && !closing && !link.down_reported && count < events.size()) {
      link.down_reported = true;
      events[count++] = {Event::Kind::kLinkDown, link.id, 0, 0, ErrorCode::kLinkDown};
    }
    if (closing && link.empty()) links_.release(link);
  });
  return count;
}

std::size_t OfiEndpoint::poll_arrivals(std::span<Event> events) {
  std::array<fi_cq_data_entry, 64> entries;
  const std::size_t room = std::min(events.size(), entries.size());
  if (room == 0) return 0;
  if (reception_ != nullptr) reception_->progress();
  std::array<fi_addr_t, entries.size()> sources;
  fid_cq* const queue = receiver_.completions.get();
  const ssize_t got = reception_ == nullptr
                          ? ::fi_cq_read(queue, entries.data(), room)
                          : ::fi_cq_readfrom(queue, entries.data(), room, sources.data());
  if (got == -FI_EAVAIL) {
    // A write that a dying peer left unfinished: its arrival never happened, so there is nothing to
    // tell.
    fi_cq_err_entry error{};
    const ssize_t read = ::fi_cq_readerr(queue, &error, 0);
    if (read > 0 && reception_ != nullptr) reception_->failed(error.op_context);
    return 0;
  }
  std::size_t count = 0;
  for (ssize_t i = 0; i < got; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const fi_cq_data_entry& entry = entries[at];
    if ((entry.flags & FI_REMOTE_CQ_DATA) == 0) {
      if (reception_ != nullptr) reception_->completed(entry.op_context);
      continue;
    }
    const std::optional<PeerNumber> peer =
        reception_ != nullptr ? reception_->peer(sources[at])
                              : tags_.peer(static_cast<std::uint32_t>(entry.data >> 32));
    // Nobody was told a tag that is not ours, or it is nobody's who introduced himself.
    if (!peer) continue;
    events[count++] = {Event::Kind::kArrival, 0,    0, static_cast<std::uint32_t>(entry.data),
                       ErrorCode::kOk,        *peer};
  }
  return count;
}

std::size_t OfiEndpoint::poll(std::span<Event> events) {
  std::size_t count = 0;
  domain_->gate().pass([&] { count = progress(events); });
  return count;
}

std::size_t OfiEndpoint::progress(std::span<Event> events) {
  // In turn, so that neither completions nor arrivals can starve the other when `events` is short.
  arrivals_first_ = !arrivals_first_;
  std::size_t count = flusher_ == nullptr ? 0 : flusher_->poll(events);
  if (arrivals_first_) count += poll_arrivals(events.subspan(count));
  count += poll_links(events.subspan(count));
  if (!arrivals_first_) count += poll_arrivals(events.subspan(count));
  return count;
}

Result<std::unique_ptr<Endpoint>> open_as_configured(const EndpointConfig& config,
                                                     const std::string& why_no_gpus) {
  MK_ASSIGN_OR_RETURN(auto domain, Domain::open(config));
  MK_ASSIGN_OR_RETURN(const Token id, make_token());
  auto endpoint = std::make_unique<OfiEndpoint>(config, std::move(domain), id);
  MK_RETURN_IF_ERROR(endpoint->open(why_no_gpus));
  return endpoint;
}

}  // namespace
}  // namespace ofi

Result<std::unique_ptr<Endpoint>> make_ofi_endpoint(const EndpointConfig& config) {
  if (!config.gpu_memory) return ofi::open_as_configured(config, "");
  Status reached = ofi::check_gpu_memory(config.provider, ::fi_version());
  if (reached) {
    auto endpoint = ofi::open_as_configured(config, "");
    if (endpoint) return endpoint;
    reached = propagate(endpoint);
  }
  EndpointConfig plain = config;
  plain.gpu_memory = false;
  return ofi::open_as_configured(plain, reached.error().message);
}

}  // namespace mk::fabric
