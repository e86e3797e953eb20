#include "daemon/fabric/ofi/domain.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <rdma/fi_ext.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "daemon/fabric/ofi/survey.h"
#include "shm/host/unique_fd.h"

namespace mk::fabric::ofi {
namespace {

constexpr std::uint64_t kAccess = FI_WRITE | FI_REMOTE_WRITE;

// Options of later versions of libfabric than the one this may be built with; their numbers are
// part of its ABI.
constexpr int kOptCudaApiPermitted = FI_OPT_XPU_TRIGGER + 1;       // from 1.18
constexpr int kOptSharedMemoryPermitted = FI_OPT_XPU_TRIGGER + 2;  // from 1.21
constexpr int kOptEfaEmulatedWrite = FI_OPT_EFA_RNR_RETRY + 2;     // from 1.18
static_assert(kLibfabricFloor == kApiVersion && kEfaFloor == FI_VERSION(1, 20));

bool is_efa(std::string_view provider) { return provider.starts_with("efa"); }

/// The names of all providers here, for messages.
std::string provider_names() {
  fi_info* list = nullptr;
  if (::fi_getinfo(kApiVersion, nullptr, nullptr, 0, nullptr, &list) != 0) return "none";
  const Info owned(list);
  std::set<std::string> names;
  for (const fi_info* info = list; info != nullptr; info = info->next)
    names.insert(info->fabric_attr->prov_name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string interface_names() {
  auto* const all = ::if_nameindex();
  if (all == nullptr) return "none";
  std::string names;
  for (const auto* one = all; one->if_index != 0; ++one) {
    if (!names.empty()) names += ", ";
    names += one->if_name;
  }
  ::if_freenameindex(all);
  return names;
}

bool is_address(const std::string& text) {
  in6_addr address{};
  return ::inet_pton(AF_INET, text.c_str(), &address) == 1 ||
         ::inet_pton(AF_INET6, text.c_str(), &address) == 1;
}

/// Whether no interface has this address now. It may be given to one later.
bool is_elsewhere(const std::string& address) {
  sockaddr_storage name{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(name);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(name);
  if (::inet_pton(AF_INET, address.c_str(), &v4.sin_addr) == 1) {
    name.ss_family = AF_INET;
  } else if (::inet_pton(AF_INET6, address.c_str(), &v6.sin6_addr) == 1) {
    name.ss_family = AF_INET6;
  } else {
    return false;
  }
  const UniqueFd fd(::socket(name.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return fd.valid() && ::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof name) != 0 &&
         errno == EADDRNOTAVAIL;
}

/// Why libfabric, which answered `rc`, offers nothing for this configuration, and what to do.
Error nothing_offered(const EndpointConfig& config, bool by_address, int rc) {
  const std::string here = provider_names();
  const char* only = std::getenv("FI_PROVIDER");
  if (only != nullptr && *only != '\0' && here.find(config.provider) == std::string::npos) {
    return {ErrorCode::kUnsupported,
            fmt::format("FI_PROVIDER={} in the environment hides libfabric's provider '{}': unset "
                        "it, or set fabric.ofi.provider to one of those left: {}",
                        only, config.provider, here)};
  }
  if (by_address && !is_address(config.bind_address)) {
    return {ErrorCode::kNotFound, fmt::format("no interface or address '{}' here; there are: {}",
                                              config.bind_address, interface_names())};
  }
  // A device may come, with its driver.
  if (is_efa(config.provider) && rc == -FI_ENODATA) {
    return {ErrorCode::kUnavailable,
            fmt::format("no EFA device for rail {} now: is the driver loaded (modprobe efa), and "
                        "does the instance have one? Providers here: {}",
                        config.rail, here)};
  }
  return {
      ErrorCode::kUnsupported,
      fmt::format("libfabric {} has no provider '{}'{} that offers reliable datagrams with "
                  "remote writes and 4 bytes of immediate data ({}); providers here: {}",
                  version_text(::fi_version()), config.provider,
                  config.bind_address.empty() ? "" : fmt::format(" on '{}'", config.bind_address),
                  ::fi_strerror(-rc), here)};
}

/// An endpoint of the ofi_rxm layer receives 4096 messages of 16 KiB at once, which we never send:
/// 69 MiB and 0.1 s for each link (measured, 1.17). Only the environment can say so, before
/// libfabric's first use; what the user set stays.
void shrink_message_buffers() {
  static std::once_flag once;
  std::call_once(once, [] { ::setenv("FI_OFI_RXM_BUFFER_SIZE", "512", 0); });
}

/// Keeps of `list` the first that is of device `name` ("rdmap16s27" means its domain
/// "rdmap16s27-rdm"); nothing when none is.
Info take_device(fi_info* list, const std::string& name) {
  const Info owned(list);
  for (const fi_info* one = list; one != nullptr; one = one->next) {
    const std::string_view domain = one->domain_attr->name;
    if (domain == name || domain.starts_with(name + "-")) return Info(::fi_dupinfo(one));
  }
  return {};
}

}  // namespace

std::string version_text(std::uint32_t version) {
  return fmt::format("{}.{}", FI_MAJOR(version), FI_MINOR(version));
}

Status check_versions(const std::string& provider, std::uint32_t installed) {
  if (FI_VERSION_LT(installed, kApiVersion)) {
    return fail(ErrorCode::kUnsupported,
                "libfabric {} is installed, but the ofi fabric needs {} or later",
                version_text(installed), version_text(kApiVersion));
  }
  if (is_efa(provider) && FI_VERSION_LT(installed, kEfaFloor)) {
    return fail(ErrorCode::kUnsupported,
                "provider efa needs libfabric 1.20 or later, and {} is installed; earlier versions "
                "emulate writes with messages and a copy; install AWS's efa_installer or a newer "
                "libfabric",
                version_text(installed));
  }
  return {};
}

std::uint32_t api_version() {
  return std::min<std::uint32_t>(
      {FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), ::fi_version(), kEfaFloor});
}

Status check_gpu_memory(const std::string& provider, std::uint32_t installed) {
  if (!is_efa(provider)) {
    // Some would take a dmabuf and then read the GPU's address as the host's.
    return fail(ErrorCode::kUnsupported, "of libfabric's providers only efa is asked for it");
  }
  if (!MK_OFI_DMABUF) {
    return fail(ErrorCode::kUnsupported,
                "this build has libfabric {}, and GPU memory by dmabuf needs 1.20 or later: build "
                "it with that",
                version_text(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION)));
  }
  if (FI_VERSION_LT(installed, kEfaFloor)) {
    return fail(ErrorCode::kUnsupported,
                "libfabric {} is installed, and GPU memory by dmabuf needs 1.20 or later",
                version_text(installed));
  }
  return {};
}

Info make_hints(const EndpointConfig& config) {
  Info hints(::fi_allocinfo());
  if (!hints) return hints;
  hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
  // Introductions, and whose a write was.
  if (is_efa(config.provider)) hints->caps |= FI_MSG | FI_SOURCE;
  // FI_HMEM makes the provider load and try CUDA, so it is asked for only where it is of use.
  if (config.gpu_memory) hints->caps |= FI_HMEM | FI_READ | FI_REMOTE_READ;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;  // our operations begin with a fi_context2
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_SAFE;  // control registers memory while the proxy posts
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->cq_data_size = 4;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
                                FI_MR_ENDPOINT | (config.gpu_memory ? FI_MR_HMEM : 0);
  hints->fabric_attr->prov_name = ::strdup(config.provider.c_str());  // fi_freeinfo frees it
  if (!config.bind_address.empty() && ::if_nametoindex(config.bind_address.c_str()) != 0) {
    hints->domain_attr->name = ::strdup(config.bind_address.c_str());
  }
  return hints;
}

Result<std::shared_ptr<Domain>> Domain::open(const EndpointConfig& config) {
  MK_RETURN_IF_ERROR(check_versions(config.provider, ::fi_version()));
  shrink_message_buffers();
  const Info hints = make_hints(config);
  if (!hints) return fail(ErrorCode::kLimitExceeded, "libfabric is out of memory");
  const bool by_device = is_efa(config.provider) && !config.bind_address.empty();
  const bool by_address =
      !by_device && !config.bind_address.empty() && hints->domain_attr->name == nullptr;
  // libfabric offers such an address, and then cannot use it.
  if (by_address && is_elsewhere(config.bind_address)) {
    return fail(ErrorCode::kNotFound, "no interface has the address '{}' now; there are: {}",
                config.bind_address, interface_names());
  }
  fi_info* found = nullptr;
  const int rc = ::fi_getinfo(api_version(), by_address ? config.bind_address.c_str() : nullptr,
                              nullptr, by_address ? FI_SOURCE : 0, hints.get(), &found);
  if (rc != 0) return tl::unexpected<Error>(nothing_offered(config, by_address, rc));
  auto domain = std::make_shared<Domain>();
  domain->info_ = by_device ? take_device(found, config.bind_address) : Info(found);
  if (!domain->info_) {
    return fail(ErrorCode::kNotFound, "provider {} has no device '{}'", config.provider,
                config.bind_address);
  }
  found = domain->info_.get();  // the provider's first choice
  const fi_domain_attr& attributes = *found->domain_attr;
  if (attributes.cq_data_size < 4) {
    return fail(ErrorCode::kUnsupported,
                "provider {} carries {} bytes of immediate data, but 4 are needed",
                domain->provider(), attributes.cq_data_size);
  }
  if ((attributes.mr_mode & FI_MR_ENDPOINT) != 0 && (attributes.mr_mode & FI_MR_LOCAL) != 0) {
    return fail(ErrorCode::kUnsupported,
                "provider {} registers memory per endpoint, for sources too (FI_MR_ENDPOINT with "
                "FI_MR_LOCAL), and the ofi "
                "fabric has an endpoint per link",
                domain->provider());
  }
  fid_fabric* fabric = nullptr;
  if (const int error = ::fi_fabric(found->fabric_attr, &fabric, nullptr)) {
    return fail_fi(error, "cannot open the fabric of provider {}", domain->provider());
  }
  domain->fabric_.reset(fabric);
  fid_domain* opened = nullptr;
  if (const int error = ::fi_domain(fabric, found, &opened, nullptr)) {
    return fail_fi(error, "cannot open domain {} of provider {}", attributes.name,
                   domain->provider());
  }
  domain->domain_.reset(opened);
  // The name went with 1.17.
  domain->gate_ = std::make_unique<ProgressGate>(domain->provider().starts_with("net"));
  return domain;
}

Result<Port> Domain::open_port(std::size_t depth) const {
  Port port;
  fi_av_attr av_attributes{};
  av_attributes.type = FI_AV_UNSPEC;
  fid_av* av = nullptr;
  if (const int rc = ::fi_av_open(domain_.get(), &av_attributes, &av, nullptr)) {
    return fail_fi(rc, "provider {} opens no address table", provider());
  }
  port.addresses.reset(av);

  fi_cq_attr cq_attributes{};
  cq_attributes.size = depth;
  cq_attributes.format = FI_CQ_FORMAT_DATA;
  cq_attributes.wait_obj = FI_WAIT_NONE;
  fid_cq* cq = nullptr;
  if (const int rc = ::fi_cq_open(domain_.get(), &cq_attributes, &cq, nullptr)) {
    return fail_fi(rc, "provider {} opens no completion queue of {} entries", provider(), depth);
  }
  port.completions.reset(cq);

  fid_ep* endpoint = nullptr;
  if (const int rc = ::fi_endpoint(domain_.get(), info_.get(), &endpoint, nullptr)) {
    return fail_fi(rc, "provider {} opens no endpoint", provider());
  }
  port.endpoint.reset(endpoint);
  if (const int rc = ::fi_ep_bind(endpoint, &av->fid, 0))
    return fail_fi(rc, "cannot bind the address table");
  if (const int rc = ::fi_ep_bind(endpoint, &cq->fid, FI_TRANSMIT | FI_RECV)) {
    return fail_fi(rc, "cannot bind the completion queue");
  }
  MK_RETURN_IF_ERROR(set_options(endpoint));
  if (const int rc = ::fi_enable(endpoint))
    return fail_fi(rc, "provider {} does not enable the endpoint", provider());
  MK_RETURN_IF_ERROR(check_writes(endpoint));
  return port;
}

Status Domain::set_options(fid_ep* endpoint) const {
  // Before 1.18 there was no such option; a provider without what is forbidden answers that it has
  // no such option, which is as good.
  if (FI_VERSION_LT(::fi_version(), FI_VERSION(1, 18))) return {};
  const auto forbid = [this, endpoint](int option) {
    const bool permitted = false;
    const int rc =
        ::fi_setopt(&endpoint->fid, FI_OPT_ENDPOINT, option, &permitted, sizeof permitted);
    // One that reaches GPUs has it, or reaches them by CUDA alone.
    if (option == kOptCudaApiPermitted && reaches_gpus()) return rc;
    return rc == -FI_ENOPROTOOPT || rc == -FI_EINVAL || rc == -FI_EOPNOTSUPP || rc == -FI_ENOSYS
               ? 0
               : rc;
  };
  // A provider that calls CUDA while a kernel waits for what it should deliver waits for ever.
  if (const int rc = forbid(kOptCudaApiPermitted))
    return fail_fi(rc, "provider {} does not promise to leave CUDA alone", provider());
  // EFA would reach peers on its own host by provider shm, which does not notice that one is gone.
  if (!is_efa(provider())) return {};
  if (const int rc = forbid(kOptSharedMemoryPermitted))
    return fail_fi(rc, "provider {} does not promise to use its device for all peers", provider());
  return {};
}

Status Domain::check_writes(fid_ep* endpoint) const {
  if (!is_efa(provider())) return {};
  bool emulated = false;
  std::size_t bytes = sizeof emulated;
  if (const int rc =
          ::fi_getopt(&endpoint->fid, FI_OPT_ENDPOINT, kOptEfaEmulatedWrite, &emulated, &bytes)) {
    return fail_fi(rc, "provider {} does not tell whether its writes are the device's own",
                   provider());
  }
  if (!emulated) return {};
  return fail(
      ErrorCode::kUnsupported,
      "EFA device {} has no remote writes of its own, and libfabric would emulate them with "
      "messages; use an instance whose EFA writes (P5 and later, many of the fourth generation "
      "of Nitro), or set fabric.ofi.provider = \"tcp\"",
      device());
}

Result<Fid<fid_mr>> Domain::register_memory(std::byte* address, std::uint64_t bytes,
                                            fid_ep* bind_to) const {
  const fi_domain_attr& attributes = *info_->domain_attr;
  int rc = 0;
  for (int tries = 0; tries < 3; ++tries) {
    // Where the provider leaves the choice of keys to us, peers must not be able to guess them.
    std::uint64_t requested = 0;
    if ((attributes.mr_mode & FI_MR_PROV_KEY) == 0) {
      MK_ASSIGN_OR_RETURN(const Token random, make_token());
      std::memcpy(&requested, random.data(), sizeof(requested));
      if (attributes.mr_key_size < sizeof(requested))
        requested &= (std::uint64_t{1} << 8 * attributes.mr_key_size) - 1;
    }
    fid_mr* region = nullptr;
    gate_->change([&] {
      rc = ::fi_mr_reg(domain_.get(), address, bytes, kAccess, 0, requested, 0, &region, nullptr);
    });
    if (rc == -FI_ENOKEY) continue;  // taken
    if (rc != 0) break;
    Fid<fid_mr> owned(region);
    if ((attributes.mr_mode & FI_MR_ENDPOINT) != 0) {
      if (const int error = ::fi_mr_bind(region, &bind_to->fid, 0))
        return fail_fi(error, "cannot bind memory");
      if (const int error = ::fi_mr_enable(region)) return fail_fi(error, "cannot enable memory");
    }
    return owned;
  }
  return fail_fi(
      rc,
      "provider {} does not register {} bytes (is the memlock limit, `ulimit -l`, large enough?)",
      provider(), bytes);
}

Result<Fid<fid_mr>> Domain::register_dmabuf([[maybe_unused]] const MemoryDescriptor& memory) const {
#if MK_OFI_DMABUF
  // What the network calls the GPU's memory is what its owner calls it, as with verbs.
  const auto first = reinterpret_cast<std::uintptr_t>(memory.address);
  fi_mr_dmabuf window{};
  window.fd = memory.dmabuf;
  window.offset = memory.dmabuf_offset;
  window.len = memory.bytes;
  window.base_addr = reinterpret_cast<void*>(first - memory.dmabuf_offset);
  fi_mr_attr attributes{};
  attributes.dmabuf = &window;
  attributes.iov_count = 1;
  attributes.access = kAccess | FI_REMOTE_READ;  // the flusher's; see README.md
  // Taken for the host's, a small write might be copied from that address by the provider.
  attributes.iface = FI_HMEM_CUDA;
  fid_mr* region = nullptr;
  if (const int rc = ::fi_mr_regattr(domain_.get(), &attributes, FI_MR_DMABUF, &region)) {
    return fail_fi(rc, "provider {} does not register {} bytes of GPU memory", provider(),
                   memory.bytes);
  }
  return Fid<fid_mr>(region);
#else
  return fail(ErrorCode::kUnsupported, "this build knows no dmabufs of libfabric");
#endif
}

Result<Fid<fid_mr>> Domain::register_local(void* address, std::uint64_t bytes,
                                           std::uint64_t access) const {
  if (!local_descriptors()) return Fid<fid_mr>();
  fid_mr* region = nullptr;
  if (const int rc =
          ::fi_mr_reg(domain_.get(), address, bytes, access, 0, 0, 0, &region, nullptr)) {
    return fail_fi(rc, "provider {} does not register {} bytes of its user's", provider(), bytes);
  }
  return Fid<fid_mr>(region);
}

std::uint64_t Domain::wire_base(const void* address) const {
  return (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0
             ? reinterpret_cast<std::uintptr_t>(address)
             : 0;
}

std::size_t Domain::inject_bytes() const {
  // EFA's limit for remote writes is another one than tx_attr's, and is told since libfabric 2.0
  // only.
  return is_efa(provider()) ? 0 : info_->tx_attr->inject_size;
}

bool Domain::notify_apart() const {
  const std::string_view name = info_->fabric_attr->prov_name;
  return name.starts_with("tcp;ofi_rxm") || name.starts_with("net;ofi_rxm");
}

bool Domain::reaches_gpus() const { return is_efa(provider()) && (info_->caps & FI_HMEM) != 0; }

bool Domain::introduces() const { return is_efa(provider()); }

bool Domain::tags_writes() const {
  return info_->domain_attr->cq_data_size >= sizeof(std::uint64_t);
}

bool Domain::over_tcp() const {
  const std::string_view name = info_->fabric_attr->prov_name;
  return name.starts_with("tcp") || name.starts_with("net");
}

bool Domain::completes_early() const {
  // Once a write is in the kernel's socket buffer. Its target may then be deregistered before it
  // comes, which ends the connection; or the bytes may be lost with the connection.
  return over_tcp();
}

bool Domain::stream_addresses() const {
  return over_tcp() &&
         (info_->addr_format == FI_SOCKADDR_IN || info_->addr_format == FI_SOCKADDR_IN6);
}

}  // namespace mk::fabric::ofi
