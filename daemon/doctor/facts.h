/// \file
/// What the checks judge: everything about a machine that mkernel's well-being depends on, as plain
/// data, so that a test can be any machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/config/client_limits.h"
#include "daemon/topology/spin.h"

namespace mk::doctor {

/// One port of one RDMA device.
struct PortFacts {
  std::string name;   ///< "mlx5_0:1"
  std::string state;  ///< "active", "down", ...
  bool active = false;
  std::string layer;  ///< "Ethernet", "InfiniBand"
  std::uint32_t mtu_bytes = 0, mtu_bytes_max = 0;
  std::string gid;      ///< the chosen entry, "index 3 = 10.0.0.1 (RoCE v2)"
  std::string gid_why;  ///< and by which rule, with the table
  bool gid_link_local = false;
  std::string gid_trouble;      ///< why none could be chosen
  std::string page_trouble;     ///< why a page of host memory was not registered; empty: it was
  std::string dmabuf_trouble;   ///< why a page of GPU memory was not registered by dmabuf
  std::string peermem_trouble;  ///< or by the peer-memory module; both empty without a GPU
};

struct ProviderFacts {
  std::string name;  ///< "tcp;ofi_rxm"
  std::string version;
};

/// How near a rail's NIC is to its GPU.
struct RailFacts {
  std::string gpu;  ///< empty: a machine without
  std::string nics;
  std::string why;
  bool near = false;  ///< no path between CPU sockets or root complexes
};

struct PeerFacts {
  std::optional<std::uint32_t> id;  ///< nothing: it has not said which node it is
  std::string address;
  std::string trouble;  ///< empty: somebody accepts connections there
  /// With TLS, and where somebody does: what either side has against the other's certificate.
  std::string tls_trouble{};
};

/// The certificates of this node.
struct TlsFacts {
  bool configured = false;
  std::vector<std::string> faults;      ///< sentences: what is wrong and what to do
  std::optional<std::int64_t> expires;  ///< Unix seconds
  std::vector<std::string> names;       ///< that the certificate is made out to
  std::string name_doubt{};             ///< a sentence: perhaps not to what others call this node
};

struct Facts {
  // -- configuration --
  std::string fabric = "loopback";
  std::string fabric_why;  ///< where the configuration leaves it open; empty: it names one
  std::string provider = "tcp";
  std::vector<std::int64_t> proxy_cpus;
  topology::Spin spin;  ///< of the daemon that runs, else as this process would have it
  std::uint64_t sleep_max_ns = 0;

  // -- host --
  struct Memlock {
    std::uint64_t bytes = UINT64_MAX;  ///< UINT64_MAX: unlimited
    std::uint32_t daemon = 0;          ///< the process whose limit it is; 0: this one
    std::string trouble;               ///< a daemon runs, and why its limit is not known
  };
  Memlock memlock;
  daemon::MachineLimits machine;  ///< of the daemon that runs, else of this process
  daemon::ClientLimits clients;
  std::uint64_t huge_pages = 0, huge_pages_free = 0, huge_page_bytes = 0;
  std::string transparent_huge_pages;              ///< "always", "madvise", "never"; empty: unknown
  std::vector<std::uint32_t> cpus, isolated_cpus;  ///< online; kept free by the kernel (isolcpus)

  // -- networks --
  bool verbs_built = false;
  std::string verbs_trouble;  ///< why the devices, or some of them, could not be looked at
  std::vector<PortFacts> ports;
  std::string gpu;                       ///< the GPU whose memory was tried; empty: none
  std::string ofi_version;               ///< empty: not in this build
  std::uint32_t ofi_version_number = 0;  ///< FI_VERSION
  std::vector<ProviderFacts> providers;  ///< that can do what the ofi fabric needs
  std::string topology_trouble;
  std::vector<RailFacts> rails;
  std::string idle_nics;  ///< a sentence about those that too few rails leave idle; empty: none

  // -- the daemon and its peers --
  std::string version;  ///< of this program
  std::uint16_t abi_major = 0, abi_minor = 0;
  struct Daemon {
    std::string socket;
    std::string trouble;  ///< it does not answer
    std::string version;
    std::uint16_t abi_major = 0, abi_minor = 0;
  };
  Daemon daemon;
  std::string discovery = "static";  ///< how the other nodes are found
  std::string discovery_trouble;     ///< why the other nodes could not be looked up
  std::vector<PeerFacts> peers;
  TlsFacts tls;
  std::int64_t now = 0;  ///< Unix seconds
  struct LoopbackWrite {
    std::string trouble;   ///< empty: bytes and flag arrived
    std::string endpoint;  ///< what was written over
    double microseconds = 0;
  };
  LoopbackWrite write;
};

}  // namespace mk::doctor
