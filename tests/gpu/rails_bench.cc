/// \file
/// rails_bench: what the loopback fabric between two nodes of GPUs carries, through real daemons,
/// with one rank sending or several at once, and how long one write takes.
///
///     rails_bench PROGRAM [BANDWIDTH]      mkerneld; of each rail, e.g. 50GB/s; none: unpaced
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
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

/// Every rank in `senders` sends so much to its rail peer, which awaits all flags; the slowest
/// rank's time in microseconds.
struct Rails {
  std::vector<mk::kernels::RankContext> contexts;
  std::vector<cudaStream_t> streams;
  std::vector<cudaEvent_t> begin, end;
  std::vector<std::uint32_t*> missed;
  std::uint32_t* word = nullptr;
  std::uint32_t epoch = 0;

  double once(const std::vector<std::uint32_t>& senders, std::uint64_t bytes,
              std::uint32_t chunk_bytes) {
    const auto world = static_cast<std::uint32_t>(contexts.size());
    ++epoch;
    mk::shm::store_release(word, 0u);
    for (std::uint32_t r = 0; r < world; ++r) {
      require(cudaSetDevice(static_cast<int>(r)), "device");
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
      require(cudaSetDevice(static_cast<int>(r)), "device");
      require(cudaStreamSynchronize(streams[r]), "launch");
      float ms = 0;
      require(cudaEventElapsedTime(&ms, begin[r], end[r]), "event");
      slowest = std::max(slowest, ms * 1e3);
    }
    return slowest;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "rails_bench PROGRAM [BANDWIDTH]\n");
    return 2;
  }
  constexpr std::uint32_t kLocals = 4;
  constexpr std::uint32_t kWorld = 2 * kLocals;
  constexpr std::uint32_t kFlags = 1024;
  mk::test::DaemonNodes daemons(2, kLocals, argv[1], argc > 2 ? argv[2] : "");
  daemons.attach();
  Rails rails;
  rails.contexts = daemons.memory(kFirstByte + 2 * kBytes, kFlags);
  void* word = nullptr;
  require(cudaHostAlloc(&word, 4, cudaHostAllocPortable | cudaHostAllocMapped), "word");
  rails.word = static_cast<std::uint32_t*>(word);
  for (std::uint32_t r = 0; r < kWorld; ++r) {
    require(cudaSetDevice(static_cast<int>(r)), "device");
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
  const std::vector<std::vector<std::uint32_t>> who = {
      {0}, {0, 4}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5, 6, 7}};
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
          "{:8} {} senders, writes of {:4} KiB: {:6.1f} GB/s each (64 MiB in {:.0f} us), one "
          "write {:.1f} us\n",
          argc > 2 ? argv[2] : "unpaced", senders.size(), chunk >> 10,
          static_cast<double>(kBytes) / all[7] / 1e3, all[7], one[7]);
      std::fflush(stdout);
    }
  }
  std::uint32_t any = 0;
  for (std::uint32_t r = 0; r < kWorld; ++r) {
    std::uint32_t one = 0;
    require(cudaMemcpy(&one, rails.missed[r], 4, cudaMemcpyDeviceToHost), "missed");
    any |= one;
  }
  if (any != 0) fmt::print("FLAGS WERE MISSED\n");
  return any == 0 ? 0 : 1;
}
