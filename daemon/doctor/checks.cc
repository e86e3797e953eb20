#include "daemon/doctor/checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "daemon/config/units.h"
#include "daemon/fabric/ofi/survey.h"
#include "daemon/proxy/idle_backoff.h"
#include "daemon/tls/certificates.h"

namespace mk::doctor {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
constexpr std::uint64_t kDescriptorsWanted = 4096;
/// A certificate that ends sooner is worth a warning: two weeks, as the alert rule has it.
constexpr std::int64_t kRenewalSeconds = 14 * 86'400;

bool wants_verbs(const Facts& facts) { return facts.fabric == "verbs"; }
bool wants_efa(const Facts& facts) {
  return facts.fabric == "ofi" && facts.provider.starts_with("efa");
}

/// `failing` where the configuration needs it, else `otherwise`.
Outcome needed(bool is_needed, Outcome otherwise = Outcome::kSkip) {
  return is_needed ? Outcome::kFail : otherwise;
}

std::string memlock_text(std::uint64_t bytes) {
  return bytes == UINT64_MAX ? "unlimited" : fmt::format("{} KiB", bytes / 1024);
}

Finding memlock(const Facts& facts) {
  const Facts::Memlock& limit = facts.memlock;
  const std::string whose =
      limit.daemon != 0        ? fmt::format("of the running daemon, process {}", limit.daemon)
      : !limit.trouble.empty() ? "of this process, not of the running daemon: " + limit.trouble
                               : "of this process; no daemon runs";
  Finding finding{"limits.memlock",
                  Outcome::kPass,
                  fmt::format("locked memory: {} ({})", memlock_text(limit.bytes), whose),
                  {}};
  if (limit.bytes == UINT64_MAX) return finding;
  finding.fix = limit.daemon != 0
                    ? "set LimitMEMLOCK=infinity in the service's unit, and restart mkerneld"
                    : "set LimitMEMLOCK=infinity in the service's unit, or `ulimit -l unlimited`";
  if (!wants_verbs(facts) && !wants_efa(facts)) {
    finding.outcome = Outcome::kSkip;
    finding.evidence += fmt::format("; fabric {} locks none", facts.fabric);
    finding.fix.clear();
  } else if (!limit.trouble.empty()) {
    finding.outcome = Outcome::kWarn;
    finding.fix = "run this as root or as the daemon's user, who may ask the daemon";
  } else if (limit.bytes < kGiB) {
    finding.outcome = Outcome::kFail;
    finding.evidence += "; a NIC's memory is locked, and sessions register gigabytes";
  } else {
    finding.outcome = Outcome::kWarn;
    finding.evidence += "; sessions that register more are refused";
  }
  return finding;
}

Finding clients(const Facts& facts) {
  Finding finding{"limits.clients", Outcome::kPass, describe(facts.clients, facts.machine), {}};
  if (facts.machine.descriptors < kDescriptorsWanted) {
    finding.outcome = Outcome::kWarn;
    finding.fix =
        "set LimitNOFILE=65536 in the service's unit, or `ulimit -n`, and restart mkerneld";
  }
  const std::uint64_t memory = facts.clients.all.memory_bytes;
  if (memory == 0 || memory > facts.machine.memory_bytes) {
    finding.outcome = Outcome::kWarn;
    finding.fix =
        "lower limits.all_registered: what clients register is locked, and beyond the memory there "
        "is the kernel ends the daemon";
  }
  return finding;
}

Finding fabric_choice(const Facts& facts) {
  Finding finding{"fabric.choice", Outcome::kPass, facts.fabric_why, {}};
  if (facts.fabric_why.empty()) {
    finding.evidence = fmt::format("fabric {}, as configured", facts.fabric);
  } else if (facts.fabric == "ofi" && !facts.provider.starts_with("efa")) {
    finding.outcome = Outcome::kWarn;
    finding.fix =
        "where there is an RDMA NIC, see verbs.ports or ofi.version; else name the fabric "
        "(fabric.name = \"ofi\"), and this stays quiet";
  }
  return finding;
}

Finding devices(const Facts& facts) {
  Finding finding{"verbs.devices", Outcome::kPass, {}, {}};
  if (!facts.verbs_built) {
    finding.outcome = needed(wants_verbs(facts));
    finding.evidence = "this build has no verbs fabric";
    finding.fix = "install libibverbs-dev and build with MK_VERBS=ON";
    return finding;
  }
  std::vector<std::string> names;
  for (const PortFacts& port : facts.ports) names.push_back(port.name);
  if (!facts.verbs_trouble.empty()) names.push_back(facts.verbs_trouble);
  finding.evidence =
      names.empty()
          ? "this machine has no RDMA device"
          : fmt::format("{}{}", facts.ports.empty() ? "" : "ports: ", fmt::join(names, ", "));
  if (facts.ports.empty() || !facts.verbs_trouble.empty()) {
    finding.outcome =
        needed(wants_verbs(facts), facts.ports.empty() ? Outcome::kSkip : Outcome::kWarn);
    finding.fix =
        facts.verbs_trouble.empty()
            ? "load the NIC's driver (mlx5_ib) and ib_uverbs, and install ibverbs-providers"
            : "see the mode of /dev/infiniband/uverbs*, and DeviceAllow= of the unit";
  }
  return finding;
}

/// A finding about every active port: `judge` gives each an outcome and a text; the worst counts.
template <class Judge>
Finding about_ports(std::string_view id, const Facts& facts, std::string fix, const Judge& judge) {
  Finding finding{id, Outcome::kSkip, {}, {}};
  for (const PortFacts& port : facts.ports) {
    if (!port.active) continue;
    const auto [outcome, text] = judge(port);
    if (finding.outcome == Outcome::kSkip || outcome == Outcome::kFail ||
        (outcome == Outcome::kWarn && finding.outcome == Outcome::kPass))
      finding.outcome = outcome;
    finding.evidence +=
        fmt::format("{}{}: {}", finding.evidence.empty() ? "" : "; ", port.name, text);
  }
  if (finding.outcome == Outcome::kSkip) finding.evidence = "no RDMA port is active";
  if (finding.outcome == Outcome::kWarn || finding.outcome == Outcome::kFail)
    finding.fix = std::move(fix);
  return finding;
}

Finding ports(const Facts& facts) {
  Finding finding{"verbs.ports", Outcome::kPass, {}, {}};
  if (facts.ports.empty()) return {"verbs.ports", Outcome::kSkip, "there is no RDMA port", {}};
  bool any = false;
  bool all = true;
  for (const PortFacts& port : facts.ports) {
    any = any || port.active;
    all = all && port.active;
    finding.evidence += fmt::format("{}{} is {} ({})", finding.evidence.empty() ? "" : ", ",
                                    port.name, port.state, port.layer);
  }
  if (!all) {
    finding.outcome = any ? Outcome::kWarn : needed(wants_verbs(facts), Outcome::kWarn);
    finding.fix =
        "bring the interface up (`ip link set DEV up`), check the cable and, on "
        "InfiniBand, the subnet manager";
  }
  return finding;
}

Finding gids(const Facts& facts) {
  return about_ports("verbs.gid", facts,
                     "give the port's interface an IPv4 address, or name an entry with "
                     "fabric.verbs.gid_index",
                     [&](const PortFacts& port) {
                       if (!port.gid_trouble.empty())
                         return std::pair(needed(wants_verbs(facts), Outcome::kWarn),
                                          port.gid_trouble);
                       return std::pair(port.gid_link_local ? Outcome::kWarn : Outcome::kPass,
                                        fmt::format("{}, {}", port.gid, port.gid_why));
                     });
}

Finding mtus(const Facts& facts) {
  return about_ports(
      "verbs.mtu", facts,
      "raise the interface's MTU (RoCE at 4096 bytes wants 4200 or more, e.g. 9000) "
      "on the NICs and on the switches between them",
      [](const PortFacts& port) {
        return std::pair(
            port.mtu_bytes < port.mtu_bytes_max ? Outcome::kWarn : Outcome::kPass,
            fmt::format("{} bytes of {} possible", port.mtu_bytes, port.mtu_bytes_max));
      });
}

Finding registration(const Facts& facts) {
  return about_ports("verbs.register", facts,
                     "see limits.memlock, and that the service may open /dev/infiniband/uverbs*",
                     [&](const PortFacts& port) {
                       return port.page_trouble.empty()
                                  ? std::pair(Outcome::kPass, std::string("a page was registered"))
                                  : std::pair(needed(wants_verbs(facts), Outcome::kWarn),
                                              port.page_trouble);
                     });
}

Finding gpu_memory(const Facts& facts) {
  if (facts.gpu.empty()) return {"gpu.memory", Outcome::kSkip, "no GPU, or no CUDA driver", {}};
  return about_ports(
      "gpu.memory", facts,
      "use the open GPU kernel modules (dmabuf) with Linux 5.12 or later, or load nvidia-peermem; "
      "without either, payload is staged through host memory",
      [](const PortFacts& port) {
        if (port.dmabuf_trouble.empty())
          return std::pair(Outcome::kPass, std::string("GPU memory was registered by dmabuf"));
        if (port.peermem_trouble.empty())
          return std::pair(Outcome::kPass,
                           std::string("GPU memory was registered by the peer-memory module"));
        return std::pair(Outcome::kWarn,
                         fmt::format("neither by dmabuf ({}) nor by peer memory ({})",
                                     port.dmabuf_trouble, port.peermem_trouble));
      });
}

Finding ofi_version(const Facts& facts) {
  Finding finding{"ofi.version", Outcome::kPass, "libfabric " + facts.ofi_version, {}};
  const bool wanted = facts.fabric == "ofi";
  if (facts.ofi_version.empty()) {
    return {"ofi.version", needed(wanted), "this build has no ofi fabric",
            "install libfabric-dev and build with MK_OFI=ON"};
  }
  if (facts.ofi_version_number < fabric::ofi::kLibfabricFloor) {
    finding.outcome = needed(wanted, Outcome::kWarn);
    finding.fix = "install libfabric 1.17 or later";
  } else if (wants_efa(facts) && facts.ofi_version_number < fabric::ofi::kEfaFloor) {
    finding.outcome = Outcome::kFail;
    finding.evidence += ": provider efa emulates remote writes before 1.20";
    finding.fix = "install AWS's efa_installer, or libfabric 1.20 or later";
  }
  return finding;
}

Finding ofi_providers(const Facts& facts) {
  Finding finding{"ofi.providers", Outcome::kPass, {}, {}};
  if (facts.ofi_version.empty())
    return {"ofi.providers", Outcome::kSkip, "this build has no ofi fabric", {}};
  std::vector<std::string> names;
  bool there = false;
  for (const ProviderFacts& provider : facts.providers) {
    names.push_back(fmt::format("{} {}", provider.name, provider.version));
    there =
        there || provider.name == facts.provider || provider.name.starts_with(facts.provider + ";");
  }
  finding.evidence = names.empty() ? "no provider offers remote writes with immediate data"
                                   : fmt::format("usable: {}", fmt::join(names, ", "));
  if (facts.fabric == "ofi" && !there) {
    finding.outcome = Outcome::kFail;
    finding.evidence += fmt::format("; not '{}', which is configured", facts.provider);
    finding.fix = "set fabric.ofi.provider to one of them, or install the one that is configured";
  } else if (names.empty()) {
    finding.outcome = Outcome::kWarn;
    finding.fix = "install libfabric's providers";
  }
  return finding;
}

Finding huge_pages(const Facts& facts) {
  Finding finding{
      "memory.hugepages",
      Outcome::kPass,
      fmt::format("{} of {} huge pages of {} KiB free; transparent: {}", facts.huge_pages_free,
                  facts.huge_pages, facts.huge_page_bytes / 1024,
                  facts.transparent_huge_pages.empty() ? "unknown" : facts.transparent_huge_pages),
      {}};
  if (facts.huge_pages == 0 && facts.transparent_huge_pages == "never") {
    finding.outcome = Outcome::kWarn;
    finding.fix =
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: fewer entries in the "
        "NIC's and the CPU's translation tables";
  }
  return finding;
}

Finding isolation(const Facts& facts) {
  Finding finding{"cpu.isolation", Outcome::kPass, {}, {}};
  const auto has = [](const std::vector<std::uint32_t>& all, std::int64_t cpu) {
    return std::ranges::any_of(all, [&](std::uint32_t one) { return one == cpu; });
  };
  std::vector<std::int64_t> pinned, absent, shared;
  for (const std::int64_t cpu : facts.proxy_cpus) {
    if (cpu < 0) continue;
    pinned.push_back(cpu);
    if (!has(facts.cpus, cpu)) {
      absent.push_back(cpu);
    } else if (!has(facts.isolated_cpus, cpu)) {
      shared.push_back(cpu);
    }
  }
  if (pinned.empty()) {
    finding.outcome = Outcome::kWarn;
    finding.evidence = fmt::format("proxy threads are not pinned; {} CPUs, {} isolated",
                                   facts.cpus.size(), facts.isolated_cpus.size());
    finding.fix = "name a CPU near each rail's NIC in proxy.cpus, and keep it free (isolcpus=)";
  } else if (!absent.empty()) {
    finding.outcome = Outcome::kFail;
    finding.evidence =
        fmt::format("proxy.cpus names CPUs that are not online: {}", fmt::join(absent, ", "));
    finding.fix = "name CPUs that are";
  } else if (!shared.empty()) {
    finding.outcome = Outcome::kWarn;
    finding.evidence =
        fmt::format("proxy threads share CPUs {} with everything else", fmt::join(shared, ", "));
    finding.fix = "keep them free: isolcpus= on the kernel's command line, or a cpuset";
  } else {
    finding.evidence =
        fmt::format("proxy threads have CPUs {} to themselves", fmt::join(pinned, ", "));
  }
  return finding;
}

Finding wakefulness(const Facts& facts) {
  Finding finding{"cpu.spin", Outcome::kPass, {}, {}};
  const std::string awake = daemon::format_duration(facts.spin.ns);
  finding.evidence = fmt::format("a rail's thread stays awake for {} after its last work ({})",
                                 awake, facts.spin.why.empty() ? "proxy.spin" : facts.spin.why);
  if (facts.spin.ns >= topology::kSpinOverPausesNs || facts.spin.why.empty()) return finding;
  finding.outcome = Outcome::kWarn;
  finding.evidence += fmt::format(
      "; a launch that finds it asleep begins up to {} later, {} after seconds without work",
      daemon::format_duration(facts.sleep_max_ns),
      daemon::format_duration(facts.sleep_max_ns * daemon::IdleBackoff::kLongSleeps));
  finding.fix =
      "give the daemon four CPUs a rail (CPUAffinity=, CPUQuota=, a container's limits), or name "
      "one for each in proxy.cpus, or set proxy.spin";
  return finding;
}

Finding distances(const Facts& facts) {
  Finding finding{"topology.distance", Outcome::kPass, {}, {}};
  if (!facts.topology_trouble.empty()) {
    finding.outcome = needed(wants_verbs(facts) || wants_efa(facts));
    finding.evidence = facts.topology_trouble;
    finding.fix =
        "`mkctl topology` draws what there is; fabric.verbs.devices and "
        "fabric.ofi.bind name NICs by rail";
    return finding;
  }
  bool any = false;
  for (std::size_t rail = 0; rail < facts.rails.size(); ++rail) {
    const RailFacts& one = facts.rails[rail];
    finding.evidence += fmt::format("{}rail {}: {} ({})", finding.evidence.empty() ? "" : "; ",
                                    rail, one.nics, one.why);
    if (one.gpu.empty()) continue;
    any = true;
    if (!one.near) finding.outcome = Outcome::kWarn;
  }
  if (!any) {
    finding.outcome = Outcome::kSkip;
    finding.evidence += finding.evidence.empty() ? "no GPU" : "; no GPU";
  } else if (!facts.idle_nics.empty()) {
    finding.outcome = Outcome::kWarn;
    finding.evidence += "; " + facts.idle_nics;
    finding.fix = "set fabric.rails = \"auto\" on all nodes, and restart mkerneld";
  } else if (finding.outcome == Outcome::kWarn) {
    finding.fix =
        "use NICs below the GPU's own PCIe switch or host bridge, if there are any: "
        "`mkctl topology`";
  }
  return finding;
}

Finding abi(const Facts& facts) {
  Finding finding{
      "abi.version",
      Outcome::kPass,
      fmt::format("this program is {}, ABI {}.{}", facts.version, facts.abi_major, facts.abi_minor),
      {}};
  if (!facts.daemon.trouble.empty()) {
    finding.outcome = Outcome::kSkip;
    finding.evidence += fmt::format("; no daemon to compare with at {}: {}", facts.daemon.socket,
                                    facts.daemon.trouble);
    return finding;
  }
  finding.evidence +=
      fmt::format("; the daemon at {} is {}, ABI {}.{}", facts.daemon.socket, facts.daemon.version,
                  facts.daemon.abi_major, facts.daemon.abi_minor);
  if (facts.daemon.abi_major != facts.abi_major) {
    finding.outcome = Outcome::kFail;
    finding.fix = "install the same major version of the daemon, its tools and libmkclient";
  } else if (facts.daemon.abi_minor != facts.abi_minor || facts.daemon.version != facts.version) {
    finding.outcome = Outcome::kWarn;
    finding.fix = "restart the daemon after an upgrade";
  }
  return finding;
}

Finding peers(const Facts& facts) {
  if (facts.peers.empty() && facts.discovery_trouble.empty()) {
    return {"peers.reachable",
            Outcome::kSkip,
            facts.discovery == "static"
                ? "no peer is configured"
                : fmt::format("discovery ({}) finds no other node", facts.discovery),
            {}};
  }
  Finding finding{"peers.reachable", Outcome::kPass, facts.discovery_trouble, {}};
  if (!facts.discovery_trouble.empty()) finding.outcome = Outcome::kFail;
  for (const PeerFacts& peer : facts.peers) {
    const bool well = peer.trouble.empty();
    finding.evidence +=
        fmt::format("{}{} ({}): {}", finding.evidence.empty() ? "" : "; ",
                    peer.id ? fmt::format("node {}", *peer.id) : "a node yet unknown", peer.address,
                    well ? "reachable" : peer.trouble);
    if (!well) finding.outcome = Outcome::kFail;
  }
  if (finding.outcome == Outcome::kFail)
    finding.fix = facts.discovery_trouble.empty()
                      ? "start mkerneld there, check its `listen`, and the firewall between"
                      : "check the configuration's [discovery] and what it names";
  return finding;
}

Finding tls_files(const Facts& facts) {
  if (!facts.tls.configured) return {"tls.files", Outcome::kSkip, "[tls] is not configured", {}};
  Finding finding{"tls.files", Outcome::kPass, {}, {}};
  if (!facts.tls.faults.empty()) {
    finding.outcome = Outcome::kFail;
    finding.evidence = fmt::format("{}", fmt::join(facts.tls.faults, "; "));
    finding.fix = "mend the files; a running daemon takes new ones within seconds";
    return finding;
  }
  finding.evidence =
      fmt::format("the certificate is made out to '{}'", fmt::join(facts.tls.names, "', '"));
  if (!facts.tls.name_doubt.empty()) {
    finding.outcome = Outcome::kWarn;
    finding.evidence = facts.tls.name_doubt;
    finding.fix = "make a certificate out to that address, or see tls.peers on the other nodes";
  }
  if (!facts.tls.expires) return finding;
  finding.evidence += facts.tls.name_doubt.empty() ? ", until " : "; valid until ";
  finding.evidence += daemon::utc_text(*facts.tls.expires);
  if (*facts.tls.expires - facts.now < kRenewalSeconds) {
    finding.outcome = Outcome::kWarn;
    finding.fix = "renew it before that; a running daemon takes the new files within seconds";
  }
  return finding;
}

Finding tls_peers(const Facts& facts) {
  Finding finding{"tls.peers", Outcome::kSkip, {}, {}};
  for (const PeerFacts& peer : facts.peers) {
    if (!facts.tls.configured || !peer.trouble.empty()) continue;
    if (finding.outcome == Outcome::kSkip) finding.outcome = Outcome::kPass;
    if (!peer.tls_trouble.empty()) finding.outcome = Outcome::kFail;
    finding.evidence +=
        fmt::format("{}node {} ({}): {}", finding.evidence.empty() ? "" : "; ", peer.id.value_or(0),
                    peer.address, peer.tls_trouble.empty() ? "accepted" : peer.tls_trouble);
  }
  if (finding.outcome == Outcome::kSkip) {
    finding.evidence = facts.tls.configured ? "no peer is reachable" : "[tls] is not configured";
  } else if (finding.outcome == Outcome::kFail) {
    finding.fix = "mend the certificate that is named, on its node; see tls.files of both nodes";
  }
  return finding;
}

Finding loopback_write(const Facts& facts) {
  if (facts.write.trouble.empty()) {
    return {"fabric.write",
            Outcome::kPass,
            fmt::format("4096 bytes and their flag arrived over {} in {:.0f} us",
                        facts.write.endpoint, facts.write.microseconds),
            {}};
  }
  return {"fabric.write", Outcome::kFail, facts.write.trouble,
          "the checks above say why, or the configuration's [fabric]"};
}

}  // namespace

std::string_view outcome_text(Outcome outcome) {
  switch (outcome) {
    case Outcome::kPass:
      return "PASS";
    case Outcome::kWarn:
      return "WARN";
    case Outcome::kFail:
      return "FAIL";
    case Outcome::kSkip:
      break;
  }
  return "SKIP";
}

std::vector<Finding> examine(const Facts& facts) {
  return {memlock(facts),    clients(facts),     fabric_choice(facts), devices(facts),
          ports(facts),      gids(facts),        mtus(facts),          registration(facts),
          gpu_memory(facts), ofi_version(facts), ofi_providers(facts), huge_pages(facts),
          isolation(facts),  wakefulness(facts), distances(facts),     abi(facts),
          peers(facts),      tls_files(facts),   tls_peers(facts),     loopback_write(facts)};
}

int exit_code(const std::vector<Finding>& findings) {
  return std::ranges::any_of(findings,
                             [](const Finding& one) { return one.outcome == Outcome::kFail; })
             ? 1
             : 0;
}

}  // namespace mk::doctor
