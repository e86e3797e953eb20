// Bandwidth of the verbs fabric's endpoint: one process, two endpoints on one RDMA port, writes
// with a bounded number outstanding, in MiB/s as perftest counts them. tests/rdma/figures.sh runs
// it interleaved with ib_write_bw.
//
//   verbs_benchmark [--bytes 65536] [--count 500] [--window 16] [--arrival flag]
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/fabric/fabric.h"

namespace mk::fabric {
namespace {

constexpr std::uint32_t kSlots = 16;

template <class T>
T need(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message);
  return std::move(*result);
}

struct Options {
  std::uint32_t bytes = 65536;
  std::uint64_t count = 500;
  std::uint64_t window = 16;
  std::string arrival = "flag";
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const std::string value = argv[i + 1];
    if (flag == "--bytes") {
      options.bytes = static_cast<std::uint32_t>(std::stoul(value));
    } else if (flag == "--count") {
      options.count = std::stoull(value);
    } else if (flag == "--window") {
      options.window = std::stoull(value);
    } else if (flag == "--arrival") {
      options.arrival = value;
    } else {
      throw std::runtime_error("unknown argument " + flag);
    }
  }
  return options;
}

int run(const Options& options) {
  EndpointConfig config;
  config.fabric = "verbs";
  config.verbs.timeout = 17;
  config.verbs.arrival = options.arrival;
  const auto sender = need(open_endpoint(config));
  const auto receiver = need(open_endpoint(config));
  std::vector<std::byte> source(std::size_t{options.bytes} * kSlots);
  std::vector<std::byte> target(source.size());
  std::vector<std::uint32_t> flags(4096);
  const auto from = need(sender->register_memory({source.data(), source.size(), -1, 0}));
  const auto to = need(receiver->register_memory({target.data(), target.size(), -1, 0}));
  const auto flag_memory = need(receiver->register_memory(
      {reinterpret_cast<std::byte*>(flags.data()), flags.size() * 4, -1, 0, true}));
  const LinkId link = need(sender->connect(receiver->address(), "the receiver"));
  const auto remote = need(sender->import_region(link, to->key()));
  const auto remote_flags = need(sender->import_region(link, flag_memory->key()));

  std::array<Event, 64> events;
  std::uint64_t posted = 0;
  std::uint64_t completed = 0;
  const auto start = std::chrono::steady_clock::now();
  while (completed < options.count) {
    std::array<Write, 8> writes;
    std::size_t batch = 0;
    while (batch < writes.size() && posted + batch < options.count &&
           posted + batch - completed < options.window) {
      const std::uint64_t number = posted + batch;
      Write& write = writes[batch++];
      write.src = from.get();
      write.dst = remote.get();
      write.flags = remote_flags.get();
      write.src_offset = write.dst_offset = number % kSlots * options.bytes;
      write.bytes = options.bytes;
      write.flag_index = static_cast<std::uint32_t>(number % flags.size());
      write.epoch = 1;
      write.cookie = number;
    }
    posted += sender->post(link, std::span(writes).first(batch));
    const std::size_t count = sender->poll(events);
    for (std::size_t i = 0; i < count; ++i) {
      if (events[i].kind != Event::Kind::kCompleted)
        throw std::runtime_error("the link failed: " + sender->link_reason(link));
      ++completed;
    }
    if (options.arrival == "immediate") receiver->poll(events);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%.2f\n", static_cast<double>(options.bytes) * static_cast<double>(options.count) /
                            seconds.count() / (1 << 20));
  return 0;
}

}  // namespace
}  // namespace mk::fabric

int main(int argc, char** argv) {
  try {
    return mk::fabric::run(mk::fabric::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "verbs_benchmark: %s\n", error.what());
    return 1;
  }
}
