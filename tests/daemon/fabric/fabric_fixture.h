/// \file
/// Two or more endpoints of one fabric in one process, with memory, links and a way to wait; the
/// same for every fabric.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "daemon/fabric/loopback/endpoint.h"
#ifdef MK_SOFT_EFA
#include "daemon/fabric/ofi/fid.h"
#endif
#include "daemon/fabric/staged/endpoint.h"
#include "daemon/fabric/striped/endpoint.h"
#include "shm/flag.h"
#include "shm/host/buffer_file.h"
#include "tests/daemon/fabric/direct_nic.h"
#include "tests/shm/gpu/fake_driver.h"

namespace mk::fabric {

inline constexpr std::uint32_t kTestFlags = 4096;
inline constexpr std::byte kPoison{0xA5};

/// How much longer than on a plain machine everything may take: MK_TEST_PATIENCE, for emulated
/// ones.
inline int patience() {
  const char* const text = std::getenv("MK_TEST_PATIENCE");
  return text == nullptr ? 1 : std::max(1, std::atoi(text));
}

/// A second, times `patience`, or several: of an endpoint that is to give up soon.
inline std::uint64_t soon_ns(std::uint64_t seconds = 1) {
  return static_cast<std::uint64_t>(patience()) * seconds * 1'000'000'000;
}

/// Two GPUs whose streams work on while nodes are polled, a few pieces at a time.
struct SlowGpus {
  const std::shared_ptr<gpu::test::FakeMachine> machine =
      std::make_shared<gpu::test::FakeMachine>();
  const std::shared_ptr<gpu::test::FakeDriver> ranks =
      std::make_shared<gpu::test::FakeDriver>(machine);
  const std::shared_ptr<gpu::test::FakeDriver> daemons =
      std::make_shared<gpu::test::FakeDriver>(machine);
  SlowGpus() { daemons->hold = true; }
};

/// One way to configure a fabric.
struct FabricSetup {
  std::string name;
  EndpointConfig config;
  LoopbackOptions loopback;

  std::uint32_t stripes = 1;  ///< endpoints that are one rail's
  /// Opens one endpoint; null: it is the one that `config` describes.
  std::function<Result<std::unique_ptr<Endpoint>>()> opener = {};
  std::shared_ptr<SlowGpus> gpus = {};        ///< whose memory is staged; null: it is the host's
  std::shared_ptr<FabricSetup> carrier = {};  ///< by which
  /// The carrier's NICs reach GPUs by themselves; made for each.
  std::function<std::shared_ptr<DirectControl>()> direct = {};
  std::string gpu_path = {};    ///< what `Endpoint::gpu_path` says once a GPU's memory has come
  bool may_take_fewer = false;  ///< `post` may take fewer writes than there is room for
  /// A link goes down when the peer's endpoint is gone. Not with libfabric's shm, which goes on
  /// writing to the memory of an endpoint that ended.
  bool notices_death = true;
  /// Where the fabric has such means: breaks all links, and none can be made for a while.
  std::function<void()> break_links = {};

  Result<std::unique_ptr<Endpoint>> open() const {
    if (gpus == nullptr) return open_rail();
    MK_ASSIGN_OR_RETURN(auto plain, open_rail());
    StagedOptions options;
    options.open_carrier = [setup = *carrier, own = config]() mutable {
      setup.config.connect_timeout_ns = own.connect_timeout_ns;
      setup.config.write_timeout_ns = own.write_timeout_ns;
      setup.config.gpu_memory = own.verbs.gpu_direct;
      return setup.open_rail();
    };
    options.direct = config.verbs.gpu_direct;
    options.load_gpu_driver = [driver = gpus->daemons]() -> Result<std::shared_ptr<gpu::Driver>> {
      return driver;
    };
    return make_staged_endpoint(std::move(plain), std::move(options));
  }
  Result<std::unique_ptr<Endpoint>> open_rail() const {
    if (direct) {
      MK_ASSIGN_OR_RETURN(auto host, open_stripes());
      return std::make_unique<DirectNic>(std::move(host), direct());
    }
    return open_stripes();
  }
  Result<std::unique_ptr<Endpoint>> open_stripes() const {
    if (stripes == 1) return open_one();
    std::vector<std::unique_ptr<Endpoint>> all;
    for (std::uint32_t i = 0; i < stripes; ++i) {
      MK_ASSIGN_OR_RETURN(auto endpoint, open_one());
      all.push_back(std::move(endpoint));
    }
    return make_striped_endpoint(std::move(all));
  }
  Result<std::unique_ptr<Endpoint>> open_one() const {
    if (opener) return opener();
    return config.fabric == "loopback" ? make_loopback_endpoint(config, loopback)
                                       : open_endpoint(config);
  }
};
inline void PrintTo(const FabricSetup& setup, std::ostream* out) { *out << setup.name; }

/// `plain`, with GPUs whose memory goes over `carrier`.
inline FabricSetup with_gpus(const std::string& name, const FabricSetup& plain,
                             const FabricSetup& carrier) {
  FabricSetup setup = plain;
  setup.name = name;
  setup.gpus = std::make_shared<SlowGpus>();
  setup.gpu_path = "staged through host memory";
  setup.carrier = std::make_shared<FabricSetup>(carrier);
  return setup;
}

/// The same, by NICs that reach the GPUs themselves, and need not flush to be seen.
inline FabricSetup with_direct_gpus(const std::string& name, const FabricSetup& plain,
                                    FabricSetup carrier) {
  carrier.direct = [] {
    auto control = std::make_shared<DirectControl>();
    control->shadowed = false;
    return control;
  };
  FabricSetup setup = with_gpus(name, plain, carrier);
  setup.gpu_path = "by dmabuf";
  return setup;
}

/// Whether this program brings its own NICs (verbs/soft_nic), for verbs alone.
#ifdef MK_SOFT_NIC
inline constexpr bool kSoftNic = true;
#else
inline constexpr bool kSoftNic = false;
#endif

/// The same of EFA devices (ofi/soft_efa).
#ifdef MK_SOFT_EFA
inline constexpr bool kSoftEfa = true;
#else
inline constexpr bool kSoftEfa = false;
#endif

inline bool rdma_ports() {
  std::error_code none;
  if (kSoftEfa) return false;
  return kSoftNic || std::filesystem::directory_iterator("/sys/class/infiniband", none) !=
                         std::filesystem::directory_iterator();
}

inline std::vector<FabricSetup> all_setups() {
  std::vector<FabricSetup> setups(3);
  setups[0].name = "loopback";
  setups[1].name = "loopback_mapped";  // as between two processes
  setups[1].loopback.share_process_memory = false;
  setups[2].name = "loopback_paced";
  setups[2].config.link_model = {2e9, 20'000};
  const std::pair<const char*, const char*> providers[] = {
      {"ofi_tcp", "tcp"}, {"ofi_net", "net"}, {"ofi_shm", "shm"}};
  for (const auto& [name, provider] : providers) {
    FabricSetup setup;
    setup.name = name;
    setup.config.fabric = "ofi";
    setup.config.provider = provider;
    if (setup.config.provider != "shm") setup.config.bind_address = "127.0.0.1";
    setup.notices_death = setup.config.provider != "shm";
    setups.push_back(setup);
  }
  setups.push_back(setups[0]);
  setups.back().name = "loopback_striped";
  setups.back().stripes = 3;
  setups.push_back(setups[4]);
  setups.back().name = "ofi_net_striped";
  setups.back().stripes = 2;
  setups.push_back(with_gpus("ofi_tcp_staged", setups[3], setups[3]));
  setups.push_back(with_gpus("ordered_staged", setups[0], setups[4]));  // as over verbs
  setups.push_back(with_direct_gpus("ordered_direct", setups[0], setups[4]));
  // Not by default: see daemon/fabric/ofi/README.md.
  if (std::getenv("MK_TEST_UDP") != nullptr) {
    setups.push_back(setups[4]);
    setups.back().name = "ofi_udp";
    setups.back().config.provider = "udp;ofi_rxd";
  }
  if (kSoftNic || kSoftEfa) setups.clear();  // the other programs have run them
  if (kSoftEfa) {
    FabricSetup setup;
    setup.name = "efa";
    setup.config.fabric = "ofi";
    setup.config.provider = "efa";
    setup.config.bind_address = "rdmap0s6";
    setups.push_back(setup);
    setups.push_back(setup);
    setups.back().name = "efa_striped";
    setups.back().stripes = 2;
    setups.push_back(with_gpus("efa_staged", setups[0], setups[0]));
#ifdef MK_SOFT_EFA
    // Without libfabric 1.20's headers what would go directly is staged, and that is tested then.
    setups.back().config.verbs.gpu_direct = MK_OFI_DMABUF == 0;
    if (MK_OFI_DMABUF != 0) {
      setups.push_back(with_gpus("efa_direct", setups[0], setups[0]));
      setups.back().gpu_path = "by dmabuf";
    }
#endif
  }
  // Where there is an RDMA port (tests/rdma makes one), verbs in both contracts, and the submission
  // interface and number of queues that are not the default. The kernel's software NIC on a busy
  // machine acknowledges late: 0.5 s until it is asked again.
  if (rdma_ports()) {
    FabricSetup setup;
    setup.config.fabric = "verbs";
    setup.config.verbs.timeout = kSoftNic ? 12 : 17;
    setup.config.connect_timeout_ns = 30'000'000'000;
    setup.name = "verbs";
    setups.push_back(setup);
    setup.name = "verbs_immediate";
    setup.config.verbs.arrival = "immediate";
    setups.push_back(setup);
    // The kernel's software NIC takes no dmabuf; but a plain address of memory on a GPU is one of
    // the host's here, so the way of the peer-memory module is open. Each arrival is flushed.
    setups.push_back(with_gpus("verbs_direct", setups[setups.size() - 2], setup));
    setups.back().gpu_path = kSoftNic ? "by dmabuf" : "by the peer-memory module";
    setups.push_back(with_gpus("verbs_staged", setups[setups.size() - 3], setup));
    setups.back().config.verbs.gpu_direct = false;
    setup.name = "verbs_classic_queues";
    setup.config.verbs.arrival = "flag";
    setup.config.verbs.submission = "classic";
    setup.config.verbs.queues = 4;
    setup.config.verbs.registration_bytes_max = 1 << 20;  // registrations of many pieces
    setups.push_back(setup);
    setup = setups[setups.size() - 4];
    setup.name = "verbs_immediate_striped";
    setup.stripes = 2;
    setups.push_back(setup);
  }
  return setups;
}

/// Those that notice when a peer is gone.
inline std::vector<FabricSetup> setups_that_notice_death() {
  std::vector<FabricSetup> setups = all_setups();
  std::erase_if(setups, [](const FabricSetup& setup) { return !setup.notices_death; });
  return setups;
}

/// A registered buffer, poisoned: the host's, or a GPU's.
struct Memory {
  std::optional<shm::BufferFile> file;
  std::optional<gpu::Allocation> device;
  std::unique_ptr<LocalRegion> region;
  std::uint64_t size = 0;  ///< whole pages

  std::byte* data() const { return device ? device->data() : file->data(); }
  std::uint64_t bytes() const { return size; }
};

/// One endpoint, its flags, and what its polls reported.
class Node {
 public:
  explicit Node(const FabricSetup& setup)
      : endpoint(open(setup)),
        gpus_(setup.gpus),
        ordered(endpoint->capabilities().contract == DeliveryContract::kOrdered),
        flags(memory(4 * kTestFlags, true)) {
    std::memset(flags.data(), 0, flags.bytes());
  }

  Memory memory(std::uint64_t bytes, bool strictly_ordered = false) const {
    if (gpus_ != nullptr && !strictly_ordered) return gpu_memory(bytes);
    auto file = shm::BufferFile::create("fabric-test", bytes);
    if (!file) throw std::runtime_error(file.error().message);
    std::memset(file->data(), std::to_integer<int>(kPoison), file->bytes());
    auto region =
        endpoint->register_memory({file->data(), file->bytes(), file->fd(), 0, strictly_ordered});
    if (!region) throw std::runtime_error(region.error().message);
    const std::uint64_t size = file->bytes();
    return {std::move(*file), std::nullopt, std::move(*region), size};
  }

  /// One poll; returns how many events there were. The proxy thread of this node.
  std::size_t poll(std::size_t events_max = 64) {
    if (gpus_ != nullptr) gpus_->daemons->run(random_() % 6);
    return poll_endpoint(events_max);
  }
  /// The same, while the GPUs stand still.
  std::size_t poll_endpoint(std::size_t events_max = 64) {
    std::vector<Event> events(events_max);
    events.resize(endpoint->poll(events));
    for (const Event& event : events) {
      if (on_event) on_event(event);
      switch (event.kind) {
        case Event::Kind::kCompleted:
          ++completed[event.cookie];
          break;
        case Event::Kind::kFailed:
          ++failed[event.cookie];
          break;
        case Event::Kind::kArrival: {
          ++arrivals[event.immediate];
          auto& epoch = epochs[shm::immediate_flag(event.immediate)];
          epoch = shm::immediate_epoch(event.immediate, epoch);
          break;
        }
        case Event::Kind::kLinkDown:
          ++links_down[event.link];
          break;
        case Event::Kind::kFlushed:
          ADD_FAILURE() << "the engine asks for no flush";
          break;
      }
    }
    return events.size();
  }
  /// The epoch that flag `index` shows.
  std::uint32_t flag(std::uint32_t index) {
    return ordered ? shm::load_acquire(reinterpret_cast<std::uint32_t*>(flags.data()) + index)
                   : epochs[index];
  }
  /// Whether nothing is left to be done by polls: a paced link shows a write's flag some time after
  /// it is completed.
  bool settled() const { return !endpoint->next_due_ns().has_value(); }
  template <class Name>
  std::size_t total(const std::map<Name, int>& counts) const {
    std::size_t sum = 0;
    for (const auto& [name, count] : counts) sum += static_cast<std::size_t>(count);
    return sum;
  }

  std::unique_ptr<Endpoint> endpoint;
  const std::shared_ptr<SlowGpus> gpus_;
  bool ordered;
  Memory flags;
  std::map<std::uint64_t, int> completed;
  std::map<std::uint64_t, int> failed;
  std::map<std::uint32_t, int> arrivals;
  std::vector<std::uint32_t> epochs = std::vector<std::uint32_t>(1u << 16);  ///< of all flags
  std::map<LinkId, int> links_down;
  std::function<void(const Event&)> on_event = {};  ///< of each, by the thread that polls

 private:
  static std::unique_ptr<Endpoint> open(const FabricSetup& setup) {
    auto opened = setup.open();
    if (!opened) throw std::runtime_error(opened.error().message);
    return std::move(*opened);
  }
  /// Of another process, so that the daemon has to open it.
  Memory gpu_memory(std::uint64_t bytes) const {
    auto made = gpu::Allocation::create(gpus_->ranks, static_cast<int>(bytes % 2), bytes);
    if (!made) throw std::runtime_error(made.error().message);
    std::memset(made->data(), std::to_integer<int>(kPoison), made->key().bytes);
    gpu::MemoryKey key = made->key();
    key.process.start_time += 1;
    const std::uint64_t size = (bytes + 4095) / 4096 * 4096;
    // As a client does.
    const auto dmabuf = made->dmabuf();
    auto region = endpoint->register_memory({.bytes = size,
                                             .device = key,
                                             .dmabuf = dmabuf ? dmabuf->fd.get() : -1,
                                             .dmabuf_offset = dmabuf ? dmabuf->offset : 0});
    if (!region) throw std::runtime_error(region.error().message);
    return {std::nullopt, std::move(*made), std::move(*region), size};
  }

  std::minstd_rand random_{7};
};

/// A link of one node to another, with the other's flags imported.
struct TestLink {
  LinkId id = 0;
  std::unique_ptr<RemoteRegion> flags;
};

inline TestLink join(Node& from, const Node& to, const std::string& name = "node 1 rail 0") {
  auto id = from.endpoint->connect(to.endpoint->address(), name);
  if (!id) throw std::runtime_error(id.error().message);
  auto flags = from.endpoint->import_region(*id, to.flags.region->key());
  if (!flags) throw std::runtime_error(flags.error().message);
  return {*id, std::move(*flags)};
}

inline std::unique_ptr<RemoteRegion> import(Node& from, const TestLink& link,
                                            const Memory& memory) {
  auto region = from.endpoint->import_region(link.id, memory.region->key());
  if (!region) throw std::runtime_error(region.error().message);
  return std::move(*region);
}

/// A write that arrives with `epoch` in flag `flag`.
inline Write make_write(const TestLink& link, std::uint32_t flag, std::uint32_t epoch,
                        std::uint64_t cookie) {
  Write write;
  write.flags = link.flags.get();
  write.flag_index = flag;
  write.epoch = epoch;
  write.immediate = shm::make_immediate(0, flag, epoch);
  write.cookie = cookie;
  return write;
}
inline Write make_write(const TestLink& link, std::uint32_t flag, std::uint32_t epoch,
                        std::uint64_t cookie, const Memory& source, std::uint64_t source_offset,
                        const RemoteRegion& target, std::uint64_t target_offset,
                        std::uint32_t bytes) {
  Write write = make_write(link, flag, epoch, cookie);
  write.src = source.region.get();
  write.src_offset = source_offset;
  write.dst = &target;
  write.dst_offset = target_offset;
  write.bytes = bytes;
  return write;
}

/// Polls `nodes` in turn until `done`; false after a generous deadline. Where nothing happened,
/// other threads go first: of the network, and of other tests.
inline bool pump(std::initializer_list<Node*> nodes, const std::function<bool()>& done,
                 std::chrono::seconds limit = std::chrono::seconds(60)) {
  const auto deadline = std::chrono::steady_clock::now() + patience() * limit;
  while (!done()) {
    std::size_t events = 0;
    for (Node* node : nodes) events += node->poll();
    if (events == 0) std::this_thread::yield();
    if (std::chrono::steady_clock::now() > deadline) return false;
  }
  return true;
}

/// Posts all of `writes`, polling `nodes` while there is back-pressure.
inline bool post_all(Node& from, LinkId link, std::span<const Write> writes,
                     std::initializer_list<Node*> nodes) {
  return pump(nodes, [&] {
    writes = writes.subspan(
        from.endpoint->post(link, writes.first(std::min<std::size_t>(writes.size(), 8))));
    return writes.empty();
  });
}

inline void fill_random(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  for (; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random());
}

/// FNV-1a over words: quick, and different for any changed byte.
inline std::uint64_t checksum(std::span<const std::byte> bytes) {
  std::uint64_t sum = 14695981039346656037ull ^ bytes.size();
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, 8);
    sum = (sum ^ word) * 1099511628211ull;
  }
  for (; i < bytes.size(); ++i)
    sum = (sum ^ std::to_integer<std::uint64_t>(bytes[i])) * 1099511628211ull;
  return sum;
}

class FabricTest : public testing::TestWithParam<FabricSetup> {
 protected:
  void SetUp() override {
    const auto endpoint = GetParam().open();
    if (!endpoint && endpoint.error().code == ErrorCode::kUnsupported)
      GTEST_SKIP() << endpoint.error().message;
    ASSERT_TRUE(endpoint) << endpoint.error().message;
  }
};

inline std::string setup_name(const testing::TestParamInfo<FabricSetup>& info) {
  return info.param.name;
}

}  // namespace mk::fabric
