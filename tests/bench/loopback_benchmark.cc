// The loopback fabric on the real clock: what an unpaced link carries, and how well a paced one
// keeps its rate when the proxy, which sleeps until `next_due_ns`, wakes late.
//
//   loopback_benchmark [--seconds 1] [--json out.json]
#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "shm/host/buffer_file.h"

namespace mk::fabric {
namespace {

using Clock = std::chrono::steady_clock;

template <class T>
T need(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message);
  return std::move(*result);
}

struct Side {
  explicit Side(const LinkModel& model, std::uint64_t bytes)
      : file(need(shm::BufferFile::create("bench", bytes))) {
    EndpointConfig config;
    config.link_model = model;
    endpoint = need(open_endpoint(config));
    region = need(endpoint->register_memory({file.data(), file.bytes(), file.fd(), 0}));
  }
  shm::BufferFile file;
  std::unique_ptr<Endpoint> endpoint;
  std::unique_ptr<LocalRegion> region;
};

/// Keeps the link full for `seconds`, waking up to `late_us_max` late whenever nothing is due;
/// returns bytes per second.
double stream(const LinkModel& model, std::uint32_t bytes, double seconds, unsigned late_us_max) {
  constexpr std::uint32_t kSlots = 16;
  Side a(model, std::uint64_t{bytes} * kSlots);
  Side b(model, std::uint64_t{bytes} * kSlots);
  const LinkId link = need(a.endpoint->connect(b.endpoint->address(), "the receiver"));
  const auto remote = need(a.endpoint->import_region(link, b.region->key()));
  std::mt19937_64 random(1);
  std::uint64_t posted = 0;
  std::uint64_t completed = 0;
  const auto pass = [&](bool post) {
    while (post) {
      Write write;
      write.src = a.region.get();
      write.dst = remote.get();
      write.src_offset = write.dst_offset = posted % kSlots * bytes;
      write.bytes = bytes;
      write.cookie = posted;
      if (a.endpoint->post(link, {&write, 1}) == 0) break;
      ++posted;
    }
    const auto due =
        Clock::time_point(std::chrono::nanoseconds(a.endpoint->next_due_ns().value_or(0)));
    if (late_us_max > 0 && due > Clock::now()) {
      std::this_thread::sleep_until(due + std::chrono::microseconds(random() % late_us_max));
    }
    std::array<Event, 256> events;
    completed += a.endpoint->poll(events);
  };
  const auto warm = Clock::now();
  while (completed < 2 * kSlots) pass(true);
  while (Clock::now() - warm < std::chrono::milliseconds(50)) pass(true);
  const auto start = Clock::now();
  const std::uint64_t before = completed;
  while (std::chrono::duration<double>(Clock::now() - start).count() < seconds) pass(true);
  const double took = std::chrono::duration<double>(Clock::now() - start).count();
  return static_cast<double>(completed - before) * bytes / took;
}

int run(int argc, char** argv) {
  double seconds = 1;
  std::string json;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--seconds")
      seconds = std::stod(argv[i + 1]);
    else if (name == "--json")
      json = argv[i + 1];
    else
      throw std::runtime_error("unknown option " + name);
  }
  nlohmann::json report;
  report["benchmark"] = "loopback_benchmark";
  for (const std::uint32_t bytes : {4096u, 65536u, 262144u, 2u << 20}) {
    report["unpaced"].push_back(
        {{"bytes_per_write", bytes}, {"bytes_per_second", stream({}, bytes, seconds, 0)}});
  }
  for (const double rate : {0.5e9, 1e9, 2e9}) {
    for (const unsigned late_us : {0u, 500u, 5000u}) {
      const double got = stream({rate, 10'000}, 262144, seconds, late_us);
      report["paced"].push_back({{"model_bytes_per_second", rate},
                                 {"late_us_max", late_us},
                                 {"bytes_per_second", got},
                                 {"error_percent", 100 * (got / rate - 1)}});
    }
  }
  if (!json.empty()) std::ofstream(json) << report.dump(2) << '\n';
  std::cout << report.dump(2) << std::endl;
  return 0;
}

}  // namespace
}  // namespace mk::fabric

int main(int argc, char** argv) {
  try {
    return mk::fabric::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "loopback_benchmark: " << error.what() << '\n';
    return 1;
  }
}
