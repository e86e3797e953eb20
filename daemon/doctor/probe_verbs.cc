#include "daemon/doctor/probe.h"

#ifdef MK_HAVE_VERBS
#include <infiniband/verbs.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "daemon/doctor/gpu_page.h"
#include "daemon/fabric/verbs/handle.h"
#include "daemon/fabric/verbs/selection.h"
#endif

namespace mk::doctor {

#ifndef MK_HAVE_VERBS

void probe_verbs(const daemon::Config&, Facts& facts) { facts.verbs_built = false; }

#else

namespace {

using namespace fabric::verbs;

constexpr std::size_t kGidTableMax = 1024;
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

void look_at_gids(ibv_context* context, std::uint8_t port, std::int32_t wanted, PortFacts& facts) {
  std::vector<ibv_gid_entry> table(kGidTableMax);
  const ssize_t entries = ::ibv_query_gid_table(context, table.data(), table.size(), 0);
  if (entries < 0) {
    facts.gid_trouble = "the GID table cannot be read: " + errno_text(static_cast<int>(-entries));
    return;
  }
  table.resize(static_cast<std::size_t>(entries));
  std::erase_if(table, [&](const ibv_gid_entry& entry) { return entry.port_num != port; });
  const auto choice = choose_gid(table, wanted, facts.name);
  if (!choice) {
    facts.gid_trouble = choice.error().message;
    return;
  }
  const ibv_gid_entry& entry = table[choice->index];
  facts.gid = fmt::format("index {} = {} ({})", entry.gid_index, gid_text(entry.gid),
                          gid_type_text(entry.gid_type));
  facts.gid_why = choice->why;
  facts.gid_link_local = entry.gid_type != IBV_GID_TYPE_IB && link_local(entry.gid);
}

/// Registers memory of both kinds as a session's would be, and lets it go again.
void try_registering(ibv_context* context, const GpuPage* gpu, PortFacts& facts) {
  const DomainHandle domain(::ibv_alloc_pd(context));
  if (!domain) {
    facts.page_trouble = "no protection domain: " + errno_text(errno);
    facts.dmabuf_trouble = facts.peermem_trouble = facts.page_trouble;
    return;
  }
  alignas(4096) static std::array<std::byte, 4096> page;
  const RegionHandle host(::ibv_reg_mr(domain.get(), page.data(), page.size(), kAccess));
  if (!host) facts.page_trouble = "a page is not registered: " + errno_text(errno);
  if (gpu == nullptr) return;
  facts.dmabuf_trouble = gpu->dmabuf_trouble();
  if (gpu->dmabuf() >= 0) {
    const RegionHandle by_dmabuf(::ibv_reg_dmabuf_mr(
        domain.get(), 0, gpu->bytes(), reinterpret_cast<std::uint64_t>(gpu->address()),
        gpu->dmabuf(), kAccess));
    if (!by_dmabuf) facts.dmabuf_trouble = errno_text(errno);
  }
  // By its plain address only a module such as nvidia-peermem knows the GPU's memory.
  const RegionHandle by_module(
      ::ibv_reg_mr(domain.get(), gpu->address(), gpu->bytes(), static_cast<unsigned>(kAccess)));
  if (!by_module) facts.peermem_trouble = errno_text(errno);
}

void look_at_device(ibv_device* device, std::int32_t wanted_gid, const GpuPage* gpu, Facts& facts) {
  errno = 0;
  const ContextHandle context(::ibv_open_device(device));
  int error = errno;
  ibv_device_attr attributes{};
  if (context) error = ::ibv_query_device(context.get(), &attributes);
  if (!context || error != 0) {
    facts.verbs_trouble += fmt::format("{}RDMA device {} cannot be opened: {}",
                                       facts.verbs_trouble.empty() ? "" : "; ",
                                       ::ibv_get_device_name(device), errno_text(error));
    return;
  }
  for (std::uint32_t number = 1; number <= attributes.phys_port_cnt; ++number) {
    const auto port = static_cast<std::uint8_t>(number);
    ibv_port_attr state{};
    if (::ibv_query_port(context.get(), port, &state) != 0) continue;
    PortFacts& one = facts.ports.emplace_back();
    one.name = fmt::format("{}:{}", ::ibv_get_device_name(device), number);
    one.active = state.state == IBV_PORT_ACTIVE && device->transport_type != IBV_TRANSPORT_IWARP;
    one.state = device->transport_type == IBV_TRANSPORT_IWARP ? "iWARP, which is not spoken here"
                                                              : ::ibv_port_state_str(state.state);
    one.layer = state.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
    one.mtu_bytes = mtu_bytes(state.active_mtu);
    one.mtu_bytes_max = mtu_bytes(state.max_mtu);
    if (!one.active) continue;
    look_at_gids(context.get(), port, wanted_gid, one);
    try_registering(context.get(), gpu, one);
  }
}

}  // namespace

void probe_verbs(const daemon::Config& config, Facts& facts) {
  facts.verbs_built = true;
  int count = 0;
  ibv_device** const devices = ::ibv_get_device_list(&count);
  if (devices == nullptr) {
    facts.verbs_trouble = "the RDMA devices cannot be listed: " + errno_text(errno);
    return;
  }
  const auto gpu = GpuPage::make();
  if (gpu) facts.gpu = (*gpu)->gpu();
  for (int i = 0; i < count; ++i)
    look_at_device(devices[i], config.fabric.verbs.gid_index, gpu ? gpu->get() : nullptr, facts);
  ::ibv_free_device_list(devices);
}

#endif

}  // namespace mk::doctor
