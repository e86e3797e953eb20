// libfabric's functions themselves: the list of what there is, and opening the provider.
#include <cstring>

#include "tests/daemon/fabric/ofi/soft_efa/network.h"

namespace mk::soft_efa {
namespace {

constexpr std::uint64_t kCapabilities = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_READ | FI_WRITE |
                                        FI_REMOTE_READ | FI_REMOTE_WRITE | FI_HMEM | FI_SOURCE;

bool wants_efa(const fi_info* hints) {
  const char* const name = hints == nullptr ? nullptr : hints->fabric_attr->prov_name;
  return name == nullptr || std::strcmp(name, "efa") == 0;
}

/// Whether the provider can do what is asked, and the program what the provider asks.
bool agreed(const Network& network, const fi_info& hints) {
  const int needed = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
                     ((hints.caps & FI_HMEM) != 0 ? FI_MR_HMEM : 0);
  return (hints.caps & ~kCapabilities) == 0 && hints.ep_attr->type == FI_EP_RDM &&
         ((hints.caps & FI_HMEM) == 0 || network.gpu_memory) &&
         (hints.domain_attr->mr_mode & needed) == needed && (hints.mode & FI_CONTEXT2) != 0 &&
         hints.domain_attr->cq_data_size <= 4;
}

fi_info* describe(const Device& device, std::uint32_t version, const fi_info* hints) {
  fi_info* const info = ::fi_allocinfo();
  if (info == nullptr) return nullptr;
  info->caps = hints == nullptr ? kCapabilities : hints->caps;
  info->mode = FI_CONTEXT2;
  info->addr_format = FI_ADDR_EFA;
  info->ep_attr->type = FI_EP_RDM;
  info->ep_attr->protocol = FI_PROTO_EFA;
  info->ep_attr->max_msg_size = 1 << 30;
  info->tx_attr->size = kSendQueue;
  info->tx_attr->inject_size = kMessageMax;  // of messages, not of writes
  info->rx_attr->size = kReceiveQueue;
  info->domain_attr->name = ::strdup((device.name + "-rdm").c_str());
  info->domain_attr->threading = FI_THREAD_SAFE;
  info->domain_attr->resource_mgmt = FI_RM_ENABLED;
  info->domain_attr->mr_key_size = 4;
  info->domain_attr->cq_data_size = 4;
  info->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (hints != nullptr)
    info->domain_attr->mr_mode |= hints->domain_attr->mr_mode & (FI_MR_LOCAL | FI_MR_HMEM);
  info->fabric_attr->name = ::strdup("efa");
  info->fabric_attr->prov_name = ::strdup("efa");
  info->fabric_attr->prov_version = version;
  info->fabric_attr->api_version = version;
  return info;
}

fi_ops fabric_object = {.size = sizeof(fi_ops), .close = close_fabric};
fi_ops_fabric fabric_calls = {.size = sizeof(fi_ops_fabric), .domain = open_domain};

}  // namespace
}  // namespace mk::soft_efa

using namespace mk::soft_efa;

extern "C" {

std::uint32_t fi_version(void) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  return network.version;
}

int fi_getinfo(std::uint32_t version, const char*, const char*, std::uint64_t, const fi_info* hints,
               fi_info** list) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (const int error = network.refusal("fi_getinfo")) return error;
  if (FI_VERSION_LT(network.version, version)) return -FI_ENOSYS;
  *list = nullptr;
  if (!wants_efa(hints) || (hints != nullptr && !agreed(network, *hints))) return -FI_ENODATA;
  fi_info** end = list;
  for (const auto& device : network.devices) {
    *end = describe(*device, version, hints);
    if (*end == nullptr) return -FI_ENOMEM;
    end = &(*end)->next;
  }
  return 0;
}

int fi_fabric(fi_fabric_attr* attributes, fid_fabric** made, void* context) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (const int error = network.refusal("fi_fabric")) return error;
  auto* const fabric = make<Fabric>(network, FI_CLASS_FABRIC, context, &fabric_object);
  fabric->version = attributes->api_version;
  fabric->ops = &fabric_calls;
  fabric->api_version = attributes->api_version;
  *made = fabric;
  return 0;
}

}  // extern "C"
