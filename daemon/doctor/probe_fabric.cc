#include <array>
#include <chrono>
#include <cstring>

#include "daemon/doctor/probe.h"
#include "daemon/topology/rails.h"
#include "shm/flag.h"
#include "shm/host/buffer_file.h"

namespace mk::doctor {
namespace {

using std::chrono::steady_clock;

constexpr std::uint32_t kBytes = 4096;
constexpr std::uint32_t kEpoch = 7;
constexpr std::uint64_t kTimeoutNs = 3'000'000'000;

/// Registered memory of one endpoint.
struct Memory {
  shm::BufferFile file;
  std::unique_ptr<fabric::LocalRegion> region;
};
Result<Memory> make_memory(fabric::Endpoint& endpoint, int fill, bool flags) {
  MK_ASSIGN_OR_RETURN(auto file, shm::BufferFile::create("mkernel-doctor", kBytes));
  std::memset(file.data(), fill, file.bytes());
  MK_ASSIGN_OR_RETURN(auto region,
                      endpoint.register_memory({file.data(), file.bytes(), file.fd(), 0, flags}));
  return Memory{std::move(file), std::move(region)};
}

/// One write from one endpoint to another, as between two nodes; answers its time in microseconds.
Result<double> write_once(fabric::Endpoint& from, fabric::Endpoint& to) {
  MK_ASSIGN_OR_RETURN(const Memory source, make_memory(from, 0x5a, false));
  MK_ASSIGN_OR_RETURN(const Memory target, make_memory(to, 0, false));
  MK_ASSIGN_OR_RETURN(const Memory flags, make_memory(to, 0, true));
  MK_ASSIGN_OR_RETURN(const fabric::LinkId link, from.connect(to.address(), "this node itself"));
  MK_ASSIGN_OR_RETURN(const auto remote, from.import_region(link, target.region->key()));
  MK_ASSIGN_OR_RETURN(const auto remote_flags, from.import_region(link, flags.region->key()));
  fabric::Write write;
  write.src = source.region.get();
  write.dst = remote.get();
  write.bytes = kBytes;
  write.flags = remote_flags.get();
  write.epoch = kEpoch;
  write.immediate = shm::make_immediate(0, 0, kEpoch);
  const auto started = steady_clock::now();
  if (from.post(link, {&write, 1}) != 1)
    return fail(ErrorCode::kUnavailable, "the endpoint takes no write");
  bool arrived = false, completed = false;
  std::array<fabric::Event, 8> events;
  while (!arrived || !completed) {
    for (std::size_t i = from.poll(events); i-- > 0;) {
      if (events[i].kind == fabric::Event::Kind::kFailed ||
          events[i].kind == fabric::Event::Kind::kLinkDown) {
        const std::string reason = from.link_reason(link);
        return fail(ErrorCode::kLinkDown, "the write failed{}",
                    reason.empty() ? "" : ": " + reason);
      }
      completed = completed || events[i].kind == fabric::Event::Kind::kCompleted;
    }
    for (std::size_t i = to.poll(events); i-- > 0;)
      arrived = arrived || events[i].kind == fabric::Event::Kind::kArrival;
    if (from.capabilities().contract == fabric::DeliveryContract::kOrdered)
      arrived = shm::load_acquire(reinterpret_cast<std::uint32_t*>(flags.file.data())) == kEpoch;
    if (steady_clock::now() - started > std::chrono::nanoseconds(kTimeoutNs))
      return fail(ErrorCode::kTimeout, "the write did not arrive within {} s", kTimeoutNs / 1e9);
  }
  const std::chrono::duration<double, std::micro> taken = steady_clock::now() - started;
  if (std::memcmp(source.file.data(), target.file.data(), kBytes) != 0)
    return fail(ErrorCode::kProtocol, "what arrived is not what was sent");
  from.disconnect(link);
  return taken.count();
}

}  // namespace

void probe_topology(const daemon::Config& config, Facts& facts) {
  const auto machine = topology::read_machine();
  if (!machine) {
    facts.topology_trouble = machine.error().message;
    return;
  }
  const auto choices = topology::choose_nics(*machine, config);
  if (!choices) {
    facts.topology_trouble = choices.error().message;
    return;
  }
  if (const auto plan = topology::plan_rails(config, [&] { return *machine; }))
    facts.idle_nics = plan->unused;
  for (const topology::RailChoice& choice : *choices) {
    RailFacts& rail = facts.rails.emplace_back();
    rail.nics = topology::nic_names(*machine, choice);
    rail.why = choice.why;
    if (!choice.gpu) continue;
    const topology::Gpu& gpu = machine->gpus[*choice.gpu];
    rail.gpu = gpu.bus_id;
    rail.near = true;
    for (const std::uint32_t nic : choice.nics)
      rail.near = rail.near && topology::distance(*machine, gpu, machine->nics[nic]).reach <=
                                   topology::Reach::kHostBridge;
  }
}

void probe_write(const daemon::Config& config, Facts& facts) {
  if (config.fabric.name == "null") {
    facts.write.trouble = "fabric null moves nothing: it is for benchmarks";
    return;
  }
  const auto plan = topology::plan_rails(config);
  if (!plan) {
    facts.write.trouble = plan.error().message;
    return;
  }
  fabric::EndpointConfig setup = plan->endpoints.front();
  setup.connect_timeout_ns = kTimeoutNs;
  setup.write_timeout_ns = kTimeoutNs;
  const auto from = fabric::open_endpoint(setup);
  const auto to = fabric::open_endpoint(setup);
  if (!from || !to) {
    facts.write.trouble = (from ? to : from).error().message;
    return;
  }
  const fabric::Capabilities& capabilities = (*from)->capabilities();
  facts.write.endpoint = capabilities.device.empty()
                             ? capabilities.name
                             : fmt::format("{} {}", capabilities.name, capabilities.device);
  const auto taken = write_once(**from, **to);
  if (taken) {
    facts.write.microseconds = *taken;
  } else {
    facts.write.trouble = fmt::format("over {}: {}", facts.write.endpoint, taken.error().message);
  }
}

Facts gather(const daemon::Config& asked, const std::string& version, const FindNodes& find) {
  const auto [config, why, trouble] = topology::resolve_fabric(asked);
  Facts facts;
  facts.fabric = config.fabric.name;
  facts.fabric_why = trouble.empty() ? why : why + "; " + trouble;
  facts.provider = config.fabric.ofi.provider;
  facts.proxy_cpus = config.proxy.cpus;
  facts.discovery = config.discovery.kind;
  facts.version = version;
  probe_host(facts);
  probe_verbs(config, facts);
  probe_ofi(facts);
  probe_topology(config, facts);
  probe_daemon(config, facts);
  probe_memlock(config, facts);
  probe_client_limits(config, facts);
  probe_spin(config, facts);
  probe_tls(config, facts);
  probe_peers(config, find, facts);
  probe_write(config, facts);
  return facts;
}

}  // namespace mk::doctor
