#include "daemon/config/gpu_section.h"

#include <algorithm>
#include <utility>

#include "daemon/config/config.h"
#include "shm/host/text.h"

namespace mk::daemon {
namespace {

/// As nvidia-smi writes it, too: "00000000:1B:00.0".
Status accept_pci_address(std::string_view text, std::string& into) {
  std::string address(text);
  std::ranges::transform(address, address.begin(), [](char c) {
    return c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  if (address.starts_with("0000") && shm::is_pci_address(address.substr(4)))
    address = address.substr(4);
  if (!shm::is_pci_address(address)) {
    return fail(ErrorCode::kInvalidArgument,
                "a PCI address is expected, such as 0000:1b:00.0 (mkctl topology shows them)");
  }
  into = std::move(address);
  return {};
}

}  // namespace

void read_gpus(Section& root, std::map<std::string, std::uint32_t>& into) {
  root.each("gpu", [&](Section& section) {
    std::string address;
    std::uint32_t rail = 0;
    section.require("address");
    section.require("rail");
    section.string("address",
                   [&](std::string_view text) { return accept_pci_address(text, address); });
    section.integer("rail", 0, kRailsMax - 1, rail);
    section.finish();
    if (!into.emplace(address, rail).second)
      section.refuse_table(fmt::format("GPU {} is given two rails", address));
  });
}

}  // namespace mk::daemon
