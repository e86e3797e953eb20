/// \file
/// One opened libfabric device: provider, domain, and what they ask of their users. All objects of
/// an endpoint and all registered memory hold it.
#pragma once

#include <memory>
#include <string>

#include "daemon/fabric/blob.h"
#include "daemon/fabric/ofi/fid.h"
#include "daemon/fabric/ofi/progress_gate.h"

namespace mk::fabric::ofi {

inline constexpr std::uint32_t kApiVersion = FI_VERSION(1, 17);
/// The version of the interface that providers are asked for: with 1.20 it has dmabufs, and what
/// providers fill in is larger. So it is the headers' at most.
std::uint32_t api_version();
/// "1.17"
std::string version_text(std::uint32_t version);
/// What the fabric asks of a provider, and no more.
Info make_hints(const EndpointConfig& config);

/// Whether libfabric `installed` can serve `provider`; if not, what to install.
Status check_versions(const std::string& provider, std::uint32_t installed);

/// Whether libfabric `installed` and this build can have `provider` reach memory of GPUs; if not,
/// why.
Status check_gpu_memory(const std::string& provider, std::uint32_t installed);

/// An endpoint of libfabric with the queue and address table it needs. Members close in reverse
/// order.
struct Port {
  Fid<fid_av> addresses;
  Fid<fid_cq> completions;
  Fid<fid_ep> endpoint;

  void close() {
    endpoint.reset();
    completions.reset();
    addresses.reset();
  }
};

/// An endpoint's address as peers receive it.
struct Address {
  static constexpr std::uint64_t kMagic = 0x32'72'64'61'69'66'6b'6d;  // "mkfiadr2"
  std::uint64_t magic = kMagic;
  Token endpoint{};
  std::uint64_t doorbell_key =
      0;  ///< eight bytes that any peer may write: the target of flag-only writes
  std::uint64_t doorbell_base = 0;
  std::uint32_t tag = 0;  ///< of the peer that was told this address (SenderTags); 0: none
  std::uint32_t reserved = 0;
  // What is mostly zeros goes last: a rail of several NICs packs that (striped/pack.h).
  char provider[64] = {};
  std::uint32_t format = 0;  ///< FI_SOCKADDR_IN, FI_ADDR_STR, ...
  std::uint32_t name_bytes = 0;
  char name[256] = {};
};
static_assert(sizeof(Address) <= 512);

/// A region's key as peers receive it.
struct Key {
  static constexpr std::uint64_t kMagic = 0x31'79'65'6b'69'66'6b'6d;  // "mkfikey1"
  std::uint64_t magic = kMagic;
  Token endpoint{};
  std::uint64_t key = 0;
  std::uint64_t base = 0;  ///< what offset 0 is called on the wire
  std::uint64_t bytes = 0;
};
static_assert(sizeof(Key) <= 256);

class Domain {
 public:
  /// Opens the configured provider on the configured address, checking that it can do what the
  /// fabric needs.
  static Result<std::shared_ptr<Domain>> open(const EndpointConfig& config);

  /// Its device or interface, "rdmap16s27-rdm".
  std::string device() const { return info_->domain_attr->name; }
  /// A fresh enabled endpoint with its own completion queue of `depth` entries.
  Result<Port> open_port(std::size_t depth) const;
  /// Registers memory for both directions. `bind_to`: the endpoint that peers write to
  /// (FI_MR_ENDPOINT).
  Result<Fid<fid_mr>> register_memory(std::byte* address, std::uint64_t bytes,
                                      fid_ep* bind_to) const;
  /// A GPU's memory by its dmabuf; only where `reaches_gpus`.
  Result<Fid<fid_mr>> register_dmabuf(const MemoryDescriptor& memory) const;
  /// Memory that no peer writes to, for `access` (FI_SEND, FI_RECV, FI_READ); null where the
  /// provider needs none of it.
  Result<Fid<fid_mr>> register_local(void* address, std::uint64_t bytes,
                                     std::uint64_t access) const;

  const fi_info& info() const { return *info_; }
  std::string provider() const { return info_->fabric_attr->prov_name; }
  /// What a peer adds to an offset into memory at `address`.
  std::uint64_t wire_base(const void* address) const;
  bool local_descriptors() const { return (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0; }
  /// Up to how many bytes a write may be injected: its source is free at once, no descriptor
  /// needed.
  std::size_t inject_bytes() const;
  /// Whether data and its notification are two messages; see README.md, "tcp;ofi_rxm".
  bool notify_apart() const;
  /// Whether a write is reported as complete before the peer has its bytes, so that it has to be
  /// asked for (FI_DELIVERY_COMPLETE).
  bool completes_early() const;
  /// Whether memory of GPUs was asked for, and is to be had (FI_HMEM).
  bool reaches_gpus() const;
  /// Whether an endpoint must know those that write to it; see `introduction.h`.
  bool introduces() const;
  /// Whether what comes with a write has room for a tag above the immediate; see sender_tags.h.
  bool tags_writes() const;
  /// Between those who poll and those who register and deregister.
  ProgressGate& gate() const { return *gate_; }
  /// Whether addresses are those of listening TCP sockets, which can be probed.
  bool stream_addresses() const;

 private:
  /// What an endpoint is told before it is enabled.
  Status set_options(fid_ep* endpoint) const;
  /// Whether it writes to TCP sockets.
  bool over_tcp() const;
  /// EFA: refuses hardware whose writes libfabric would emulate with messages.
  Status check_writes(fid_ep* endpoint) const;

  Info info_;
  std::unique_ptr<ProgressGate> gate_;
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
};

}  // namespace mk::fabric::ofi
