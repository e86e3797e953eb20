#include <cuda_bf16.h>

#include "kernels/cuda/core/ptx.cuh"
#include "shm/atomic.h"
#include "shm/flag.h"
#include "shm/ring.h"
#include "tests/gpu/exchange.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {
namespace {

constexpr std::uint64_t kPatienceNs = 5'000'000'000;

__global__ void post_kernel(shm::RingProducer* lane, shm::Command command, Parcel parcel) {
  shm::RingProducer ring = *lane;
  const std::uint64_t end_ns = kernels::cuda::ptx::now_ns() + kPatienceNs;
  __threadfence_system();
  for (std::uint64_t at = 0; at < parcel.bytes; at += parcel.chunk_bytes) {
    const std::uint64_t left = parcel.bytes - at;
    command.bytes =
        static_cast<std::uint32_t>(left < parcel.chunk_bytes ? left : parcel.chunk_bytes);
    command.src_offset = parcel.source + at;
    command.dst_offset = parcel.target + at;
    while (!ring.try_push(command)) {
      if (kernels::cuda::ptx::now_ns() <= end_ns) continue;
      *lane = ring;  // those that went are counted
      return;
    }
    ++command.flag_index;
  }
  *lane = ring;
}

__global__ void await_kernel(const std::uint32_t* flags, std::uint32_t count, std::uint32_t epoch,
                             std::uint32_t* missed) {
  const std::uint64_t end_ns = kernels::cuda::ptx::now_ns() + kPatienceNs;
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    while (!shm::flag_reached(flags + i, epoch)) {
      if (kernels::cuda::ptx::now_ns() > end_ns) {
        *missed = 1;
        return;
      }
    }
  }
  __threadfence_system();
}

__global__ void hold_kernel(const std::uint32_t* word) {
  const std::uint64_t end_ns = kernels::cuda::ptx::now_ns() + kPatienceNs;
  while (shm::load_acquire(word) == 0 && kernels::cuda::ptx::now_ns() < end_ns) {
  }
}

__global__ void __launch_bounds__(512)
    add_kernel(const uint4* x, const uint4* y, uint4* sum, std::uint64_t vectors) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors;
       i += step) {
    const uint4 a = __ldcs(x + i);
    const uint4 b = __ldcs(y + i);
    const std::uint32_t aw[4] = {a.x, a.y, a.z, a.w};
    const std::uint32_t bw[4] = {b.x, b.y, b.z, b.w};
    std::uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(
          __uint_as_float(aw[w] << 16) + __uint_as_float(bw[w] << 16),
          __uint_as_float(aw[w] & 0xffff0000u) + __uint_as_float(bw[w] & 0xffff0000u));
      words[w] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
    sum[i] = {words[0], words[1], words[2], words[3]};
  }
}

}  // namespace

void post(const kernels::RankContext& context, std::uint32_t node, const Parcel& parcel,
          std::uint32_t epoch, cudaStream_t stream) {
  const kernels::RailPeer& peer = context.rail_peers[node];
  shm::Command command;
  command.opcode = shm::Opcode::kWrite;
  command.peer = peer.rank;
  command.src_handle = context.workspace_handle;
  command.dst_handle = peer.workspace_handle;
  command.flag_index = peer.flag_base + parcel.first_flag;
  command.epoch = epoch;
  post_kernel<<<1, 1, 0, stream>>>(context.lanes, command, parcel);
  require(cudaGetLastError(), "post");
}

void await_flags(const kernels::RankContext& context, std::uint32_t first, std::uint32_t count,
                 std::uint32_t epoch, std::uint32_t* missed, cudaStream_t stream) {
  await_kernel<<<1, 32, 0, stream>>>(context.arrival_flags + first, count, epoch, missed);
  require(cudaGetLastError(), "await_flags");
}

void hold(const std::uint32_t* word, cudaStream_t stream) {
  hold_kernel<<<1, 1, 0, stream>>>(word);
  require(cudaGetLastError(), "hold");
}

void add(const void* x, const void* y, void* sum, std::uint64_t count, cudaStream_t stream) {
  constexpr unsigned kBlocks = 264;
  add_kernel<<<kBlocks, 512, 0, stream>>>(static_cast<const uint4*>(x),
                                          static_cast<const uint4*>(y), static_cast<uint4*>(sum),
                                          count / 8);
  require(cudaGetLastError(), "add");
}

}  // namespace mk::test
