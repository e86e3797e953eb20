#include "daemon/fabric/choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "daemon/fabric/ofi/survey.h"
#ifdef MK_HAVE_VERBS
#include "daemon/fabric/verbs/device.h"
#endif

namespace mk::fabric {
namespace {

// From here on `net` is part of `tcp`.
constexpr std::uint32_t kNetIsTcp = ofi::libfabric_version(1, 18);

/// Whether a provider of that name is there, alone or below a layer ("tcp;ofi_rxm").
bool has(const Inventory& inventory, const std::string& provider) {
  return std::ranges::any_of(inventory.providers, [&](const std::string& name) {
    return name == provider || name.starts_with(provider + ";");
  });
}

std::string no_verbs(const Inventory& inventory) {
  if (!inventory.verbs_built) return "this build has no verbs fabric";
  if (inventory.closed_devices.empty()) return "no InfiniBand or RoCE port is active";
  return fmt::format("no InfiniBand or RoCE port can be used ({})",
                     fmt::join(inventory.closed_devices, ", "));
}

FabricChoice choose(const Inventory& inventory) {
  if (!inventory.rdma_ports.empty()) {
    return {"verbs", "",
            fmt::format("verbs: RDMA ports that are active: {}",
                        fmt::join(inventory.rdma_ports, ", "))};
  }
  std::string why = no_verbs(inventory);
  if (has(inventory, "efa")) {
    if (inventory.ofi_version >= ofi::kEfaFloor)
      return {"ofi", "efa", fmt::format("ofi over efa: {}, and there is an EFA device", why)};
    why += ", and the EFA device needs libfabric 1.20 or later";
  }
  if (inventory.ofi_version != 0 && inventory.ofi_version < kNetIsTcp && has(inventory, "net")) {
    return {"ofi", "net",
            fmt::format("ofi over net: {}; of libfabric's providers for any network the best "
                        "before 1.18",
                        why)};
  }
  if (has(inventory, "tcp")) {
    return {"ofi", "tcp",
            fmt::format("ofi over tcp: {}; libfabric's provider for any network", why)};
  }
  return {"ofi", "tcp",
          fmt::format("ofi over tcp: {}, and libfabric here offers {}", why,
                      inventory.providers.empty()
                          ? "no provider"
                          : fmt::format("{}", fmt::join(inventory.providers, ", ")))};
}

}  // namespace

Inventory read_inventory() {
  Inventory inventory;
#ifdef MK_HAVE_VERBS
  inventory.verbs_built = true;
  for (const verbs::PortEntry& port : verbs::read_ports()) {
    if (!port.trouble.empty()) {
      inventory.closed_devices.push_back(port.name() + " " + port.trouble);
      continue;
    }
    // EFA's devices have verbs of their own, and no link layer.
    if (port.state == IBV_PORT_ACTIVE && !port.iwarp &&
        port.link_layer != IBV_LINK_LAYER_UNSPECIFIED)
      inventory.rdma_ports.push_back(port.name());
  }
#endif
#ifdef MK_HAVE_OFI
  const ofi::Survey survey = ofi::survey();
  inventory.ofi_version = survey.version_number;
  for (const auto& [name, its_version] : survey.providers) inventory.providers.push_back(name);
#endif
  return inventory;
}

FabricChoice choose_fabric(const Inventory& inventory) {
  FabricChoice choice = choose(inventory);
  if (!inventory.closed_devices.empty()) {
    choice.trouble = fmt::format(
        "fabric \"auto\" is {} without RDMA devices that cannot be used: {}; to use them, mend "
        "that and restart mkerneld",
        choice.fabric, fmt::join(inventory.closed_devices, ", "));
  }
  return choice;
}

}  // namespace mk::fabric
