#include "daemon/topology/machine.h"

#include <hwloc.h>

#include <algorithm>
#include <cstring>
#include <memory>

namespace mk::topology {
namespace {

constexpr std::uint16_t kNvidia = 0x10de;
constexpr std::uint16_t kAmazon = 0x1d0f;
constexpr std::uint16_t kDisplayClass = 0x03;
constexpr std::uint16_t kEfaFirst = 0xefa0, kEfaLast = 0xefaf;

struct TopologyCloser {
  void operator()(hwloc_topology* topology) const { ::hwloc_topology_destroy(topology); }
};
using TopologyHandle = std::unique_ptr<hwloc_topology, TopologyCloser>;

/// hwloc unloads its plugins with the last topology, and what libpciaccess has read for its PCI
/// plugin (vendors' names, 340 KB) is lost every time. One that is never given back keeps them.
void keep_plugins() {
  // volatile: nobody reads it, and a pointer that is not there makes a leak of what it points to
  [[maybe_unused]] static hwloc_topology* volatile kept = [] {
    hwloc_topology_t topology = nullptr;
    return ::hwloc_topology_init(&topology) == 0 ? topology : nullptr;
  }();
}

Result<TopologyHandle> load(const std::string& xml_path) {
  keep_plugins();
  hwloc_topology_t raw = nullptr;
  if (::hwloc_topology_init(&raw) != 0) return fail_errno(errno, "hwloc does not start");
  TopologyHandle topology(raw);
  if (!xml_path.empty() && ::hwloc_topology_set_xml(raw, xml_path.c_str()) != 0)
    return fail_errno(errno, "hwloc does not read the machine of {}", xml_path);
  ::hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  // Bridges that hold one device each are what tells a switch's ports from a root port's.
  ::hwloc_topology_set_type_filter(raw, HWLOC_OBJ_BRIDGE, HWLOC_TYPE_FILTER_KEEP_ALL);
  ::hwloc_topology_set_icache_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  ::hwloc_topology_set_cache_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  if (::hwloc_topology_load(raw) != 0) {
    return fail(ErrorCode::kUnavailable, "hwloc cannot read {}: {}",
                xml_path.empty() ? "this machine" : "the machine of " + xml_path,
                errno_text(errno));
  }
  return topology;
}

std::string bus_id_of(const hwloc_obj_attr_u::hwloc_pcidev_attr_s& pci) {
  return fmt::format("{:04x}:{:02x}:{:02x}.{:x}", pci.domain, pci.bus, pci.dev, pci.func);
}

std::string info_of(hwloc_obj_t object, const char* key) {
  const char* const value = ::hwloc_obj_get_info_by_name(object, key);
  return value == nullptr ? std::string() : value;
}

/// Whether an RDMA device has a port that is up ("4" in sysfs); one that says nothing may be.
bool port_active(hwloc_obj_t rdma) {
  bool said = false;
  for (unsigned i = 0; i < rdma->infos_count; ++i) {
    const std::string_view name = rdma->infos[i].name;
    if (!name.starts_with("Port") || !name.ends_with("State")) continue;
    said = true;
    if (rdma->infos[i].value[0] == '4') return true;
  }
  return !said;
}

class Reader {
 public:
  explicit Reader(hwloc_topology_t topology) : topology_(topology) {}

  Machine read() {
    hwloc_obj_t const root = ::hwloc_get_root_obj(topology_);
    machine_.name = info_of(root, "HostName");
    machine_.tree.push_back({TreeNode::Kind::kMachine,
                             machine_.name.empty() ? "machine" : "machine " + machine_.name,
                             0,
                             {}});
    visit(root, 0);
    std::ranges::sort(machine_.gpus, {}, &Gpu::bus_id);
    std::ranges::sort(machine_.nics, [](const Nic& a, const Nic& b) {
      const int order = ::strverscmp(a.name().c_str(), b.name().c_str());
      return order != 0 ? order < 0 : a.bus_id < b.bus_id;
    });
    read_cpus();
    return std::move(machine_);
  }

 private:
  /// Adds what of `object`'s children leads to a device below tree node `at`; whether anything did.
  bool visit(hwloc_obj_t object, std::uint32_t at) {
    bool any = false;
    const auto each = [&](hwloc_obj_t first) {
      for (hwloc_obj_t child = first; child != nullptr; child = child->next_sibling)
        any |= add(child, at);
    };
    each(object->first_child);
    each(object->io_first_child);
    return any;
  }

  bool add(hwloc_obj_t object, std::uint32_t parent) {
    TreeNode node;
    switch (object->type) {
      case HWLOC_OBJ_BRIDGE:
        if (object->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_HOST) {
          node.kind = TreeNode::Kind::kHostBridge;
          node.label =
              fmt::format("host bridge {:04x}:{:02x}", object->attr->bridge.downstream.pci.domain,
                          object->attr->bridge.downstream.pci.secondary_bus);
        } else {
          node.kind = TreeNode::Kind::kBridge;
          node.label = "PCIe bridge " + bus_id_of(object->attr->bridge.upstream.pci);
        }
        break;
      case HWLOC_OBJ_PCI_DEVICE:
        return add_device(object, parent);
      case HWLOC_OBJ_PACKAGE:
        node.label = fmt::format("package {}", object->os_index);
        break;
      case HWLOC_OBJ_GROUP:
        node.label = fmt::format("group {}", object->logical_index);
        break;
      default:
        // A NIC that no PCI device stands for (a paravirtual one) hangs from the machine itself.
        if (object->type == HWLOC_OBJ_OS_DEVICE) return add_bare(object, parent);
        return visit(object, parent);  // cores and the like lead to nothing of ours
    }
    const std::uint32_t index = append(std::move(node), parent);
    if (visit(object, index)) return true;
    machine_.tree.pop_back();  // nothing was added below it
    machine_.tree[parent].children.pop_back();
    return false;
  }

  std::uint32_t append(TreeNode node, std::uint32_t parent) {
    const auto index = static_cast<std::uint32_t>(machine_.tree.size());
    node.parent = parent;
    machine_.tree.push_back(std::move(node));
    machine_.tree[parent].children.push_back(index);
    return index;
  }

  bool add_device(hwloc_obj_t object, std::uint32_t parent) {
    const hwloc_obj_attr_u::hwloc_pcidev_attr_s& pci = object->attr->pcidev;
    PciDevice device;
    device.bus_id = bus_id_of(pci);
    device.model = info_of(object, "PCIDevice");
    device.vendor = pci.vendor_id;
    device.device = pci.device_id;
    device.numa = numa_of(object);
    if (pci.vendor_id == kNvidia && pci.class_id >> 8 == kDisplayClass) {
      device.place = append({TreeNode::Kind::kDevice, "", 0, {}}, parent);
      machine_.gpus.push_back({device});
      return true;
    }
    Nic nic{device, {}, {}, false, true};
    for (hwloc_obj_t child = object->io_first_child; child != nullptr; child = child->next_sibling)
      take_os_device(child, nic);
    if (nic.name().empty()) return false;
    nic.efa = pci.vendor_id == kAmazon && pci.device_id >= kEfaFirst && pci.device_id <= kEfaLast;
    nic.place = append({TreeNode::Kind::kDevice, "", 0, {}}, parent);
    machine_.nics.push_back(std::move(nic));
    return true;
  }

  bool add_bare(hwloc_obj_t object, std::uint32_t parent) {
    Nic nic;
    take_os_device(object, nic);
    if (nic.name().empty() || nic.name() == "lo") return false;
    nic.place = append({TreeNode::Kind::kDevice, "", 0, {}}, parent);
    machine_.nics.push_back(std::move(nic));
    return true;
  }

  static void take_os_device(hwloc_obj_t object, Nic& nic) {
    if (object->type != HWLOC_OBJ_OS_DEVICE || object->name == nullptr) return;
    if (object->attr->osdev.type == HWLOC_OBJ_OSDEV_OPENFABRICS && nic.rdma.empty()) {
      nic.rdma = object->name;
      nic.active = port_active(object);
    } else if (object->attr->osdev.type == HWLOC_OBJ_OSDEV_NETWORK && nic.interface.empty()) {
      nic.interface = object->name;
    }
  }

  std::optional<std::uint32_t> numa_of(hwloc_obj_t object) const {
    hwloc_obj_t const above = ::hwloc_get_non_io_ancestor_obj(topology_, object);
    if (above == nullptr || above->nodeset == nullptr) return std::nullopt;
    // More than one: the machine as a whole, which says nothing. On a machine of one it is that
    // one.
    if (::hwloc_bitmap_weight(above->nodeset) != 1) return std::nullopt;
    return static_cast<std::uint32_t>(::hwloc_bitmap_first(above->nodeset));
  }

  void read_cpus() {
    for (hwloc_obj_t cpu = nullptr;
         (cpu = ::hwloc_get_next_obj_by_type(topology_, HWLOC_OBJ_PU, cpu)) != nullptr;) {
      if (cpu->nodeset == nullptr || ::hwloc_bitmap_weight(cpu->nodeset) != 1) continue;
      machine_.numa_of_cpu[cpu->os_index] =
          static_cast<std::uint32_t>(::hwloc_bitmap_first(cpu->nodeset));
    }
  }

  hwloc_topology_t const topology_;
  Machine machine_;
};

Result<Machine> read(const std::string& xml_path) {
  MK_ASSIGN_OR_RETURN(const TopologyHandle topology, load(xml_path));
  Machine machine = Reader(topology.get()).read();
  for (const Gpu& gpu : machine.gpus) machine.tree[gpu.place].label = gpu.name();
  for (const Nic& nic : machine.nics) machine.tree[nic.place].label = nic.name();
  return machine;
}

/// From a place to the root.
std::vector<std::uint32_t> way_up(const Machine& machine, std::uint32_t place) {
  std::vector<std::uint32_t> way{place};
  while (place != 0) way.push_back(place = machine.tree[place].parent);
  return way;
}

}  // namespace

Result<Machine> read_machine() { return read({}); }
Result<Machine> read_machine(const std::string& xml_path) { return read(xml_path); }

std::string_view reach_text(Reach reach) {
  switch (reach) {
    case Reach::kSwitch:
      return "one PCIe switch";
    case Reach::kHostBridge:
      return "one host bridge";
    case Reach::kNuma:
      return "one NUMA domain";
    case Reach::kMachine:
      break;
  }
  return "across the machine";
}

Distance distance(const Machine& machine, const PciDevice& a, const PciDevice& b) {
  const std::vector<std::uint32_t> from = way_up(machine, a.place);
  const std::vector<std::uint32_t> to = way_up(machine, b.place);
  // From the root on, as long as both go the same way.
  std::size_t shared = 0;
  while (shared < std::min(from.size(), to.size()) &&
         from[from.size() - 1 - shared] == to[to.size() - 1 - shared])
    ++shared;
  Distance result;
  result.hops = static_cast<std::uint32_t>(from.size() + to.size() - 2 * shared);
  const bool same_numa = a.numa && b.numa && *a.numa == *b.numa;
  result.other_numa = a.numa && b.numa && !same_numa;
  switch (machine.tree[from[from.size() - shared]].kind) {
    case TreeNode::Kind::kBridge:
    case TreeNode::Kind::kDevice:
      result.reach = Reach::kSwitch;
      break;
    case TreeNode::Kind::kHostBridge:
      result.reach = Reach::kHostBridge;
      break;
    case TreeNode::Kind::kMachine:
    case TreeNode::Kind::kOther:
      // Beyond the root complexes, how deep each device hangs says nothing any more.
      result.reach = same_numa ? Reach::kNuma : Reach::kMachine;
      result.hops = 0;
      break;
  }
  return result;
}

}  // namespace mk::topology
