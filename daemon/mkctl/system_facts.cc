#include "daemon/mkctl/system_facts.h"

#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>

#include "daemon/config/secrets.h"

namespace mk::mkctl {
namespace {

constexpr std::size_t kFactBytesMax = 8 << 20;

struct CommandOf {
  const char* file;
  const char* command;
};

constexpr CommandOf kCommands[] = {
    {"system/uname.txt", "uname -a"},
    {"system/cpus.txt", "lscpu"},
    {"system/memory.txt", "cat /proc/meminfo"},
    {"system/release.txt", "cat /etc/os-release"},
    {"system/limits.txt", "ulimit -a"},
    {"system/load.txt", "cat /proc/loadavg /proc/uptime"},
    {"system/numa.txt", "cat /sys/devices/system/node/node*/cpulist"},
    {"system/interfaces.txt", "ip -s link || cat /proc/net/dev"},
    {"system/rdma.txt",
     "ls -l /sys/class/infiniband && grep -r . /sys/class/infiniband/*/ports/*/state "
     "/sys/class/infiniband/*/ports/*/rate /sys/class/infiniband/*/fw_ver"},
    {"system/rdma_counters.txt",
     "grep -r . /sys/class/infiniband/*/ports/*/counters "
     "/sys/class/infiniband/*/ports/*/hw_counters"},
    {"system/nvidia.txt", "cat /proc/driver/nvidia/version"},
    {"system/modules.txt", "cat /proc/modules"},
    {"system/unit.txt", "systemctl status --no-pager --full mkerneld.service mkerneld.socket"},
    {"system/unit_settings.txt", "systemctl show --no-pager mkerneld.service"},
};

}  // namespace

Fact command_fact(const std::string& file, const std::string& command) {
  Fact fact{file, "", command, true};
  // `timeout` runs a program, so the shell's own words go through another shell.
  const std::string line = "timeout 10 sh -c '" + command + "' 2>&1";
  FILE* pipe = ::popen(line.c_str(), "re");
  if (pipe == nullptr) return {file, "cannot be run\n", command, false};
  char bytes[4096];
  for (std::size_t count; (count = std::fread(bytes, 1, sizeof bytes, pipe)) > 0;) {
    if (fact.text.size() < kFactBytesMax) fact.text.append(bytes, count);
  }
  const int status = ::pclose(pipe);
  fact.good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  fact.text = daemon::without_secrets(fact.text);
  return fact;
}

std::vector<Fact> system_facts() {
  std::vector<Fact> facts;
  for (const CommandOf& one : kCommands) facts.push_back(command_fact(one.file, one.command));
  return facts;
}

Fact daemon_log() {
  return command_fact("log/mkerneld.txt",
                      "journalctl --unit mkerneld --lines 5000 --no-pager --output short-iso");
}

}  // namespace mk::mkctl
