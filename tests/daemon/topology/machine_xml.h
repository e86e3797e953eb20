/// \file
/// Machines for tests, written in the XML that hwloc itself writes and reads (version 2.0):
/// packages of one NUMA domain each, and below them host bridges, PCIe bridges, GPUs and NICs.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mk::topology {

/// One object and what hangs below it.
struct Part {
  std::string open;  ///< the element's attributes; filled in by MachineXml
  std::string infos;
  std::vector<Part> below;
};

class MachineXml {
 public:
  explicit MachineXml(std::uint32_t packages) : packages_(packages) {}

  /// A root complex of `package` whose first bus is `bus`.
  Part host_bridge(std::uint32_t bus, std::vector<Part> below) {
    return {fmt::format("type=\"Bridge\" bridge_type=\"0-1\" depth=\"0\" "
                        "bridge_pci=\"0000:[{:02x}-{:02x}]\"",
                        bus, bus + 15),
            "", std::move(below)};
  }
  /// A bridge at `at`, before buses from `bus` on: a root port, or a port of a switch.
  Part bridge(std::uint32_t at, std::uint32_t bus, std::vector<Part> below) {
    return {fmt::format("type=\"Bridge\" bridge_type=\"1-1\" depth=\"1\" "
                        "bridge_pci=\"0000:[{:02x}-{:02x}]\" pci_busid=\"0000:{:02x}:01.0\" "
                        "pci_type=\"0604 [1000:c030] [0000:0000] b0\" pci_link_speed=\"63.0\"",
                        bus, bus + 3, at),
            "", std::move(below)};
  }
  Part gpu(std::uint32_t bus) {
    return device(bus, "0302 [10de:2335] [10de:18be] a1", "NVIDIA Corporation",
                  "GH100 [H200 SXM 141GB]", {});
  }
  /// A VGA adapter of a server's management controller: no GPU.
  Part display(std::uint32_t bus) {
    return device(bus, "0300 [1a03:2000] [0000:0000] 52", "ASPEED Technology, Inc.",
                  "ASPEED Graphics Family", {});
  }
  Part connectx(std::uint32_t bus, const std::string& rdma, bool active = true,
                const std::string& interface = "") {
    std::vector<Part> os{os_device(rdma, 3, active ? "4" : "1")};
    if (!interface.empty()) os.insert(os.begin(), os_device(interface, 2, ""));
    return device(bus, "0207 [15b3:1021] [15b3:0041] 00", "Mellanox Technologies",
                  "MT2910 Family [ConnectX-7]", std::move(os));
  }
  Part efa(std::uint32_t bus, const std::string& rdma) {
    return device(bus, "0200 [1d0f:efa2] [0000:0000] 00", "Amazon.com, Inc.",
                  "Elastic Fabric Adapter (EFA)", {os_device(rdma, 3, "4")});
  }
  Part ethernet(std::uint32_t bus, const std::string& interface) {
    return device(bus, "0200 [8086:15f3] [0000:0000] 03", "Intel Corporation",
                  "Ethernet Controller I225-V", {os_device(interface, 2, "")});
  }

  /// The whole file. `by_package[p]`: the host bridges of package p; of a machine that does not say
  /// which package they belong to, `at_root`.
  std::string text(const std::vector<std::vector<Part>>& by_package,
                   const std::vector<Part>& at_root = {}) {
    const std::uint32_t all = (1u << packages_) - 1;
    std::string out =
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM "
        "\"hwloc2.dtd\">\n<topology version=\"2.0\">\n";
    out += fmt::format(
        "<object type=\"Machine\" os_index=\"0\" cpuset=\"{0:#x}\" complete_cpuset=\"{0:#x}\" "
        "allowed_cpuset=\"{0:#x}\" nodeset=\"{0:#x}\" complete_nodeset=\"{0:#x}\" "
        "allowed_nodeset=\"{0:#x}\" gp_index=\"{1}\">\n<info name=\"HostName\" value=\"made\"/>\n",
        all, next_++);
    for (std::uint32_t p = 0; p < packages_; ++p) {
      const std::string sets = fmt::format(
          "cpuset=\"{0:#x}\" complete_cpuset=\"{0:#x}\" nodeset=\"{0:#x}\" "
          "complete_nodeset=\"{0:#x}\"",
          1u << p);
      out += fmt::format("<object type=\"Package\" os_index=\"{}\" {} gp_index=\"{}\">\n", p, sets,
                         next_++);
      out += fmt::format(
          "<object type=\"NUMANode\" os_index=\"{}\" {} gp_index=\"{}\" "
          "local_memory=\"1073741824\"/>\n",
          p, sets, next_++);
      out += fmt::format(
          "<object type=\"Core\" os_index=\"{0}\" {1} gp_index=\"{2}\"><object "
          "type=\"PU\" os_index=\"{0}\" {1} gp_index=\"{3}\"/></object>\n",
          p, sets, next_, next_ + 1);
      next_ += 2;
      if (p < by_package.size()) {
        for (const Part& part : by_package[p]) write(part, out);
      }
      out += "</object>\n";
    }
    for (const Part& part : at_root) write(part, out);
    return out + "</object>\n</topology>\n";
  }

 private:
  static Part device(std::uint32_t bus, const std::string& type, const std::string& vendor,
                     const std::string& model, std::vector<Part> os) {
    return {fmt::format("type=\"PCIDev\" name=\"{}\" pci_busid=\"0000:{:02x}:00.0\" "
                        "pci_type=\"{}\" pci_link_speed=\"63.0\"",
                        model, bus, type),
            fmt::format("<info name=\"PCIVendor\" value=\"{}\"/><info name=\"PCIDevice\" "
                        "value=\"{}\"/>\n",
                        vendor, model),
            std::move(os)};
  }
  static Part os_device(const std::string& name, int type, const std::string& port_state) {
    return {fmt::format("type=\"OSDev\" name=\"{}\" osdev_type=\"{}\"", name, type),
            port_state.empty()
                ? ""
                : fmt::format("<info name=\"Port1State\" value=\"{}\"/>\n", port_state),
            {}};
  }
  void write(const Part& part, std::string& out) {
    out += fmt::format("<object {} gp_index=\"{}\">\n{}", part.open, next_++, part.infos);
    for (const Part& child : part.below) write(child, out);
    out += "</object>\n";
  }

  const std::uint32_t packages_;
  std::uint32_t next_ = 1;
};

/// Two packages; below each four PCIe switches of one GPU and one ConnectX-7, as on a DGX H200,
/// whose two further ConnectX-7 (storage) hang from root ports of their own. `storage`: with those.
inline std::string dgx_h200(bool storage = true) {
  MachineXml xml(2);
  std::vector<std::vector<Part>> packages(2);
  for (std::uint32_t p = 0; p < 2; ++p) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t index = 4 * p + i;
      const std::uint32_t bus = 0x10 + 0x1c * index;
      packages[p].push_back(xml.host_bridge(
          bus, {xml.bridge(bus, bus + 1,
                           {xml.bridge(bus + 1, bus + 2,
                                       {xml.connectx(bus + 2, fmt::format("mlx5_{}", index))}),
                            xml.bridge(bus + 1, bus + 6, {xml.gpu(bus + 6)})})}));
    }
    if (storage) {
      packages[p].push_back(xml.host_bridge(
          0xf0 + 8 * p, {xml.bridge(0xf0 + 8 * p, 0xf1 + 8 * p,
                                    {xml.connectx(0xf1 + 8 * p, fmt::format("mlx5_{}", 10 + p),
                                                  true, fmt::format("storage{}", p))})}));
    }
  }
  return xml.text(packages);
}

/// As a p5en.48xlarge: two packages, below each four switches of one GPU and two EFA devices, and
/// one network interface for everything else.
inline std::string p5en() {
  MachineXml xml(2);
  std::vector<std::vector<Part>> packages(2);
  for (std::uint32_t p = 0; p < 2; ++p) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t index = 4 * p + i;
      const std::uint32_t bus = 0x10 + 0x1c * index;
      packages[p].push_back(xml.host_bridge(
          bus,
          {xml.bridge(
              bus, bus + 1,
              {xml.bridge(bus + 1, bus + 2, {xml.efa(bus + 2, fmt::format("rdmap{}s0", bus + 2))}),
               xml.bridge(bus + 1, bus + 6, {xml.efa(bus + 6, fmt::format("rdmap{}s0", bus + 6))}),
               xml.bridge(bus + 1, bus + 10, {xml.gpu(bus + 10)})})}));
    }
  }
  packages[0].push_back(
      xml.host_bridge(0xf8, {xml.bridge(0xf8, 0xf9, {xml.ethernet(0xf9, "ens32")})}));
  return xml.text(packages);
}

/// One ConnectX-7 and two GPUs below one host bridge, and a management controller's display.
inline std::string workstation() {
  MachineXml xml(1);
  return xml.text(
      {{xml.host_bridge(0, {xml.bridge(0, 1, {xml.gpu(1)}), xml.bridge(0, 5, {xml.gpu(5)}),
                            xml.bridge(0, 9, {xml.connectx(9, "mlx5_0", true, "enp9s0")}),
                            xml.bridge(0, 13, {xml.display(13)})})}});
}

}  // namespace mk::topology
