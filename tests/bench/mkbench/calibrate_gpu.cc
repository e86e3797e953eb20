#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda/core/gemm.h"
#include "tests/bench/mkbench/attention_core.h"
#include "tests/bench/mkbench/calibrate.h"

namespace mk::bench {
namespace {

namespace cuda = kernels::cuda;

Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return fail(ErrorCode::kSystem, "calibrate, {}: {}", what, cudaGetErrorString(error));
}

struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
using Memory = std::unique_ptr<void, Free>;
Result<Memory> allocate(std::size_t bytes) {
  void* memory = nullptr;
  MK_RETURN_IF_ERROR(check(cudaMalloc(&memory, bytes), "memory"));
  Memory made(memory);
  // Values decide what a GPU's clock does: sign and low bits at random, exponents of 1/4 to 1.
  constexpr std::size_t kDrawn = 1 << 20;
  std::mt19937 random(1);
  std::vector<std::uint16_t> drawn(kDrawn);
  for (std::uint16_t& element : drawn)
    element = static_cast<std::uint16_t>(0x3e80 + (random() & 0x80ff));
  for (std::size_t at = 0; at < bytes; at += 2 * kDrawn) {
    MK_RETURN_IF_ERROR(check(cudaMemcpy(static_cast<std::byte*>(memory) + at, drawn.data(),
                                        std::min(2 * kDrawn, bytes - at), cudaMemcpyHostToDevice),
                             "memory"));
  }
  return made;
}

struct EndEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EndEvent>;
Result<Event> make_event() {
  cudaEvent_t event = nullptr;
  MK_RETURN_IF_ERROR(check(cudaEventCreate(&event), "an event"));
  return Event(event);
}

/// The mean of `runs` in a row after one that warms up, in us. `put()` puts one on the stream.
template <class Put>
Result<double> time_us(int runs, Put&& put) {
  MK_ASSIGN_OR_RETURN(const Event begin, make_event());
  MK_ASSIGN_OR_RETURN(const Event end, make_event());
  MK_RETURN_IF_ERROR(put());
  MK_RETURN_IF_ERROR(check(cudaEventRecord(begin.get(), nullptr), "an event"));
  for (int run = 0; run < runs; ++run) MK_RETURN_IF_ERROR(put());
  MK_RETURN_IF_ERROR(check(cudaEventRecord(end.get(), nullptr), "an event"));
  MK_RETURN_IF_ERROR(check(cudaEventSynchronize(end.get()), "a run"));
  float milliseconds = 0;
  MK_RETURN_IF_ERROR(
      check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "a run's time"));
  return double{milliseconds} * 1e3 / runs;
}

Result<double> product_us(cuda::GemmVariant variant) {
  constexpr int kM = 8192, kN = 8192, kK = 4096;
  MK_ASSIGN_OR_RETURN(const Memory a, allocate(std::size_t{2} * kM * kK));
  MK_ASSIGN_OR_RETURN(const Memory b, allocate(std::size_t{2} * kN * kK));
  MK_ASSIGN_OR_RETURN(const Memory c, allocate(std::size_t{2} * kM * kN));
  cuda::GemmProblem problem;
  problem.m = kM;
  problem.n = kN;
  problem.k = kK;
  problem.a = a.get();
  problem.b = b.get();
  problem.c = c.get();
  cuda::GemmTuning tuning;
  tuning.variant = variant;
  tuning.splits = 1;
  MK_ASSIGN_OR_RETURN(const auto plan, cuda::GemmPlan::create(problem, tuning));
  return time_us(10, [&] { return plan.launch(nullptr); });
}

Result<double> attention_us() {
  CoreProblem problem;
  problem.query_heads = problem.key_heads = 32;
  problem.head_dim = 128;
  problem.parts = {{8192, 8192}};
  MK_ASSIGN_OR_RETURN(const auto core, AttentionCore::create(problem));
  MK_ASSIGN_OR_RETURN(const std::uint64_t ns, core->measure_ns());
  return static_cast<double>(ns) / 1e3;
}

Result<double> memory_gb_s() {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  MK_ASSIGN_OR_RETURN(const Memory from, allocate(kBytes));
  MK_ASSIGN_OR_RETURN(const Memory to, allocate(kBytes));
  MK_ASSIGN_OR_RETURN(const double us, time_us(5, [&] {
                        return check(cudaMemcpyAsync(to.get(), from.get(), kBytes,
                                                     cudaMemcpyDeviceToDevice, nullptr),
                                     "a copy");
                      }));
  return 2.0 * kBytes / (us * 1e3);
}

/// To the first other GPU that this one reaches by itself; 0: there is none.
Result<double> peer_gb_s(int device) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  int devices = 0;
  MK_RETURN_IF_ERROR(check(cudaGetDeviceCount(&devices), "the GPUs"));
  for (int other = 0; other < devices; ++other) {
    int reaches = 0;
    if (other == device || cudaDeviceCanAccessPeer(&reaches, device, other) != cudaSuccess ||
        reaches == 0)
      continue;
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(other, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled)
      MK_RETURN_IF_ERROR(check(enabled, "access to the other GPU"));
    (void)cudaGetLastError();
    MK_ASSIGN_OR_RETURN(const Memory from, allocate(kBytes));
    MK_RETURN_IF_ERROR(check(cudaSetDevice(other), "the other GPU"));
    auto to = allocate(kBytes);
    MK_RETURN_IF_ERROR(check(cudaSetDevice(device), "this GPU"));
    if (!to) return propagate(to);
    MK_ASSIGN_OR_RETURN(
        const double us, time_us(5, [&] {
          return check(cudaMemcpyPeerAsync(to->get(), other, from.get(), device, kBytes, nullptr),
                       "a copy to the other GPU");
        }));
    return kBytes / (us * 1e3);
  }
  return 0;
}

}  // namespace

Result<GpuMeasured> measure_gpu() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess)
    return fail(ErrorCode::kUnsupported, "calibrate: no GPU is here; leave --executor out");
  cudaDeviceProp properties;
  MK_RETURN_IF_ERROR(check(cudaGetDeviceProperties(&properties, device), "the GPU"));
  GpuMeasured measured;
  measured.name = properties.name;
  measured.sms = static_cast<std::uint32_t>(properties.multiProcessorCount);
  MK_ASSIGN_OR_RETURN(measured.product_us_256, product_us(cuda::GemmVariant::k128x256));
  MK_ASSIGN_OR_RETURN(measured.product_us_128, product_us(cuda::GemmVariant::k128x128));
  MK_ASSIGN_OR_RETURN(measured.product_us_64, product_us(cuda::GemmVariant::k128x64));
  MK_ASSIGN_OR_RETURN(measured.attention_us, attention_us());
  MK_ASSIGN_OR_RETURN(measured.memory_gb_s, memory_gb_s());
  MK_ASSIGN_OR_RETURN(measured.peer_gb_s, peer_gb_s(device));
  return measured;
}

}  // namespace mk::bench
