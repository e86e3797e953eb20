/// \file
/// The settings of the verbs fabric, as the configuration gives them and an endpoint takes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mk::fabric {

/// daemon/fabric/verbs/README.md says how each is used; deploy/mkerneld.toml.example, what it
/// means.
struct VerbsOptions {
  /// By rail: "mlx5_0" or "mlx5_0:1" (device and port). Empty: by rule.
  std::vector<std::string> devices;
  std::int32_t gid_index = -1;      ///< -1: by rule
  std::uint32_t pkey = 0;           ///< the partition's key; 0: the table's first entry
  std::uint32_t mtu_bytes = 0;      ///< 256, 512, 1024, 2048 or 4096; 0: the port's
  std::uint32_t queues = 1;         ///< queue pairs per link, 1 to 8
  std::uint32_t timeout = 14;       ///< 0 to 31: an acknowledgement is late after 4.096 µs * 2^it
  std::uint32_t retries = 7;        ///< 0 to 7, of what is not acknowledged
  std::uint32_t rnr_retries = 7;    ///< 0 to 7, while the peer has no receive posted; 7: for ever
  std::uint32_t service_level = 0;  ///< 0 to 15
  std::uint32_t traffic_class = 0;  ///< 0 to 255: DSCP and ECN on RoCE
  bool relaxed_ordering = true;     ///< of data memory, where the device has it
  bool gpu_direct = true;           ///< the NIC itself reaches GPU memory, where it can
  std::string arrival = "flag";     ///< "flag" (ordered contract) or "immediate" (unordered)
  /// Larger memory is registered in pieces: behind an IOMMU, registrations above 2 GiB fail. Not in
  /// the configuration; tests make it small.
  std::uint64_t registration_bytes_max = std::uint64_t{1} << 31;
  std::string submission = "auto";  ///< "extended" (ibv_wr_*), "classic" (ibv_post_send), "auto"
};

inline constexpr std::uint32_t kVerbsQueuesMax = 8;

}  // namespace mk::fabric
