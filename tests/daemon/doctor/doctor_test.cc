// The doctor's judgement of machines that tests make up, and one look at this one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "daemon/doctor/checks.h"
#include "daemon/doctor/probe.h"

namespace mk::doctor {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

/// A node as it should be: RoCE, a GPU, everything in order.
Facts good() {
  Facts facts;
  facts.fabric = "verbs";
  facts.proxy_cpus = {2, 3};
  facts.spin = {topology::kSpinOverPausesNs, "each rail has a CPU"};
  facts.sleep_max_ns = 500'000;
  facts.machine = {64ull << 30, 65'536};
  facts.clients = client_limits({}, facts.machine);
  facts.cpus = {0, 1, 2, 3};
  facts.isolated_cpus = {2, 3};
  facts.huge_page_bytes = 2 << 20;
  facts.transparent_huge_pages = "madvise";
  facts.verbs_built = true;
  facts.gpu = "GPU-1";
  PortFacts port;
  port.name = "mlx5_0:1";
  port.state = "active";
  port.active = true;
  port.layer = "Ethernet";
  port.mtu_bytes = port.mtu_bytes_max = 4096;
  port.gid = "index 3 = 10.0.0.1 (RoCE v2)";
  port.gid_why = "the first RoCE v2 entry with an IPv4 address";
  port.peermem_trouble = "Bad address";
  facts.ports = {port};
  facts.ofi_version = "1.17";
  facts.ofi_version_number = (1u << 16) | 17;
  facts.providers = {{"tcp;ofi_rxm", "1.17"}, {"net", "1.17"}};
  facts.rails = {{"0000:19:00.0", "mlx5_0", "nearest", true}};
  facts.version = "0.1.0";
  facts.abi_major = 1;
  facts.abi_minor = 2;
  facts.daemon = {"/run/sock", "", "0.1.0", 1, 2};
  facts.peers = {{1, "10.0.0.2:7171", ""}};
  facts.now = 1'000'000;
  facts.tls = {true, {}, facts.now + 30 * 86'400, {"node0.cluster"}};
  facts.write = {"", "verbs mlx5_0:1", 12.3};
  return facts;
}

Finding find(const Facts& facts, std::string_view id) {
  for (const Finding& finding : examine(facts)) {
    if (finding.id == id) return finding;
  }
  throw std::runtime_error(fmt::format("no check {}", id));
}

TEST(DoctorTest, AHealthyNodePassesEverything) {
  const auto findings = examine(good());
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.outcome, Outcome::kPass) << finding.id << ": " << finding.evidence;
    EXPECT_THAT(finding.evidence, Not(IsEmpty())) << finding.id;
    EXPECT_THAT(finding.fix, IsEmpty()) << finding.id;
  }
  EXPECT_EQ(exit_code(findings), 0);
}

TEST(DoctorTest, IdsAreStable) {
  std::vector<std::string> ids;
  for (const Finding& finding : examine(good())) ids.emplace_back(finding.id);
  EXPECT_EQ(ids, (std::vector<std::string>{
                     "limits.memlock",  "limits.clients", "fabric.choice",     "verbs.devices",
                     "verbs.ports",     "verbs.gid",      "verbs.mtu",         "verbs.register",
                     "gpu.memory",      "ofi.version",    "ofi.providers",     "memory.hugepages",
                     "cpu.isolation",   "cpu.spin",       "topology.distance", "abi.version",
                     "peers.reachable", "tls.files",      "tls.peers",         "fabric.write"}));
}

struct Case {
  std::string_view id;
  Outcome outcome;
  std::string evidence;  ///< that is named
  std::function<void(Facts&)> change;
};

// Every check in every outcome that it has.
TEST(DoctorTest, EachTroubleIsFoundNamedAndGivenAFix) {
  const std::vector<Case> cases{
      {"limits.memlock", Outcome::kFail, "64 KiB", [](Facts& f) { f.memlock.bytes = 65536; }},
      {"limits.memlock", Outcome::kWarn, "KiB", [](Facts& f) { f.memlock.bytes = 8ull << 30; }},
      {"limits.memlock", Outcome::kSkip, "loopback",
       [](Facts& f) {
         f.memlock.bytes = 65536;
         f.fabric = "loopback";
       }},
      {"limits.memlock", Outcome::kFail, "64 KiB",
       [](Facts& f) {
         f.memlock.bytes = 65536;
         f.fabric = "ofi";
         f.provider = "efa";
       }},
      {"limits.memlock", Outcome::kFail, "64 KiB (of the running daemon, process 77)",
       [](Facts& f) {
         f.memlock = {65536, 77, ""};
       }},
      {"limits.memlock", Outcome::kPass, "unlimited (of the running daemon, process 77)",
       [](Facts& f) {
         f.memlock = {UINT64_MAX, 77, ""};
       }},
      {"limits.memlock", Outcome::kWarn, "not of the running daemon: nobody says",
       [](Facts& f) {
         f.memlock = {65536, 0, "nobody says"};
       }},
      {"limits.clients", Outcome::kWarn, "192 descriptors",
       [](Facts& f) {
         f.machine.descriptors = 256;
         f.clients = client_limits({}, f.machine);
       }},
      {"limits.clients", Outcome::kWarn, "128.0 GiB of host memory in all",
       [](Facts& f) { f.clients.all.memory_bytes = 128ull << 30; }},
      {"limits.clients", Outcome::kWarn, "any amount of host memory in all",
       [](Facts& f) { f.clients.all.memory_bytes = 0; }},
      {"fabric.choice", Outcome::kPass, "verbs, as configured", [](Facts&) {}},
      {"fabric.choice", Outcome::kPass, "no InfiniBand",
       [](Facts& f) {
         f.fabric = "ofi";
         f.provider = "efa";
         f.fabric_why = "ofi over efa: no InfiniBand or RoCE port is active";
       }},
      {"fabric.choice", Outcome::kWarn, "no InfiniBand",
       [](Facts& f) {
         f.fabric = "ofi";
         f.fabric_why = "ofi over tcp: no InfiniBand or RoCE port is active";
       }},
      {"verbs.devices", Outcome::kFail, "no RDMA device", [](Facts& f) { f.ports.clear(); }},
      {"verbs.devices", Outcome::kSkip, "no RDMA device",
       [](Facts& f) {
         f.ports.clear();
         f.fabric = "ofi";
       }},
      {"verbs.devices", Outcome::kFail, "cannot be opened",
       [](Facts& f) {
         f.ports.clear();
         f.verbs_trouble = "RDMA device mlx5_0 cannot be opened";
       }},
      {"verbs.devices", Outcome::kFail, "mlx5_1 cannot be opened",
       [](Facts& f) { f.verbs_trouble = "RDMA device mlx5_1 cannot be opened"; }},
      {"verbs.devices", Outcome::kWarn, "mlx5_1 cannot be opened",
       [](Facts& f) {
         f.fabric = "ofi";
         f.verbs_trouble = "RDMA device mlx5_1 cannot be opened";
       }},
      {"verbs.devices", Outcome::kFail, "no verbs fabric", [](Facts& f) { f.verbs_built = false; }},
      {"verbs.ports", Outcome::kFail, "mlx5_0:1 is down",
       [](Facts& f) {
         f.ports[0].active = false;
         f.ports[0].state = "down";
       }},
      {"verbs.ports", Outcome::kWarn, "mlx5_1:1 is down",
       [](Facts& f) {
         f.ports.push_back(f.ports[0]);
         f.ports[1].name = "mlx5_1:1";
         f.ports[1].active = false;
         f.ports[1].state = "down";
       }},
      {"verbs.ports", Outcome::kSkip, "no RDMA port", [](Facts& f) { f.ports.clear(); }},
      {"verbs.gid", Outcome::kFail, "no RoCE v2 entry",
       [](Facts& f) { f.ports[0].gid_trouble = "no RoCE v2 entry"; }},
      {"verbs.gid", Outcome::kWarn, "no RoCE v2 entry",
       [](Facts& f) {
         f.ports[0].gid_trouble = "no RoCE v2 entry";
         f.fabric = "ofi";
       }},
      {"verbs.gid", Outcome::kWarn, "fe80",
       [](Facts& f) {
         f.ports[0].gid_link_local = true;
         f.ports[0].gid = "index 0 = fe80::1 (RoCE v2)";
       }},
      {"verbs.gid", Outcome::kSkip, "no RDMA port is active",
       [](Facts& f) { f.ports[0].active = false; }},
      {"verbs.mtu", Outcome::kWarn, "1024 bytes of 4096",
       [](Facts& f) { f.ports[0].mtu_bytes = 1024; }},
      {"verbs.mtu", Outcome::kSkip, "no RDMA port", [](Facts& f) { f.ports.clear(); }},
      {"verbs.register", Outcome::kFail, "Cannot allocate",
       [](Facts& f) { f.ports[0].page_trouble = "Cannot allocate memory"; }},
      {"verbs.register", Outcome::kWarn, "Cannot allocate",
       [](Facts& f) {
         f.ports[0].page_trouble = "Cannot allocate memory";
         f.fabric = "loopback";
       }},
      {"verbs.register", Outcome::kSkip, "no RDMA port", [](Facts& f) { f.ports.clear(); }},
      {"gpu.memory", Outcome::kWarn, "neither by dmabuf",
       [](Facts& f) { f.ports[0].dmabuf_trouble = "Operation not supported"; }},
      {"gpu.memory", Outcome::kSkip, "no GPU", [](Facts& f) { f.gpu.clear(); }},
      {"ofi.version", Outcome::kFail, "1.16",
       [](Facts& f) {
         f.fabric = "ofi";
         f.ofi_version = "1.16";
         f.ofi_version_number = (1u << 16) | 16;
       }},
      {"ofi.version", Outcome::kWarn, "1.16",
       [](Facts& f) {
         f.ofi_version = "1.16";
         f.ofi_version_number = (1u << 16) | 16;
       }},
      {"ofi.version", Outcome::kFail, "emulates remote writes",
       [](Facts& f) {
         f.fabric = "ofi";
         f.provider = "efa";
       }},
      {"ofi.version", Outcome::kSkip, "no ofi fabric", [](Facts& f) { f.ofi_version.clear(); }},
      {"ofi.version", Outcome::kFail, "no ofi fabric",
       [](Facts& f) {
         f.ofi_version.clear();
         f.fabric = "ofi";
       }},
      {"ofi.providers", Outcome::kFail, "'psm3'",
       [](Facts& f) {
         f.fabric = "ofi";
         f.provider = "psm3";
       }},
      {"ofi.providers", Outcome::kWarn, "no provider", [](Facts& f) { f.providers.clear(); }},
      {"ofi.providers", Outcome::kSkip, "no ofi fabric", [](Facts& f) { f.ofi_version.clear(); }},
      {"memory.hugepages", Outcome::kWarn, "never",
       [](Facts& f) { f.transparent_huge_pages = "never"; }},
      {"cpu.isolation", Outcome::kWarn, "not pinned", [](Facts& f) { f.proxy_cpus = {-1}; }},
      {"cpu.isolation", Outcome::kWarn, "share CPUs 3", [](Facts& f) { f.isolated_cpus = {2}; }},
      {"cpu.isolation", Outcome::kFail, "not online: 9",
       [](Facts& f) {
         f.proxy_cpus = {2, 9};
       }},
      {"cpu.spin", Outcome::kPass, "awake for 20ms after its last work (each rail has a CPU)",
       [](Facts&) {}},
      {"cpu.spin", Outcome::kPass, "awake for 50us after its last work (proxy.spin)",
       [](Facts& f) {
         f.spin = {topology::kSpinAmongOthersNs, {}};
       }},
      {"cpu.spin", Outcome::kWarn,
       "awake for 50us after its last work (2 CPUs for 1 rail); a launch that finds it asleep "
       "begins up to 500us later, 4ms after seconds without work",
       [](Facts& f) {
         f.spin = {topology::kSpinAmongOthersNs, "2 CPUs for 1 rail"};
       }},
      {"topology.distance", Outcome::kWarn, "mlx5_0", [](Facts& f) { f.rails[0].near = false; }},
      {"topology.distance", Outcome::kWarn, "7 NICs stay idle",
       [](Facts& f) { f.idle_nics = "7 NICs stay idle"; }},
      {"topology.distance", Outcome::kFail, "no NIC",
       [](Facts& f) { f.topology_trouble = "this machine has no NIC"; }},
      {"topology.distance", Outcome::kSkip, "no NIC",
       [](Facts& f) {
         f.topology_trouble = "this machine has no NIC";
         f.fabric = "loopback";
       }},
      {"topology.distance", Outcome::kSkip, "no GPU", [](Facts& f) { f.rails[0].gpu.clear(); }},
      {"abi.version", Outcome::kFail, "ABI 2.0",
       [](Facts& f) {
         f.daemon.abi_major = 2;
         f.daemon.abi_minor = 0;
       }},
      {"abi.version", Outcome::kWarn, "0.0.9", [](Facts& f) { f.daemon.version = "0.0.9"; }},
      {"abi.version", Outcome::kSkip, "nobody listens",
       [](Facts& f) { f.daemon.trouble = "nobody listens"; }},
      {"peers.reachable", Outcome::kFail, "Connection refused",
       [](Facts& f) {
         f.peers.push_back({2, "10.0.0.3:7171", "Connection refused"});
       }},
      {"peers.reachable", Outcome::kFail, "a node yet unknown (10.0.0.3:7171): Connection refused",
       [](Facts& f) {
         f.peers.push_back({std::nullopt, "10.0.0.3:7171", "Connection refused"});
       }},
      {"peers.reachable", Outcome::kFail, "no name server answered; node 1",
       [](Facts& f) { f.discovery_trouble = "discovery (dns): no name server answered"; }},
      {"peers.reachable", Outcome::kSkip, "no peer", [](Facts& f) { f.peers.clear(); }},
      {"peers.reachable", Outcome::kSkip, "discovery (etcd) finds no other node",
       [](Facts& f) {
         f.peers.clear();
         f.discovery = "etcd";
       }},
      {"tls.files", Outcome::kFail, "expired on",
       [](Facts& f) { f.tls.faults = {"tls.cert /c expired on some day"}; }},
      {"tls.files", Outcome::kWarn, "made out to 'node0.cluster', until 1970-01-25 13:46:40 UTC",
       [](Facts& f) { f.tls.expires = f.now + 13 * 86'400; }},
      {"tls.files", Outcome::kSkip, "not configured", [](Facts& f) { f.tls = {}; }},
      {"tls.peers", Outcome::kFail, "node 1 (10.0.0.2:7171): its certificate expired",
       [](Facts& f) { f.peers[0].tls_trouble = "its certificate expired on some day"; }},
      {"tls.peers", Outcome::kSkip, "no peer is reachable",
       [](Facts& f) { f.peers[0].trouble = "Connection refused"; }},
      {"tls.peers", Outcome::kSkip, "not configured", [](Facts& f) { f.tls = {}; }},
      {"fabric.write", Outcome::kFail, "does not acknowledge",
       [](Facts& f) { f.write.trouble = "over verbs: does not acknowledge"; }},
  };
  std::set<std::pair<std::string_view, Outcome>> seen;
  for (const Case& one : cases) {
    Facts facts = good();
    one.change(facts);
    const Finding finding = find(facts, one.id);
    EXPECT_EQ(outcome_text(finding.outcome), outcome_text(one.outcome))
        << one.id << ": " << finding.evidence;
    EXPECT_THAT(finding.evidence, HasSubstr(one.evidence)) << one.id;
    if (one.outcome == Outcome::kWarn || one.outcome == Outcome::kFail) {
      EXPECT_THAT(finding.fix, Not(IsEmpty())) << one.id;
    }
    if (one.outcome == Outcome::kFail) {
      EXPECT_EQ(exit_code(examine(facts)), 1) << one.id;
    }
    seen.insert({one.id, finding.outcome});
  }
  EXPECT_GE(seen.size(), 35u);
}

TEST(DoctorTest, AFailureDecidesTheExitCodeAndWarningsDoNot) {
  Facts facts = good();
  facts.proxy_cpus.clear();
  EXPECT_EQ(exit_code(examine(facts)), 0);
  facts.write.trouble = "it did not arrive";
  EXPECT_EQ(exit_code(examine(facts)), 1);
}

TEST(DoctorTest, TheReportIsForPeopleAndForScripts) {
  Facts facts = good();
  facts.memlock.bytes = 65536;
  facts.peers.clear();
  const auto findings = examine(facts);
  EXPECT_THAT(to_text(findings), AllOf(HasSubstr("FAIL  limits.memlock     locked memory: 64 KiB"),
                                       HasSubstr("-> set LimitMEMLOCK=infinity"),
                                       HasSubstr("17 passed, 0 warnings, 1 failed, 2 skipped\n")));
  const auto json = nlohmann::json::parse(to_json(findings));
  EXPECT_EQ(json["checks"].size(), 20u);
  EXPECT_EQ(json["checks"][0]["id"], "limits.memlock");
  EXPECT_EQ(json["checks"][0]["result"], "FAIL");
  EXPECT_EQ(json["summary"]["fail"], 1);
}

TEST(DoctorTest, ThisMachineIsLookedAtForReal) {
  daemon::Config config;
  config.socket.path = testing::TempDir() + "nobody-listens-here.sock";
  config.peers.push_back({1, {.unix_socket = true, .path = testing::TempDir() + "nor-here.sock"}});
  const Facts facts = gather(config, "0.1.0", {});
  EXPECT_THAT(facts.cpus, Not(IsEmpty()));
  EXPECT_THAT(facts.spin.why, HasSubstr("for 1 rail here and the rails of 1 other daemon"));
  EXPECT_EQ(facts.sleep_max_ns, config.proxy.sleep_max_ns);
  EXPECT_GT(facts.huge_page_bytes, 0u);
  EXPECT_TRUE(facts.write.trouble.empty()) << facts.write.trouble;
  EXPECT_EQ(facts.write.endpoint, "loopback");
  EXPECT_GT(facts.write.microseconds, 0.0);
  const auto findings = examine(facts);
  std::map<std::string_view, Outcome> outcomes;
  for (const Finding& finding : findings) outcomes[finding.id] = finding.outcome;
  EXPECT_EQ(outcomes["fabric.write"], Outcome::kPass);
  EXPECT_EQ(outcomes["peers.reachable"], Outcome::kFail);
  EXPECT_EQ(outcomes["abi.version"], Outcome::kSkip);
}

TEST(DoctorTest, ALimitIsReadOfAnyProcess) {
  rlimit before{};
  ASSERT_EQ(0, ::getrlimit(RLIMIT_MEMLOCK, &before));
  const rlimit small{std::min<rlim_t>(before.rlim_max, 123 * 4096), before.rlim_max};
  ASSERT_EQ(0, ::setrlimit(RLIMIT_MEMLOCK, &small));
  EXPECT_EQ(memlock_of(::getpid()).value_or(0), small.rlim_cur);
  Facts facts;
  facts.daemon.trouble = "nobody listens";
  probe_memlock({}, facts);
  const auto text_of = [](const char* path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const bool free =
      locks_without_limit(text_of("/proc/self/status"), text_of("/proc/self/uid_map"));
  EXPECT_EQ(facts.memlock.bytes, free ? UINT64_MAX : small.rlim_cur);
  EXPECT_EQ(facts.memlock.daemon, 0u);
  ASSERT_EQ(0, ::setrlimit(RLIMIT_MEMLOCK, &before));
  if (before.rlim_cur == RLIM_INFINITY) {
    EXPECT_EQ(memlock_of(::getpid()).value_or(0), UINT64_MAX);
  }
  const auto nobody = memlock_of(-1);
  ASSERT_FALSE(nobody);
  EXPECT_THAT(nobody.error().message, HasSubstr("/proc/-1/limits"));
}

TEST(Memlock, IsOfNoEffectWithTheCapabilityOfTheFirstUserNamespace) {
  const std::string all = "         0          0 4294967295\n";
  const auto status = [](const std::string& effective) {
    return "Name:\tmkerneld\nCapPrm:\t000001ffffffffff\nCapEff:\t" + effective + "\nSeccomp:\t0\n";
  };
  EXPECT_TRUE(locks_without_limit(status("000001ffffffffff"), all));
  EXPECT_TRUE(locks_without_limit(status("0000000000004000"), all));
  EXPECT_FALSE(locks_without_limit(status("000001ffffffbfff"), all));
  EXPECT_FALSE(locks_without_limit(status("000001ffffffffff"), "0 100000 65536\n"));
  EXPECT_FALSE(locks_without_limit("", ""));
}

TEST(DoctorTest, WhoDiscoveryFindsIsCalledAsThoseOfTheListAre) {
  const std::string folder = testing::TempDir();
  daemon::Config config;
  config.peers.push_back({1, {.unix_socket = true, .path = folder + "nobody-1.sock"}});
  config.discovery.kind = "dns";
  Facts facts;
  probe_peers(
      config,
      [&](const daemon::Config&) {
        return std::vector<daemon::Sighting>{
            {1, config.peers[0].address},
            {2, {.unix_socket = true, .path = folder + "nobody-2.sock"}},
            {std::nullopt, {.unix_socket = true, .path = folder + "nobody-3.sock"}},
            {4, {.host = "10.0.0.4", .port = 7171}, "beyond this machine"}};
      },
      facts);
  ASSERT_EQ(facts.peers.size(), 4u);
  for (std::uint32_t i = 0; i < 2; ++i) EXPECT_EQ(facts.peers[i].id, i + 1);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_THAT(facts.peers[i].trouble, HasSubstr("No such"));
  EXPECT_EQ(facts.peers[2].id, std::nullopt);
  EXPECT_EQ(facts.peers[3].trouble, "beyond this machine");

  Facts failed;
  probe_peers(
      config,
      [](const daemon::Config&) -> Result<std::vector<daemon::Sighting>> {
        return fail(ErrorCode::kUnavailable, "no name server answered");
      },
      failed);
  EXPECT_EQ(failed.discovery_trouble, "discovery (dns): no name server answered");
  EXPECT_EQ(failed.peers.size(), 1u) << "those of the list all the same";
}

TEST(DoctorTest, EachFabricOfThisMachineWritesToItself) {
  for (const std::string provider : {"tcp", "net"}) {
    daemon::Config config;
    config.fabric.name = "ofi";
    config.fabric.ofi.provider = provider;
    config.fabric.ofi.bind = {"127.0.0.1"};
    Facts facts;
    probe_write(config, facts);
    if (facts.write.trouble.find("no provider") != std::string::npos) continue;
    EXPECT_TRUE(facts.write.trouble.empty()) << facts.write.trouble;
    EXPECT_THAT(facts.write.endpoint, HasSubstr("ofi:"));
  }
  daemon::Config config;
  config.fabric.name = "ofi";
  config.fabric.ofi.provider = "no-such-provider";
  Facts facts;
  probe_write(config, facts);
  EXPECT_THAT(facts.write.trouble, HasSubstr("no-such-provider"));
}

}  // namespace
}  // namespace mk::doctor
