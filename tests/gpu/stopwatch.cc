#include "tests/gpu/stopwatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>

#include "shm/atomic.h"
#include "tests/gpu/exchange.h"

namespace mk::test {

using Clock = std::chrono::steady_clock;

namespace {

std::vector<TimedStream> streams_of(const Job& job) {
  std::vector<TimedStream> streams;
  for (std::uint32_t r = 0; r < job.world(); ++r) streams.push_back({job.device(r), job.stream(r)});
  return streams;
}

void make_current(const TimedStream& timed) {
  require(cudaSetDevice(timed.device), "cudaSetDevice");
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

Stopwatch::Stopwatch(Job& job)
    : Stopwatch(streams_of(job), [&job] {
        for (std::uint32_t r = 0; r < job.world(); ++r)
          fmt::print(stderr, "{}\n", job.op(r).progress());
      }) {}

Stopwatch::Stopwatch(std::vector<TimedStream> streams, std::function<void()> tell)
    : streams_(std::move(streams)),
      tell_(std::move(tell)),
      begin_(streams_.size()),
      end_(streams_.size()) {
  void* word = nullptr;
  require(cudaHostAlloc(&word, sizeof *word_, cudaHostAllocPortable | cudaHostAllocMapped), "word");
  word_ = static_cast<std::uint32_t*>(word);
  for (std::size_t r = 0; r < streams_.size(); ++r) {
    make_current(streams_[r]);
    require(cudaEventCreate(&begin_[r]), "event");
    require(cudaEventCreate(&end_[r]), "event");
  }
}

Stopwatch::~Stopwatch() {
  for (cudaEvent_t event : begin_) cudaEventDestroy(event);
  for (cudaEvent_t event : end_) cudaEventDestroy(event);
  cudaFreeHost(word_);
}

void Stopwatch::run(const std::function<void()>& side, Timing& timing, bool held) {
  time(side, 1, timing, held);
}

void Stopwatch::take_turns(const std::vector<Turn>& turns, int launches) {
  constexpr int kWarmUp = 3;
  std::vector<const Turn*> order;
  for (const Turn& turn : turns) order.push_back(&turn);
  std::minstd_rand random;
  for (int round = 0; round < kWarmUp + launches; ++round) {
    if (round == kWarmUp) {
      for (const Turn& turn : turns) *turn.timing = {};
    }
    std::shuffle(order.begin(), order.end(), random);
    for (const Turn* turn : order) run(turn->run, *turn->timing, round != 0);
  }
}

void Stopwatch::endure(const std::function<void()>& side, int launches, Timing& timing) {
  const auto all = [&] {
    side();
    // No more is queued while the streams are held: there is room for some hundred kernels only.
    shm::store_release(word_, 1u);
    for (int i = 1; i < launches; ++i) side();
  };
  time(all, launches, timing, true);
}

void Stopwatch::time(const std::function<void()>& queue, int launches, Timing& timing, bool held) {
  shm::store_release(word_, held ? 0u : 1u);
  for (std::size_t r = 0; r < streams_.size(); ++r) {
    make_current(streams_[r]);
    hold(word_, streams_[r].stream);
    require(cudaEventRecord(begin_[r], streams_[r].stream), "event");
  }
  queue();
  for (std::size_t r = 0; r < streams_.size(); ++r) {
    make_current(streams_[r]);
    require(cudaEventRecord(end_[r], streams_[r].stream), "event");
  }
  shm::store_release(word_, 1u);
  double slowest = 0;
  timing.by_rank.resize(streams_.size());
  for (std::size_t r = 0; r < streams_.size(); ++r) {
    make_current(streams_[r]);
    await(r);
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin_[r], end_[r]), "event");
    const double us = ms * 1e3 / launches;
    timing.by_rank[r].push_back(us);
    slowest = std::max(slowest, us);
  }
  timing.slowest.push_back(slowest);
}

/// Ends the process, with how far everybody has come, when a launch does not end.
void Stopwatch::await(std::size_t index) {
  constexpr std::chrono::seconds kLong{10};
  const auto begin = Clock::now();
  cudaError_t state = cudaSuccess;
  while ((state = cudaStreamQuery(streams_[index].stream)) == cudaErrorNotReady) {
    if (Clock::now() - begin < kLong) continue;
    fmt::print(stderr,
               "what stream {} on GPU {} was given has not ended after {} s: a kernel waits there "
               "for a peer or a daemon, or the work takes longer; run fewer rows, or each side "
               "alone, to see which it is\n",
               index, streams_[index].device, kLong.count());
    tell_();
    std::fflush(nullptr);
    std::_Exit(1);
  }
  require(state, "launch");
}

}  // namespace mk::test
