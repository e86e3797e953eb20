/// \file
/// rails_bench: what a fabric between two nodes of GPUs carries, through real daemons, with one
/// rank sending or several at once, and how long one write takes.
///
///     rails_bench PROGRAM [--fabric loopback] [--bandwidth 50GB/s] [--locals 4] [--mkctl PROGRAM]
///
/// PROGRAM: mkerneld. Bandwidth: of each rail of the loopback fabric; without it, unpaced. Ranks
/// share the GPUs where there are fewer. With --mkctl it ends with what `mkctl link show` says.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "shm/atomic.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/exchange.h"
#include "tests/gpu/gemm_reference.h"

namespace {

using mk::test::chunks_of;
using mk::test::require;

constexpr std::uint64_t kFirstByte = 1 << 16;
constexpr std::uint64_t kBytes = 64 << 20;

struct Options {
  std::string mkerneld, mkctl, bandwidth, fabric = "loopback";
  std::uint32_t locals = 4;
};

struct Rails {
  std::uint32_t devices = 1;
  std::vector<mk::kernels::RankContext> contexts;
  std::vector<cudaStream_t> streams;
  std::vector<cudaEvent_t> begin, end;
  std::vector<std::uint32_t*> missed;
  std::uint32_t* word = nullptr;
  std::uint32_t epoch = 0;

  void set_device(std::uint32_t rank) const {
    require(cudaSetDevice(static_cast<int>(rank % devices)), "device");
  }

  /// Every rank in `senders` sends so much to its rail peer, which awaits all flags; the slowest
  /// rank's time in microseconds.
  double once(const std::vector<std::uint32_t>& senders, std::uint64_t bytes,
              std::uint32_t chunk_bytes) {
    const auto world = static_cast<std::uint32_t>(contexts.size());
    ++epoch;
    mk::shm::store_release(word, 0u);
    for (std::uint32_t r = 0; r < world; ++r) {
      set_device(r);
      mk::test::hold(word, streams[r]);
      require(cudaEventRecord(begin[r], streams[r]), "event");
      const std::uint32_t peer = (r + world / 2) % world;
      if (std::find(senders.begin(), senders.end(), r) != senders.end()) {
        mk::test::post(contexts[r], r < world / 2 ? 1 : 0,
                       {kFirstByte, kFirstByte + kBytes, bytes, 0, chunk_bytes}, epoch, streams[r]);
      }
      if (std::find(senders.begin(), senders.end(), peer) != senders.end()) {
        mk::test::await_flags(contexts[r], 0, chunks_of(bytes, chunk_bytes), epoch, missed[r],
                              streams[r]);
      }
      require(cudaEventRecord(end[r], streams[r]), "event");
    }
    mk::shm::store_release(word, 1u);
    double slowest = 0;
    for (std::uint32_t r = 0; r < world; ++r) {
      set_device(r);
      require(cudaStreamSynchronize(streams[r]), "launch");
      float ms = 0;
      require(cudaEventElapsedTime(&ms, begin[r], end[r]), "event");
      slowest = std::max(slowest, ms * 1e3);
    }
    return slowest;
  }
};

int usage() {
  fmt::print(stderr,
             "rails_bench PROGRAM [--fabric NAME] [--bandwidth 50GB/s] [--locals N] [--mkctl "
             "PROGRAM]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--fabric" && i + 1 < argc) {
      options.fabric = argv[++i];
    } else if (argument == "--bandwidth" && i + 1 < argc) {
      options.bandwidth = argv[++i];
    } else if (argument == "--locals" && i + 1 < argc) {
      options.locals = static_cast<std::uint32_t>(std::atoi(argv[++i]));
    } else if (argument == "--mkctl" && i + 1 < argc) {
      options.mkctl = argv[++i];
    } else if (options.mkerneld.empty() && argument.rfind("--", 0) != 0) {
      options.mkerneld = argument;
    } else {
      return usage();
    }
  }
  if (options.mkerneld.empty() || options.locals == 0) return usage();
  const std::uint32_t world = 2 * options.locals;
  constexpr std::uint32_t kFlags = 1024;
  int devices = 0;
  require(cudaGetDeviceCount(&devices), "devices");
  mk::test::DaemonNodes daemons(
      2, options.locals,
      mk::test::dealt_out(2 * options.locals, static_cast<std::uint32_t>(devices)),
      options.mkerneld, options.bandwidth, options.fabric);
  daemons.attach();
  Rails rails;
  rails.devices = static_cast<std::uint32_t>(devices);
  rails.contexts = daemons.memory(kFirstByte + 2 * kBytes, kFlags);
  void* word = nullptr;
  require(cudaHostAlloc(&word, 4, cudaHostAllocPortable | cudaHostAllocMapped), "word");
  rails.word = static_cast<std::uint32_t*>(word);
  for (std::uint32_t r = 0; r < world; ++r) {
    rails.set_device(r);
    rails.streams.push_back(nullptr);
    require(cudaStreamCreateWithFlags(&rails.streams[r], cudaStreamNonBlocking), "stream");
    rails.begin.push_back(nullptr);
    rails.end.push_back(nullptr);
    require(cudaEventCreate(&rails.begin[r]), "event");
    require(cudaEventCreate(&rails.end[r]), "event");
    void* missed = nullptr;
    require(cudaMalloc(&missed, 4), "missed");
    require(cudaMemset(missed, 0, 4), "missed");
    rails.missed.push_back(static_cast<std::uint32_t*>(missed));
  }
  // One, both ends of a rail, a node, everybody; with few ranks some of these are the same.
  std::vector<std::uint32_t> node, everybody;
  for (std::uint32_t r = 0; r < world; ++r) {
    everybody.push_back(r);
    if (r < options.locals) node.push_back(r);
  }
  const std::set<std::vector<std::uint32_t>> who = {{0}, {0, options.locals}, node, everybody};
  for (const auto& senders : who) {
    for (const std::uint32_t chunk : {64u << 10, 256u << 10, 1u << 20, 4u << 20}) {
      std::vector<double> all, one;
      for (int i = 0; i < 12; ++i) {
        all.push_back(rails.once(senders, kBytes, chunk));
        one.push_back(rails.once(senders, chunk, chunk));
      }
      std::sort(all.begin() + 2, all.end());
      std::sort(one.begin() + 2, one.end());
      fmt::print(
          "{} {:8} {} senders, writes of {:4} KiB: {:6.1f} GB/s each (64 MiB in {:.0f} us), one "
          "write {:.1f} us\n",
          options.fabric, options.bandwidth.empty() ? "unpaced" : options.bandwidth, senders.size(),
          chunk >> 10, static_cast<double>(kBytes) / all[7] / 1e3, all[7], one[7]);
      std::fflush(stdout);
    }
  }
  for (std::uint32_t of = 0; of < 2 && !options.mkctl.empty(); ++of) {
    const std::string command =
        fmt::format("{} --address {} link show", options.mkctl, daemons.admin_address(of));
    if (std::system(command.c_str()) != 0) fmt::print("{} FAILED\n", command);
  }
  std::uint32_t any = 0;
  for (std::uint32_t r = 0; r < world; ++r) {
    std::uint32_t one = 0;
    require(cudaMemcpy(&one, rails.missed[r], 4, cudaMemcpyDeviceToHost), "missed");
    any |= one;
  }
  if (any != 0) fmt::print("FLAGS WERE MISSED\n");
  return any == 0 ? 0 : 1;
}
