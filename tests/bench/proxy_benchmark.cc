// What the proxy engine itself costs, over the fabric that moves nothing. It times the check of one
// command, and a pass over rings that are already full (also through the verbs fabric's data path,
// with the driver stubbed out). It times the same with a producer on another thread, and the time
// from a command's commit to its post.
//
// Read the figures with the machine in mind: the two-thread ones need two cores to themselves.
#include <benchmark/benchmark.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/fabric/null_fabric.h"
#include "daemon/proxy/command_validation.h"
#include "daemon/proxy/proxy.h"
#include "shm/host/segment.h"
#include "shm/ring.h"
#ifdef MK_HAVE_VERBS
#include "tests/bench/stub_verbs.h"
#endif

namespace mk::daemon {
namespace {

constexpr std::uint32_t kSlotCountLog2 = 12;
constexpr std::uint16_t kHandle = 1;
constexpr std::uint16_t kFirstPeerRank = 1;
constexpr std::uint64_t kBufferBytes = 1ull << 30;
constexpr std::uint32_t kWriteBytes = 4096;
constexpr std::uint32_t kBurst = 32;  // what one warp commits under one fence

template <class T>
T or_die(Result<T> result) {
  if (result) return std::move(*result);
  std::fprintf(stderr, "proxy_benchmark: %s\n", result.error().message.c_str());
  std::exit(1);
}

/// A proxy, on the null fabric unless another is given, with one session, its buffer, and rail
/// peers on links of their own.
struct Rig {
  Rig(std::uint32_t lanes, std::uint32_t peers, const ProxyOptions& options = {},
      std::unique_ptr<fabric::Endpoint> fabric = fabric::make_null_endpoint({}))
      : segment(
            or_die(shm::Segment::create({lanes, kSlotCountLog2, shm::kFlagsDefault}, 1, 1, 0, 0))),
        proxy(std::move(fabric), options, [](ProxyEvent event) {
          if (const auto* fault = std::get_if<SessionFault>(&event)) {
            std::fprintf(stderr, "proxy_benchmark: session failed: %s\n", fault->reason.c_str());
            std::exit(1);
          }
        }) {
    fabric::Endpoint& endpoint = proxy.endpoint();
    local = or_die(endpoint.register_memory({}));
    proxy.apply(
        AddSession{.slot = 0, .segment = &segment, .stats = &stats, .outstanding_max = 1024});
    proxy.apply(BindBuffer{0, kHandle, local.get(), kBufferBytes});
    for (std::uint32_t i = 0; i < peers; ++i) {
      const fabric::LinkId link = or_die(endpoint.connect({}, "bench"));
      remotes.push_back(or_die(endpoint.import_region(link, {})));
      const auto rank = static_cast<std::uint16_t>(kFirstPeerRank + i);
      proxy.apply(
          BindPeer{0, rank, link, &link_stats, 0, remotes.back().get(), shm::kFlagsDefault});
      proxy.apply(BindPeerBuffer{0, rank, kHandle, remotes.back().get(), kBufferBytes});
    }
    for (std::uint32_t i = 0; i < lanes; ++i) producers.push_back({segment.ring(i)});
  }

  static shm::Command command(std::uint64_t number, std::uint32_t peers) {
    shm::Command command;
    command.opcode = shm::Opcode::kWrite;
    command.peer = static_cast<std::uint16_t>(kFirstPeerRank + number % peers);
    command.src_handle = kHandle;
    command.dst_handle = kHandle;
    command.src_offset = number * kWriteBytes % kBufferBytes;
    command.dst_offset = command.src_offset;
    command.bytes = kWriteBytes;
    command.flag_index = static_cast<std::uint32_t>(number % shm::kFlagsDefault);
    command.epoch = 1;
    return command;
  }

  std::uint64_t completed() const {
    std::uint64_t sum = 0;
    for (const auto& producer : producers) sum += producer.completed();
    return sum;
  }

  SessionStats stats;
  LinkStats link_stats;
  shm::Segment segment;
  std::vector<std::unique_ptr<fabric::RemoteRegion>> remotes;
  std::unique_ptr<fabric::LocalRegion> local;
  std::vector<shm::RingProducer> producers;
  Proxy proxy;
};

double batch_mean(const LinkStats& stats) {
  return stats.batches.value() == 0 ? 0
                                    : static_cast<double>(stats.messages.value()) /
                                          static_cast<double>(stats.batches.value());
}

/// The histogram's bucket below which the fraction lies, as its inclusive lower bound in ns.
double percentile_ns(const LatencyHistogram& histogram, double fraction) {
  std::uint64_t total = 0;
  for (std::uint32_t i = 0; i < LatencyHistogram::kBuckets; ++i) total += histogram.count(i);
  std::uint64_t seen = 0;
  for (std::uint32_t i = 0; i < LatencyHistogram::kBuckets; ++i) {
    seen += histogram.count(i);
    if (static_cast<double>(seen) >= fraction * static_cast<double>(total)) {
      return static_cast<double>(LatencyHistogram::lower_bound_ns(i));
    }
  }
  return 0;
}

// -- one command's checks
// -------------------------------------------------------------------------------------------

void check_one_command(benchmark::State& state) {
  constexpr std::uint64_t kCommands = 1024;
  const auto region = or_die(fabric::make_null_endpoint({})->register_memory({}));
  const auto remote = or_die(fabric::make_null_endpoint({})->import_region(0, {}));
  Bindings bindings(shm::kWorldMax, shm::kNodesMax);
  bindings.buffers.bind(kHandle, region.get(), kBufferBytes);
  auto peer = std::make_unique<Peer>();
  peer->rank = kFirstPeerRank;
  peer->flag_count = shm::kFlagsDefault;
  peer->buffers.bind(kHandle, remote.get(), kBufferBytes);
  bindings.bind_peer(std::move(peer));
  std::vector<shm::CommandSlot> slots(kCommands);
  for (std::uint64_t i = 0; i < kCommands; ++i) {
    shm::encode(Rig::command(i, 1), slots[i].words);
    slots[i].words[shm::kCommitWord] = shm::commit_word(i, kSlotCountLog2);
  }
  AcceptedCommand accepted;
  for (auto _ : state) {
    for (std::uint64_t i = 0; i < kCommands; ++i) {
      if (check_command(slots[i].words, i, bindings, accepted) != Flaw::kNone) std::abort();
      benchmark::DoNotOptimize(accepted);
    }
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(kCommands));
}
BENCHMARK(check_one_command);

/// What this thread has run so far: its wall time, were it alone on its CPU.
double thread_seconds() {
  timespec time;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// -- a thread's whole work: rings full beforehand, `step` until everything has completed
// -----------------------------

void drain(benchmark::State& state, Rig& rig, std::uint32_t peers) {
  std::uint64_t total = 0;
  for (auto _ : state) {
    std::uint64_t number = 0;
    const auto commit_time = static_cast<std::uint32_t>(shm::monotonic_ns()) | 1;
    for (auto& producer : rig.producers) {
      for (;;) {
        shm::Command command = Rig::command(number, peers);
        command.commit_time_ns = commit_time;
        if (!producer.try_push(command)) break;
        ++number;
      }
    }
    total += number;
    const double start = thread_seconds();
    while (rig.completed() != total) rig.proxy.step();
    state.SetIterationTime(thread_seconds() - start);
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(total));
  state.counters["batch_mean"] = batch_mean(rig.link_stats);
}

void drain_full_rings(benchmark::State& state) {
  const auto peers = static_cast<std::uint32_t>(state.range(1));
  Rig rig(static_cast<std::uint32_t>(state.range(0)), peers);
  drain(state, rig, peers);
}
BENCHMARK(drain_full_rings)
    ->ArgNames({"lanes", "peers"})
    ->Args({1, 1})
    ->Args({4, 1})
    ->Args({16, 1})
    ->Args({4, 3})
    ->UseManualTime();

#ifdef MK_HAVE_VERBS
void drain_full_rings_through_verbs(benchmark::State& state) {
  Rig rig(static_cast<std::uint32_t>(state.range(0)), 1, {},
          std::make_unique<fabric::verbs::StubVerbsEndpoint>());
  drain(state, rig, 1);
}
BENCHMARK(drain_full_rings_through_verbs)->ArgName("lanes")->Arg(1)->Arg(4)->UseManualTime();
#endif

// -- a pass that finds nothing: what a hot proxy adds to a new command's latency
// --------------------------------------

void idle_pass(benchmark::State& state) {
  Rig rig(static_cast<std::uint32_t>(state.range(0)), 1);
  rig.proxy.step();
  for (auto _ : state) benchmark::DoNotOptimize(rig.proxy.step());
}
BENCHMARK(idle_pass)->ArgName("lanes")->Arg(1)->Arg(16);

// -- a producer thread and the proxy's own thread
// --------------------------------------------------------------------

void two_threads(benchmark::State& state) {
  const auto lanes = static_cast<std::uint32_t>(state.range(0));
  constexpr std::uint64_t kRound = 1u << 20;
  ProxyOptions options;
  options.cpu = 1;
  Rig rig(lanes, 1, options);
  if (Status started = rig.proxy.start(); !started) {
    state.SkipWithError(started.error().message.c_str());
    return;
  }
  std::uint64_t total = 0;
  for (auto _ : state) {
    const std::uint64_t target = total + kRound;
    std::size_t lane = 0;
    while (total != target) {
      shm::RingProducer& producer = rig.producers[lane];
      lane = lane + 1 == lanes ? 0 : lane + 1;
      const auto commit_time = static_cast<std::uint32_t>(shm::monotonic_ns()) | 1;
      for (std::uint32_t i = 0; i < kBurst && total != target; ++i) {
        shm::Command command = Rig::command(total, 1);
        command.commit_time_ns = commit_time;
        if (!producer.try_push(command)) break;
        ++total;
      }
    }
    while (rig.completed() != total) __builtin_ia32_pause();
  }
  rig.proxy.stop();
  state.SetItemsProcessed(static_cast<std::int64_t>(total));
  state.counters["batch_mean"] = batch_mean(rig.link_stats);
}
BENCHMARK(two_threads)
    ->ArgName("lanes")
    ->Arg(1)
    ->Arg(4)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

// -- from commit to post, when hot
// -----------------------------------------------------------------------------------

/// One command at a time, each after the last has completed, `gap_ns` apart.
void commit_to_post(benchmark::State& state) {
  const auto gap_ns = static_cast<std::uint64_t>(state.range(0));
  ProxyOptions options;
  options.cpu = 1;
  Rig rig(1, 1, options);
  if (Status started = rig.proxy.start(); !started) {
    state.SkipWithError(started.error().message.c_str());
    return;
  }
  std::uint64_t number = 0;
  for (auto _ : state) {
    if (gap_ns != 0) {
      const std::uint64_t until = shm::monotonic_ns() + gap_ns;
      while (shm::monotonic_ns() < until) __builtin_ia32_pause();
    }
    shm::Command command = Rig::command(number, 1);
    command.commit_time_ns = static_cast<std::uint32_t>(shm::monotonic_ns()) | 1;
    if (!rig.producers[0].try_push(command)) std::abort();
    ++number;
    while (rig.completed() != number) __builtin_ia32_pause();
  }
  rig.proxy.stop();
  const LaneStats& lane = rig.stats.lanes[0];
  state.counters["commit_to_post_p50_ns"] = percentile_ns(lane.commit_to_post, 0.5);
  state.counters["commit_to_post_p99_ns"] = percentile_ns(lane.commit_to_post, 0.99);
  state.counters["post_to_completion_p50_ns"] = percentile_ns(lane.post_to_completion, 0.5);
}
BENCHMARK(commit_to_post)->ArgName("gap_ns")->Arg(0)->Arg(1000)->Arg(10000)->UseRealTime();

}  // namespace
}  // namespace mk::daemon

BENCHMARK_MAIN();
