#include "tests/gpu/gemm_ar_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace mk::test {
namespace {

template <class T>
T or_exit(Result<T> result) {
  if (result) return std::move(*result);
  fmt::print(stderr, "{}\n", result.error().message);
  std::exit(1);
}

kernels::cuda::DType cuda_type(kernels::DType dtype) {
  return dtype == kernels::DType::kBf16 ? kernels::cuda::DType::kBf16 : kernels::cuda::DType::kF16;
}

void allow_access(int from, int to) {
  require(cudaSetDevice(from), "cudaSetDevice");
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // clears it
  } else {
    require(error, "cudaDeviceEnablePeerAccess");
  }
}

}  // namespace

int device_count() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

GemmArSetup gemm_ar_setup(std::uint32_t locals, int devices, std::uint32_t m, std::uint32_t n,
                          std::uint32_t k) {
  GemmArSetup setup;
  setup.locals = locals;
  setup.devices = devices;
  setup.m = m;
  setup.n = n;
  setup.k.assign(locals, k);
  return setup;
}

GemmArRanks::GemmArRanks(const GemmArSetup& setup) : setup_(setup), ranks_(setup.locals) {
  const int devices = std::min(setup.devices, static_cast<int>(setup.locals));
  for (int from = 0; from < devices; ++from) {
    for (int to = 0; to < devices; ++to) {
      if (from != to) allow_access(from, to);
    }
  }
  const std::uint32_t per_device = (setup.locals + static_cast<std::uint32_t>(devices) - 1) /
                                   static_cast<std::uint32_t>(devices);
  constexpr std::uint32_t kMultiprocessors = 132;
  kernels::GemmArTiling tiling = setup.tiling;
  if (tiling.tile_m == 0) {
    tiling = kernels::gemm_ar_cuda_tiling(1, {setup.m, setup.n, 0}, kMultiprocessors / per_device);
  }
  const auto plan = or_exit(
      kernels::GemmArPlan::make(1, setup.locals, {setup.m, setup.n, 0}, setup.dtype, tiling));
  kernels::RankContext context;
  context.world = {1, setup.locals, 0, 0};
  context.session_abort = setup.abort;
  for (std::uint32_t r = 0; r < setup.locals; ++r) {
    Rank& rank = ranks_[r];
    rank.device = static_cast<int>(r) % devices;
    make_current(r);
    require(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "stream");
    const std::size_t k = setup.k[r];
    rank.workspace = std::make_unique<DeviceMemory>(plan.workspace_bytes());
    rank.a = std::make_unique<DeviceMemory>(setup.m * k * 2);
    rank.b = std::make_unique<DeviceMemory>(setup.n * k * 2);
    rank.c = std::make_unique<DeviceMemory>(std::size_t{setup.m} * setup.n * 2);
    require(cudaMemset(rank.workspace->data(), 0, plan.workspace_bytes()), "workspace");
    require(cudaDeviceSynchronize(), "workspace");
    context.workspaces[r] = static_cast<std::byte*>(rank.workspace->data());
  }
  kernels::GemmArCudaOptions options;
  options.ranks_per_device = per_device;
  options.compute_blocks = setup.compute_blocks;
  options.reduce_blocks = setup.reduce_blocks;
  options.wait_timeout = setup.timeout;
  options.b_layout = setup.b_layout;
  for (std::uint32_t r = 0; r < setup.locals; ++r) {
    make_current(r);
    context.world.local = r;
    ranks_[r].op = or_exit(kernels::GemmArCuda::create(plan, setup.k[r], context, options));
    // Loads what the helpers launch, too: CUDA loads a kernel at its first launch, and may wait for
    // the device to be idle to do so.
    fill(r, r);
    poison(r);
    delay(1, stream(r));
    require(cudaDeviceSynchronize(), "warm-up");
  }
  require(cudaSetDevice(0), "cudaSetDevice");
}

GemmArRanks::~GemmArRanks() {
  for (std::uint32_t r = 0; r < locals(); ++r) {
    make_current(r);
    cudaStreamSynchronize(ranks_[r].stream);
    cudaStreamDestroy(ranks_[r].stream);
    ranks_[r].op.reset();
  }
  cudaSetDevice(0);
}

void GemmArRanks::make_current(std::uint32_t rank) const {
  require(cudaSetDevice(ranks_[rank].device), "cudaSetDevice");
}

void GemmArRanks::fill(std::uint32_t r, std::uint64_t seed) {
  make_current(r);
  const std::int64_t k = setup_.k[r];
  const auto type = cuda_type(setup_.dtype);
  fill_normal(ranks_[r].a->data(), type, setup_.m * k, seed * 64 + 2 * r, stream(r));
  fill_normal(ranks_[r].b->data(), type, setup_.n * k, seed * 64 + 2 * r + 1, stream(r));
}

void GemmArRanks::poison(std::uint32_t r) {
  make_current(r);
  const std::int64_t count = std::int64_t{setup_.m} * setup_.n;
  test::poison(ranks_[r].c->data(), count, stream(r));
  test::poison(const_cast<void*>(op(r).output()), count, stream(r));
}

Status GemmArRanks::launch(std::uint32_t r, std::uint32_t m, bool to_c, kernels::Mode mode) {
  const Rank& rank = ranks_[r];
  const bool nk = setup_.b_layout == kernels::BLayout::kNK;
  return rank.op->launch(rank.stream, rank.a->data(), setup_.k[r], rank.b->data(),
                         nk ? setup_.k[r] : setup_.n, to_c ? rank.c->data() : nullptr, setup_.n, m,
                         mode);
}

void GemmArRanks::launch_all(std::uint32_t m, std::uint64_t seed, bool to_c, kernels::Mode mode) {
  // A rank's C is its peers' to write as soon as it has launched, so all are poisoned first.
  for (std::uint32_t r = 0; r < locals(); ++r) {
    fill(r, seed);
    poison(r);
  }
  for (std::uint32_t r = 0; r < locals(); ++r) require(cudaStreamSynchronize(stream(r)), "inputs");
  for (std::uint32_t r = 0; r < locals(); ++r) {
    // Ranks are late in turn.
    if (seed % 4 == r % 4) {
      make_current(r);
      delay(seed % 7 * 30'000, stream(r));
    }
    if (auto launched = launch(r, m, to_c, mode); !launched) {
      fmt::print(stderr, "{}\n", launched.error().message);
      std::exit(1);
    }
  }
}

Status GemmArRanks::finish(std::uint32_t r) {
  auto finished = op(r).finish(stream(r));
  if (!finished) return propagate(finished);
  return {};
}

const void* GemmArRanks::result(std::uint32_t r, bool to_c) const {
  return to_c ? ranks_[r].c->data() : ranks_[r].op->output();
}

GemmArProduct GemmArRanks::product(std::uint32_t m) const {
  GemmArProduct product;
  product.dtype = setup_.dtype;
  product.b_layout = setup_.b_layout;
  product.m = static_cast<int>(m);
  product.n = static_cast<int>(setup_.n);
  product.locals = static_cast<int>(setup_.locals);
  for (std::uint32_t r = 0; r < setup_.locals; ++r) {
    product.k[r] = static_cast<int>(setup_.k[r]);
    product.a[r] = ranks_[r].a->data();
    product.b[r] = ranks_[r].b->data();
  }
  return product;
}

Verdict GemmArRanks::judge_all(std::uint32_t m, bool to_c) {
  make_current(0);
  Verdict verdict =
      judge_gemm_ar(product(m), result(0, to_c), static_cast<int>(setup_.n), stream(0));
  for (std::uint32_t r = 1; r < locals(); ++r) {
    verdict.bad +=
        count_different(result(0, to_c), result(r, to_c), std::int64_t{m} * setup_.n, stream(0));
  }
  return verdict;
}

}  // namespace mk::test
