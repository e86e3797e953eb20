/// \file
/// Which NICs serve which rail. Rail r is the r-th GPU in PCI order, on every node: local rank r
/// uses GPU r. So rails are aligned across nodes that are built alike. Pure.
#pragma once

#include <string>
#include <vector>

#include "daemon/topology/machine.h"

namespace mk::topology {

/// Which of a machine's NICs a fabric can use.
enum class NicKind {
  kVerbs,      ///< InfiniBand, RoCE
  kEfa,        ///< AWS's SRD
  kInterface,  ///< anything with a network interface
};
bool usable(const Nic& nic, NicKind kind);

struct RailChoice {
  std::vector<std::uint32_t>
      nics;         ///< into Machine::nics; several: its links are striped over them
  std::string why;  ///< a clause for the log
  std::optional<std::uint32_t> gpu;  ///< into Machine::gpus
};

/// The NICs of each of `rails` rails; 0: as many as there are GPUs (at least one, at most
/// a daemon's 16).
///
/// A GPU takes the NICs nearest to it: by PCIe path, NUMA domain as the tie-break. GPUs that have
/// the same nearest NICs share them out: with n NICs for k GPUs each gets n/k in their order, and
/// where n < k, GPU i gets NIC i mod n. Without a GPU, rail r gets the r-th usable NIC in turn.
///
/// `by_name` (entry r, in turn) decides where it is not empty: "mlx5_0", or "mlx5_0+mlx5_1".
/// kNotFound names what there is; kUnavailable: no NIC of this kind has a port that is up, yet.
Result<std::vector<RailChoice>> choose_nics(const Machine& machine, NicKind kind,
                                            std::uint32_t rails,
                                            const std::vector<std::string>& by_name);

/// "mlx5_0+mlx5_1"
std::string nic_names(const Machine& machine, const RailChoice& choice);

}  // namespace mk::topology
