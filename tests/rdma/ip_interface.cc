// That of the virtual machine of run_vm.sh, under the kernel's software NIC.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "tests/rdma/interface.h"

namespace mk::fabric::interface {
namespace {

std::string name() {
  const char* const named = std::getenv("MK_RDMA_VM_INTERFACE");
  return named == nullptr ? "" : named;
}
void run(const std::string& command) {
  ASSERT_EQ(0, std::system(("ip " + command).c_str())) << command;
}

}  // namespace

std::optional<std::string> untouchable() {
  if (!name().empty()) return std::nullopt;
  return "not in the virtual machine of tests/rdma/run_vm.sh";
}
void set_up(bool up) { run("link set " + name() + (up ? " up" : " down")); }
void reset_addresses() {
  run("addr flush dev " + name());
  run("addr replace 10.77.0.1/24 dev " + name());
}
void remove_first_address() { run("addr del 10.77.0.1/24 dev " + name()); }
void add_second_address() { run("addr add 10.78.0.1/24 dev " + name()); }

int second_address_gid() {
  const std::string port = "/sys/class/infiniband/rxe0/ports/1/";
  for (int i = 0; i < 16; ++i) {
    std::string gid, type;
    std::getline(std::ifstream(port + "gids/" + std::to_string(i)) >> std::ws, gid);
    std::getline(std::ifstream(port + "gid_attrs/types/" + std::to_string(i)) >> std::ws, type);
    if (gid.ends_with("ffff:0a4e:0001") && type == "RoCE v2") return i;
  }
  return -1;
}

}  // namespace mk::fabric::interface
