/// \file
/// What of a machine matters to the choice of NICs: its GPUs, its NICs, and the PCIe tree between
/// them. Read by hwloc, from this machine or from an XML file that hwloc (`lstopo`) has written.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shm/host/result.h"

namespace mk::topology {

/// A GPU, or a NIC: one PCI function. A NIC without RDMA has only an interface.
struct PciDevice {
  std::string bus_id;  ///< "0000:19:00.0"
  std::string model;   ///< from the PCI database, as hwloc has it; may be empty
  std::uint16_t vendor = 0, device = 0;
  std::uint32_t place = 0;            ///< its node in Machine::tree
  std::optional<std::uint32_t> numa;  ///< nullopt: the machine does not say
};

struct Gpu : PciDevice {
  std::string name() const { return "gpu " + bus_id; }
};

struct Nic : PciDevice {
  std::string rdma;       ///< "mlx5_0", "rdmap16s27"; empty: none
  std::string interface;  ///< "eth0"; empty: none
  bool efa = false;       ///< AWS's: libfabric's provider efa, not verbs
  bool active = true;     ///< a port of its RDMA device is up, as far as hwloc knows
  const std::string& name() const { return rdma.empty() ? interface : rdma; }
};

/// The tree above the devices: what hwloc calls machine, package, NUMA domain, host bridge, bridge.
struct TreeNode {
  enum class Kind { kMachine, kHostBridge, kBridge, kDevice, kOther };
  Kind kind = Kind::kOther;
  std::string label;         ///< for users: "machine", "package 0", "PCIe bridge 0000:17:00.0"
  std::uint32_t parent = 0;  ///< its own index at the root
  std::vector<std::uint32_t> children;
};

struct Machine {
  std::string name;            ///< host name, as far as hwloc knows
  std::vector<Gpu> gpus;       ///< by bus id: the order in which CUDA numbers them
  std::vector<Nic> nics;       ///< by name, numbers in it by value
  std::vector<TreeNode> tree;  ///< 0: the root; only what leads to a GPU or a NIC
  std::map<std::uint32_t, std::uint32_t> numa_of_cpu;  ///< by the system's numbers
};

/// This machine; kUnavailable when hwloc can't read it.
Result<Machine> read_machine();
/// The machine that hwloc wrote into `xml_path`.
Result<Machine> read_machine(const std::string& xml_path);

/// How far two devices are from each other, nearest first.
enum class Reach : std::uint8_t {
  kSwitch,      ///< below one PCIe switch or root port: no CPU in between
  kHostBridge,  ///< below one host bridge: through a root complex
  kNuma,        ///< below different host bridges of one NUMA domain
  kMachine,     ///< across NUMA domains, or unknown
};
std::string_view reach_text(Reach reach);

/// The path between two places of the tree.
struct Distance {
  Reach reach = Reach::kMachine;
  std::uint32_t hops = 0;  ///< tree edges; 0 where no PCIe path is shared
  bool other_numa = false;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 takes the comparison's own 0 for a pointer
  friend auto operator<=>(const Distance&, const Distance&) = default;  ///< nearer is less
};
Distance distance(const Machine& machine, const PciDevice& a, const PciDevice& b);

}  // namespace mk::topology
