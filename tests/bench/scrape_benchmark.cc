// What a scrape costs a proxy: commands per second of its thread's CPU time over the null fabric,
// with nobody looking and with a scraper at 10 Hz, round by round in turn. The scraper is a thread
// of its own that asks the real HTTP endpoint; what it asks about is the live counters of the
// proxy.
//
//   scrape_benchmark [--rounds N] [--seconds S] [--hz H]      one JSON object on stdout
#include <arpa/inet.h>
#include <fmt/format.h>
#include <sys/socket.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "daemon/fabric/null_fabric.h"
#include "daemon/metrics/metrics.h"
#include "daemon/proxy/proxy.h"
#include "shm/host/segment.h"
#include "shm/host/unique_fd.h"

namespace mk::daemon {
namespace {

constexpr std::uint32_t kLanes = 8;
constexpr std::uint32_t kSlotCountLog2 = 12;
constexpr std::uint16_t kHandle = 1, kPeer = 1;
constexpr std::uint64_t kBufferBytes = 1ull << 30;

template <class T>
T or_die(Result<T> result) {
  if (result) return std::move(*result);
  fmt::print(stderr, "scrape_benchmark: {}\n", result.error().message);
  std::exit(1);
}

/// One session with full rings, and its proxy, driven by hand.
class Rig {
 public:
  Rig()
      : segment_(
            or_die(shm::Segment::create({kLanes, kSlotCountLog2, shm::kFlagsDefault}, 1, 1, 0, 0))),
        proxy_(fabric::make_null_endpoint({}), {}, [](ProxyEvent event) {
          if (const auto* fault = std::get_if<SessionFault>(&event)) {
            fmt::print(stderr, "scrape_benchmark: {}\n", fault->reason);
            std::exit(1);
          }
        }) {
    fabric::Endpoint& endpoint = proxy_.endpoint();
    local_ = or_die(endpoint.register_memory({}));
    proxy_.apply(AddSession{
        .slot = 0, .segment = &segment_, .stats = stats_.get(), .outstanding_max = 1024});
    proxy_.apply(BindBuffer{0, kHandle, local_.get(), kBufferBytes});
    const fabric::LinkId link = or_die(endpoint.connect({}, "bench"));
    remote_ = or_die(endpoint.import_region(link, {}));
    proxy_.apply(BindPeer{0, kPeer, link, link_stats_.get(), 0, remote_.get(), shm::kFlagsDefault});
    proxy_.apply(BindPeerBuffer{0, kPeer, kHandle, remote_.get(), kBufferBytes});
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) producers_.push_back({segment_.ring(lane)});
  }

  /// Fills the rings; then what the proxy needs to empty them, in seconds of CPU time.
  double drain(std::uint64_t& commands) {
    const auto commit_time = static_cast<std::uint32_t>(shm::monotonic_ns()) | 1;
    for (auto& producer : producers_) {
      shm::Command command;
      command.opcode = shm::Opcode::kWrite;
      command.peer = kPeer;
      command.src_handle = command.dst_handle = kHandle;
      command.bytes = 4096;
      command.epoch = 1;
      command.commit_time_ns = commit_time;
      while (producer.try_push(command)) ++commands;
    }
    const double begin = cpu_seconds();
    while (!empty()) proxy_.step();
    return cpu_seconds() - begin;
  }

  MetricsSample sample() const {
    MetricsSample sample;
    sample.rails = {&proxy_.stats()};
    ControlSnapshot& control = sample.control.emplace();
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      QueueInfo& queue = control.queues.emplace_back();
      queue.lane = lane;
      queue.job = "bench";
      queue.stats = stats_;
    }
    LinkInfo& link = control.links.emplace_back();
    link.state = "up";
    link.stats = link_stats_;
    return sample;
  }

 private:
  static double cpu_seconds() {
    timespec time;
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  }
  bool empty() const {
    return std::all_of(producers_.begin(), producers_.end(), [](const shm::RingProducer& one) {
      return one.completed() == one.produced;
    });
  }

  const std::shared_ptr<SessionStats> stats_ = std::make_shared<SessionStats>();
  const std::shared_ptr<LinkStats> link_stats_ = std::make_shared<LinkStats>();
  shm::Segment segment_;
  std::unique_ptr<fabric::LocalRegion> local_;
  std::unique_ptr<fabric::RemoteRegion> remote_;
  std::vector<shm::RingProducer> producers_;
  Proxy proxy_;
};

/// Asks once; returns the bytes of the answer.
std::size_t scrape(std::uint16_t port) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return 0;
  constexpr std::string_view kRequest = "GET /metrics HTTP/1.1\r\nHost: bench\r\n\r\n";
  (void)::send(fd.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL);
  std::size_t bytes = 0;
  char buffer[16384];
  for (ssize_t got; (got = ::recv(fd.get(), buffer, sizeof buffer, 0)) > 0;) {
    bytes += static_cast<std::size_t>(got);
  }
  return bytes;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

int run(int argc, char** argv) {
  CLI::App app("What a scrape costs a proxy", "scrape_benchmark");
  int rounds = 15;
  double seconds = 1, hz = 10;
  app.add_option("--rounds", rounds, "Pairs of rounds")->capture_default_str();
  app.add_option("--seconds", seconds, "Of one round")->capture_default_str();
  app.add_option("--hz", hz, "Scrapes per second")->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  Rig rig;
  auto endpoint =
      or_die(MetricsEndpoint::listen({.host = "127.0.0.1"}, [&rig] { return rig.sample(); }));
  std::atomic<bool> scraping{false}, ending{false};
  std::atomic<std::uint64_t> scrapes{0}, answer_bytes{0};
  std::thread scraper([&] {
    auto next = std::chrono::steady_clock::now();
    while (!ending) {
      next += std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 / hz));
      std::this_thread::sleep_until(next);
      if (!scraping) continue;
      answer_bytes = scrape(endpoint->address().port);
      ++scrapes;
    }
  });
  const auto round = [&](bool with_scraper) {
    scraping = with_scraper;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::uint64_t commands = 0;
    double spent = 0;
    while (std::chrono::steady_clock::now() < until) spent += rig.drain(commands);
    return static_cast<double>(commands) / spent;
  };
  round(false);  // warm
  std::vector<double> without, with, ratios;
  for (int i = 0; i < rounds; ++i) {
    // Who is first changes, so that a machine that slows down does not count against one of them.
    const bool first = i % 2 == 0;
    double rate[2];
    rate[first] = round(first);
    rate[!first] = round(!first);
    without.push_back(rate[0]);
    with.push_back(rate[1]);
    ratios.push_back(rate[1] / rate[0]);
  }
  ending = true;
  scraper.join();
  const nlohmann::ordered_json out = {
      {"benchmark", "scrape_cost"},
      {"what", "commands per second of the proxy thread's CPU time, null fabric, 8 full rings"},
      {"scrapes_per_second", hz},
      {"scrapes", scrapes.load()},
      {"answer_bytes", answer_bytes.load()},
      {"rounds", rounds},
      {"round_seconds", seconds},
      {"commands_per_second_without", without},
      {"commands_per_second_with", with},
      {"median_without", median(without)},
      {"median_with", median(with)},
      {"median_ratio", median(ratios)},
      {"least_ratio", *std::min_element(ratios.begin(), ratios.end())},
      {"greatest_ratio", *std::max_element(ratios.begin(), ratios.end())}};
  fmt::print("{}\n", out.dump(2));
  return scrapes.load() > 0 && answer_bytes.load() > 0 ? 0 : 1;
}

}  // namespace
}  // namespace mk::daemon

int main(int argc, char** argv) { return mk::daemon::run(argc, argv); }
