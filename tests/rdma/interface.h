/// \file
/// The network interface under the RDMA port that these tests run over, which they take down.
#pragma once

#include <optional>
#include <string>

namespace mk::fabric::interface {

/// Why it may not be touched here; nullopt: it may.
std::optional<std::string> untouchable();
void set_up(bool up);
/// Its addresses: 10.77.0.1 alone.
void reset_addresses();
void remove_first_address();
/// 10.78.0.1; returns its place in the GID table as RoCE v2 once it is there, -1 while it is not.
void add_second_address();
int second_address_gid();

}  // namespace mk::fabric::interface
