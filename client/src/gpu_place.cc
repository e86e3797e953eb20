#include "client/src/gpu_place.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <vector>

#include "shm/host/text.h"

namespace mk::client {
namespace {

namespace fs = std::filesystem;

// "00000000:1B:00.0" and "0000:1B:00.0" are one address; empty: none.
std::string pci_address(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
  if (text.size() == 16 && text.starts_with("0000")) text.erase(0, 4);
  return shm::is_pci_address(text) ? text : std::string();
}

// Of the context that is current on this thread. It only looks at a driver that is loaded and
// started.
std::string current_gpu() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) return {};
  using GetDevice = int (*)(int*);
  using GetBusId = int (*)(char*, int, int);
  const auto get_device = reinterpret_cast<GetDevice>(::dlsym(library, "cuCtxGetDevice"));
  const auto get_bus_id = reinterpret_cast<GetBusId>(::dlsym(library, "cuDeviceGetPCIBusId"));
  int device = 0;
  char text[32] = {};
  const bool found = get_device != nullptr && get_bus_id != nullptr && get_device(&device) == 0 &&
                     get_bus_id(text, sizeof(text) - 1, device) == 0;
  ::dlclose(library);
  return found ? pci_address(text) : std::string();
}

// The driver's name for a GPU, "GPU-1b2c...".
std::string uuid_of(const fs::path& gpu) {
  std::ifstream file(gpu / "information");
  constexpr std::string_view kField = "GPU UUID:";
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kField)) continue;
    line.erase(0, kField.size());
    line.erase(0, line.find_first_not_of(" \t"));
    return line;
  }
  return {};
}

struct Gpus {
  std::vector<std::string> addresses;  // in order
  std::map<std::string, std::string> addresses_by_uuid;
};
Gpus gpus_in(const std::string& folder) {
  Gpus found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    const std::string address = pci_address(entry.path().filename().string());
    if (address.empty()) continue;
    found.addresses.push_back(address);
    if (const std::string uuid = uuid_of(entry.path()); !uuid.empty())
      found.addresses_by_uuid[uuid] = address;
  }
  std::ranges::sort(found.addresses);
  return found;
}

}  // namespace

std::string gpu_by_number(const char* visible, std::uint32_t local_rank,
                          const std::string& folder) {
  const Gpus gpus = gpus_in(folder);
  std::vector<std::string> seen;
  if (visible == nullptr) {
    seen = gpus.addresses;
  } else {
    for (std::string_view left = visible; !left.empty();) {
      const std::string_view entry = left.substr(0, left.find(','));
      left.remove_prefix(std::min(left.size(), entry.size() + 1));
      std::size_t number = 0;
      const auto [end, error] = std::from_chars(entry.begin(), entry.end(), number);
      if (error == std::errc() && end == entry.end()) {
        if (number >= gpus.addresses.size()) break;  // CUDA, too, sees those before it only
        seen.push_back(gpus.addresses[number]);
        continue;
      }
      // CUDA takes the first letters of a name, too, when they are one GPU's alone.
      const auto first = gpus.addresses_by_uuid.lower_bound(std::string(entry));
      if (first == gpus.addresses_by_uuid.end() || !first->first.starts_with(entry)) return {};
      const auto next = std::next(first);
      if (next != gpus.addresses_by_uuid.end() && next->first.starts_with(entry)) return {};
      seen.push_back(first->second);
    }
  }
  if (seen.size() == 1) return seen[0];
  return local_rank < seen.size() ? seen[local_rank] : std::string();
}

std::string own_gpu(std::uint32_t local_rank) {
  if (std::string gpu = current_gpu(); !gpu.empty()) return gpu;
  return gpu_by_number(std::getenv("CUDA_VISIBLE_DEVICES"), local_rank, "/proc/driver/nvidia/gpus");
}

}  // namespace mk::client
