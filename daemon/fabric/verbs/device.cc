#include "daemon/fabric/verbs/device.h"

#include <endian.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "daemon/fabric/verbs/selection.h"

namespace mk::fabric::verbs {
namespace {

constexpr std::size_t kGidTableMax = 1024;

struct DeviceList {
  int count = 0;
  ibv_device** devices = ::ibv_get_device_list(&count);
  DeviceList() = default;
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  ~DeviceList() {
    if (devices != nullptr) ::ibv_free_device_list(devices);
  }
};

/// A port, and the place of its device in the list.
struct Candidate {
  PortEntry port;
  int device = 0;
};

std::string cannot_be_opened(int error) {
  const bool forbidden = error == EACCES || error == EPERM;
  return fmt::format("cannot be opened: {}{}", errno_text(error),
                     forbidden ? ", by the file mode of /dev/infiniband/uverbs* or by DeviceAllow= "
                                 "of the unit"
                               : "");
}

std::vector<Candidate> list_ports(const DeviceList& list) {
  std::vector<Candidate> found;
  for (int i = 0; i < list.count; ++i) {
    PortEntry entry;
    entry.device = ::ibv_get_device_name(list.devices[i]);
    const auto add_trouble = [&](std::uint8_t port, std::string trouble) {
      entry.port = port;
      entry.trouble = std::move(trouble);
      found.push_back({entry, i});
      entry.trouble.clear();
    };
    errno = 0;
    const ContextHandle context(::ibv_open_device(list.devices[i]));
    if (!context) {
      add_trouble(0, cannot_be_opened(errno));
      continue;
    }
    ibv_device_attr attributes{};
    if (const int error = ::ibv_query_device(context.get(), &attributes)) {
      add_trouble(0, "does not tell its attributes: " + errno_text(error));
      continue;
    }
    for (std::uint32_t number = 1; number <= attributes.phys_port_cnt; ++number) {
      const auto port = static_cast<std::uint8_t>(number);
      ibv_port_attr state{};
      if (const int error = ::ibv_query_port(context.get(), port, &state)) {
        add_trouble(port, "does not tell its attributes: " + errno_text(error));
        continue;
      }
      entry.port = port;
      entry.state = state.state;
      entry.link_layer = state.link_layer;
      entry.iwarp = list.devices[i]->transport_type == IBV_TRANSPORT_IWARP;
      entry.guid = be64toh(::ibv_get_device_guid(list.devices[i]));
      found.push_back({entry, i});
    }
  }
  return found;
}

std::vector<std::uint16_t> read_pkeys(ibv_context* context, std::uint8_t port, int count) {
  std::vector<std::uint16_t> table;
  for (int i = 0; i < count; ++i) {
    __be16 key = 0;
    if (::ibv_query_pkey(context, port, i, &key) != 0) break;
    table.push_back(be16toh(key));
  }
  return table;
}

}  // namespace

std::vector<PortEntry> read_ports() {
  const DeviceList list;
  std::vector<PortEntry> ports;
  for (Candidate& candidate : list_ports(list)) ports.push_back(std::move(candidate.port));
  return ports;
}

Result<std::shared_ptr<Device>> Device::open(const EndpointConfig& config, std::uint32_t version) {
  const VerbsOptions& options = config.verbs;
  const std::string wanted = options.devices.empty()
                                 ? std::string()
                                 : options.devices[config.rail % options.devices.size()];
  const DeviceList list;
  const std::vector<Candidate> candidates = list_ports(list);
  std::vector<PortEntry> ports;
  ports.reserve(candidates.size());
  for (const Candidate& candidate : candidates) ports.push_back(candidate.port);
  MK_ASSIGN_OR_RETURN(const Choice choice, choose_port(ports, wanted, config.rail));

  const Candidate& chosen = candidates[choice.index];
  const auto device = std::make_shared<Device>();
  device->version_ = version;
  device->entry_ = chosen.port;
  device->name_ = chosen.port.name();
  device->path_.port = chosen.port.port;
  device->context_.reset(::ibv_open_device(list.devices[chosen.device]));
  if (!device->context_) return fail_verb(errno, "cannot open RDMA device {}", device->name_);
  MK_RETURN_IF_ERROR(
      device->open_port(options, config.nic_why.empty() ? choice.why : config.nic_why));
  return device;
}

Status Device::open_port(const VerbsOptions& options, const std::string& why) {
  ibv_context* const context = context_.get();
  ibv_device_attr limits{};
  ibv_port_attr port{};
  int error = ::ibv_query_device(context, &limits);
  if (error == 0) error = ::ibv_query_port(context, path_.port, &port);
  if (error != 0) return fail_verb(error, "RDMA port {} does not tell its attributes", name_);
  work_requests_max_ = static_cast<std::uint32_t>(std::max(limits.max_qp_wr, 0));
  completions_max_ = static_cast<std::uint32_t>(std::max(limits.max_cqe, 0));
  shared_receives_max_ = static_cast<std::uint32_t>(std::max(limits.max_srq_wr, 0));
  message_bytes_max_ = std::max<std::uint64_t>(port.max_msg_sz, 1);

  MK_ASSIGN_OR_RETURN(path_.mtu, choose_mtu(port.active_mtu, options.mtu_bytes, name_));
  path_.link_layer = port.link_layer;
  path_.global_always = (port.flags & IBV_QPF_GRH_REQUIRED) != 0;
  path_.timeout = static_cast<std::uint8_t>(options.timeout);
  path_.retries = static_cast<std::uint8_t>(options.retries);
  path_.rnr_retries = static_cast<std::uint8_t>(options.rnr_retries);
  path_.service_level = static_cast<std::uint8_t>(options.service_level);
  path_.traffic_class = static_cast<std::uint8_t>(options.traffic_class);
  wanted_gid_ = options.gid_index;
  wanted_pkey_ = options.pkey;
  port_why_ = why;
  MK_ASSIGN_OR_RETURN(const Place place, find_place());
  settle(place);

  domain_.reset(::ibv_alloc_pd(context));
  if (!domain_) return fail_verb(errno, "RDMA port {} gives no protection domain", name_);
  // Asynchronous events are read by a thread that must not block in it.
  if (::fcntl(context->async_fd, F_SETFL, ::fcntl(context->async_fd, F_GETFL) | O_NONBLOCK) != 0)
    return fail_errno(errno, "RDMA port {}: its event file does not become non-blocking", name_);

  return {};
}

Result<Device::Place> Device::find_place() const {
  Place place;
  ibv_port_attr port{};
  if (const int error = ::ibv_query_port(context_.get(), path_.port, &port))
    return fail_verb(error, "RDMA port {} does not tell its attributes", name_);
  place.lid = port.lid;
  const std::vector<std::uint16_t> pkeys =
      read_pkeys(context_.get(), path_.port, port.pkey_tbl_len);
  MK_ASSIGN_OR_RETURN(place.pkey_index, choose_pkey(pkeys, wanted_pkey_, name_));
  place.pkey = place.pkey_index < pkeys.size() ? pkeys[place.pkey_index] : 0;
  std::vector<ibv_gid_entry> table(kGidTableMax);
  const ssize_t entries = ::ibv_query_gid_table(context_.get(), table.data(), table.size(), 0);
  if (entries < 0) {
    return fail_verb(static_cast<int>(-entries), "RDMA port {} does not tell its GID table", name_);
  }
  table.resize(static_cast<std::size_t>(entries));
  std::erase_if(table, [&](const ibv_gid_entry& entry) { return entry.port_num != path_.port; });
  MK_ASSIGN_OR_RETURN(const Choice gid, choose_gid(table, wanted_gid_, name_));
  place.gid = table[gid.index];
  place.why = gid.why;
  return place;
}

void Device::settle(const Place& place) {
  path_.gid_index = static_cast<std::uint8_t>(place.gid.gid_index);
  path_.gid = place.gid.gid;
  path_.pkey_index = place.pkey_index;
  lid_ = place.lid;
  pkey_ = place.pkey;
  located_ = true;
  explanation_ = fmt::format(
      "RDMA port {} ({}; {}), GID index {} = {} ({}): {}; MTU {}, partition {:#06x}", name_,
      port_why_, path_.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand",
      place.gid.gid_index, gid_text(place.gid.gid), gid_type_text(place.gid.gid_type), place.why,
      mtu_bytes(path_.mtu), pkey_);
}

Result<bool> Device::relocate() {
  auto place = find_place();
  const std::lock_guard lock(mutex_);
  if (!place) {
    located_ = false;
    no_place_ = place.error().message;
    return propagate(place);
  }
  const bool moved = place->lid != lid_ || place->pkey != pkey_ ||
                     place->pkey_index != path_.pkey_index ||
                     std::memcmp(place->gid.gid.raw, path_.gid.raw, sizeof path_.gid.raw) != 0;
  settle(*place);
  if (moved) ++version_;
  return moved;
}

bool Device::located() const {
  const std::lock_guard lock(mutex_);
  return located_;
}

Status Device::check_located() const {
  const std::lock_guard lock(mutex_);
  if (located_) return {};
  return fail(ErrorCode::kUnavailable, "{}", no_place_);
}

Status Device::check_up() const {
  ibv_port_attr port{};
  // A device that does not tell has other trouble.
  if (::ibv_query_port(context_.get(), path_.port, &port) != 0 || port.state >= IBV_PORT_ACTIVE)
    return {};
  return fail(ErrorCode::kUnavailable, "RDMA port {} is down ({})", name_,
              ::ibv_port_state_str(port.state));
}

LocalPath Device::path() const {
  const std::lock_guard lock(mutex_);
  return path_;
}

std::string Device::explanation() const {
  const std::lock_guard lock(mutex_);
  return explanation_;
}

Address Device::address() const {
  const std::lock_guard lock(mutex_);
  Address address;
  std::copy(std::begin(path_.gid.raw), std::end(path_.gid.raw), address.gid.begin());
  address.lid = lid_;
  address.mtu = path_.mtu;
  address.link_layer = path_.link_layer;
  address.pkey = pkey_;
  address.version = version_;
  return address;
}

bool Device::gid_unchanged() const {
  const LocalPath known = path();
  ibv_gid now{};
  if (::ibv_query_gid(context_.get(), known.port, known.gid_index, &now) != 0 ||
      std::memcmp(now.raw, known.gid.raw, sizeof now.raw) != 0)
    return false;
  if (known.link_layer != IBV_LINK_LAYER_ETHERNET || !link_local(known.gid)) return true;
  const auto place = find_place();
  return !place || link_local(place->gid.gid);
}

bool Device::pkey_unchanged() const {
  const std::uint16_t index = path().pkey_index;
  const std::uint32_t known = address().pkey;
  __be16 now = 0;
  return ::ibv_query_pkey(context_.get(), path_.port, index, &now) == 0 && be16toh(now) == known;
}

Status Device::check_alive() const {
  ibv_port_attr port{};
  const int error = ::ibv_query_port(context_.get(), path_.port, &port);
  // Anything else is an answer.
  if (error != EIO && error != ENODEV && error != ENXIO) return {};
  return fail_verb(error, "RDMA port {} does not tell its attributes", name_);
}

Result<RegionHandle> Device::register_memory(std::byte* address, std::uint64_t bytes,
                                             int access) const {
  const auto flags = static_cast<unsigned>(access);
  RegionHandle region(::ibv_reg_mr(domain_.get(), address, bytes, flags));
  if (!region) {
    return fail_verb(errno, "RDMA port {} does not register {} bytes of memory", name_, bytes);
  }
  return region;
}

}  // namespace mk::fabric::verbs
