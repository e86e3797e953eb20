#include <cctype>
#include <charconv>
#include <fstream>
#include <sstream>

#include "daemon/doctor/probe.h"

namespace mk::doctor {
namespace {

std::string line_of(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// "0-3,8" as numbers.
std::vector<std::uint32_t> cpu_list(const std::string& text) {
  std::vector<std::uint32_t> cpus;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    std::uint32_t first = 0;
    const char* const end = part.data() + part.size();
    const auto [after, error] = std::from_chars(part.data(), end, first);
    if (error != std::errc()) continue;
    std::uint32_t last = first;
    if (after != end && *after == '-') std::from_chars(after + 1, end, last);
    for (std::uint32_t cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

void read_huge_pages(Facts& facts) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t value = 0;
    words >> name >> value;
    if (name == "HugePages_Total:") facts.huge_pages = value;
    if (name == "HugePages_Free:") facts.huge_pages_free = value;
    if (name == "Hugepagesize:") facts.huge_page_bytes = value * 1024;
  }
  // "always [madvise] never"
  const std::string choice = line_of("/sys/kernel/mm/transparent_hugepage/enabled");
  const std::size_t open = choice.find('[');
  const std::size_t close = choice.find(']');
  if (open != std::string::npos && close != std::string::npos && close > open)
    facts.transparent_huge_pages = choice.substr(open + 1, close - open - 1);
}

}  // namespace

void probe_host(Facts& facts) {
  read_huge_pages(facts);
  facts.cpus = cpu_list(line_of("/sys/devices/system/cpu/online"));
  facts.isolated_cpus = cpu_list(line_of("/sys/devices/system/cpu/isolated"));
}

}  // namespace mk::doctor
