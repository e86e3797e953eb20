/// \file
/// Which network a daemon uses when its configuration leaves that open (`fabric.name = "auto"`):
/// what this machine has, and the rule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mk::fabric {

/// What matters of a machine to the choice.
struct Inventory {
  bool verbs_built = false;
  std::vector<std::string> rdma_ports;  ///< InfiniBand and RoCE, active: "mlx5_0:1"
  std::uint32_t ofi_version = 0;        ///< FI_VERSION; 0: libfabric is not in this build
  std::vector<std::string> providers;   ///< that can do what the ofi fabric needs, best first
  /// RDMA devices that cannot be looked at, and why: "mlx5_0 cannot be opened: ..."
  std::vector<std::string> closed_devices{};
};
/// This machine's.
Inventory read_inventory();

struct FabricChoice {
  std::string fabric;     ///< "loopback", "verbs", "ofi"
  std::string provider;   ///< ofi
  std::string why;        ///< a sentence for the log
  std::string trouble{};  ///< a sentence to warn of, as it may have decided; empty: nothing
};

/// Verbs where an InfiniBand or RoCE port is active; else EFA where libfabric drives one; else
/// libfabric's best provider for any network. All nodes of a cluster must come to the same answer:
/// the daemons compare, and refuse each other when they did not.
FabricChoice choose_fabric(const Inventory& inventory);

}  // namespace mk::fabric
