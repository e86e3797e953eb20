#include "tests/bench/mkbench/machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <ctime>
#include <fstream>
#include <string>

namespace mk::bench {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

int usable_cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : -1;
}

}  // namespace

nlohmann::json describe_machine() {
  utsname system{};
  ::uname(&system);
  const auto memory =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  return {{"cpu", cpu_model()},
          {"cores", usable_cores()},
          {"memory_gib", memory / (1 << 30)},
          {"kernel", std::string(system.sysname) + " " + system.release},
          {"compiler", __VERSION__},
          {"build_type", MK_BUILD_TYPE},
          {"gpu", "none used"}};
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace mk::bench
