#include "tests/bench/mkbench/machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/plan/account.h"

namespace mk::bench {
namespace {

constexpr const char* kGpuFolder = "/proc/driver/nvidia/gpus";

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
          {"gpu", describe_gpus(kGpuFolder)}};
}

std::string describe_gpus(const std::filesystem::path& folder) {
  constexpr std::string_view kModel = "Model:";
  std::map<std::string, int> models;
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator(folder, none)) {
    std::ifstream file(gpu.path() / "information");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with(kModel)) continue;
      const std::size_t begin = line.find_first_not_of(" \t", kModel.size());
      if (begin != std::string::npos) ++models[line.substr(begin)];
    }
  }
  std::string text;
  for (const auto& [model, count] : models)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " x " + model;
  return text.empty() ? "none" : text;
}

kernels::plan::Machine planned_machine(const std::string& executor) {
  if (executor != "cuda") return kernels::plan::cpu_here();
  constexpr std::uint32_t kSms = 132;
  return kernels::plan::machine_for_gpu(describe_gpus(kGpuFolder), kSms).machine;
}

double copy_bytes_per_second() {
  constexpr std::size_t kBytes = std::size_t{32} << 20;  // well beyond a core's caches
  constexpr int kCopies = 4;
  const auto cores = static_cast<std::size_t>(std::max(1, usable_cores()));
  std::vector<std::vector<char>> from(cores, std::vector<char>(kBytes, 1));
  std::vector<std::vector<char>> to(cores, std::vector<char>(kBytes, 2));
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (std::size_t core = 0; core < cores; ++core) {
    threads.emplace_back([&, core] {
      for (int copy = 0; copy < kCopies; ++copy) {
        from[core][0] = static_cast<char>(copy);  // every copy has something new to bring
        std::memcpy(to[core].data(), from[core].data(), kBytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return static_cast<double>(kBytes * kCopies * cores) / elapsed.count();
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
