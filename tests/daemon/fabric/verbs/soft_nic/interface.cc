// tests/rdma/interface.h over the software NIC soft0.
#include "tests/rdma/interface.h"

#include "tests/daemon/fabric/verbs/soft_nic/soft_nic.h"

namespace mk::fabric::interface {
namespace {

constexpr std::uint32_t kFirst = 0x0a4d0001;   // 10.77.0.1
constexpr std::uint32_t kSecond = 0x0a4e0001;  // 10.78.0.1

}  // namespace

std::optional<std::string> untouchable() { return std::nullopt; }
void set_up(bool up) { soft_nic::set_port("soft0", up); }
void reset_addresses() {
  soft_nic::set_ip("soft0", 0, kFirst);
  soft_nic::set_ip("soft0", 1, 0);
}
void remove_first_address() { soft_nic::set_ip("soft0", 0, 0); }
void add_second_address() { soft_nic::set_ip("soft0", 1, kSecond); }
int second_address_gid() { return 5; }

}  // namespace mk::fabric::interface
