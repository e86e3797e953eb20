/// \file
/// Which port, which entry of its GID table, which partition and which MTU. These are rules without
/// I/O. Each answers with what it chose and the reason, since a wrong GID is the most common
/// trouble there is with RoCE.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <span>
#include <string>

#include "shm/host/result.h"

namespace mk::fabric::verbs {

/// One port of one device of this machine, or a device of which nothing is known but its trouble.
struct PortEntry {
  std::string device;
  std::uint8_t port = 1;  ///< 0: the device as a whole
  ibv_port_state state = IBV_PORT_DOWN;
  std::uint8_t link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  bool iwarp = false;      ///< connects only through librdmacm: not usable here
  std::uint64_t guid = 0;  ///< the device's; 0: it has none
  std::string trouble{};   ///< why it cannot be looked at: "cannot be opened: ..."; empty: it can

  std::string name() const { return port == 0 ? device : fmt::format("{}:{}", device, port); }
};

struct Choice {
  std::size_t index = 0;  ///< into what was chosen from
  std::string why;        ///< a clause for the log
};

/// The port of `rail`. `wanted` ("device" or "device:port") decides when it is not empty: that port
/// of that device, or its first active one. Otherwise the active InfiniBand and RoCE ports, ordered
/// by device name (numbers in it by value) and port, are dealt out to the rails in turn.
Result<Choice> choose_port(std::span<const PortEntry> ports, const std::string& wanted,
                           std::uint32_t rail);

/// What `known` is called among `ports`: names may be given anew when a device comes back, its GUID
/// stays. Its own name where no port has its GUID.
std::string present_name(std::span<const PortEntry> ports, const PortEntry& known);

/// The entry of the port's GID table that this endpoint speaks from; `Choice::index` is a position
/// in `table`, whose entries carry their own index. `wanted` >= 0 decides.
///
/// Otherwise: on InfiniBand the first entry (the port's own). On Ethernet it is a RoCE v2 entry:
/// first one that maps an IPv4 address, then one with a routable IPv6 address, then a link-local
/// one; of equals the lowest index. RoCE v1 is never chosen, since it does not cross routers.
Result<Choice> choose_gid(std::span<const ibv_gid_entry> table, std::int32_t wanted,
                          const std::string& port);

/// The index of partition `wanted` in the port's table (full membership before limited); 0: the
/// first entry.
Result<std::uint16_t> choose_pkey(std::span<const std::uint16_t> table, std::uint32_t wanted,
                                  const std::string& port);

/// The port's MTU, or `wanted_bytes` when that is not 0 and not more.
Result<ibv_mtu> choose_mtu(ibv_mtu active, std::uint32_t wanted_bytes, const std::string& port);

std::uint32_t mtu_bytes(ibv_mtu mtu);
bool link_local(const ibv_gid& gid);
/// The GID as people know it: "10.0.0.1" for a mapped IPv4 address, else IPv6 notation.
std::string gid_text(const ibv_gid& gid);
std::string_view gid_type_text(std::uint32_t type);

}  // namespace mk::fabric::verbs
