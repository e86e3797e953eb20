// Compiles the shared roles for the device, so that they stay device code. What runs there is
// kernels/cuda.
#include "kernels/ag_gemm/roles.h"
#include "kernels/gemm_ar/roles.h"
#include "kernels/gemm_rs/roles.h"
#include "kernels/moe_dispatch/roles.h"
#include "kernels/ring_attention/roles.h"

namespace mk::kernels {
namespace {

struct NullExecutor {
  __device__ bool multiply(const TileRect&, void*, std::uint64_t) { return true; }
  __device__ void sum(const SumJob&) {}
  __device__ bool wants_c() const { return true; }
  __device__ void copy_to_c(const TileRect&, const void*, std::uint64_t) {}
  __device__ void* c_at(const TileRect&) const { return nullptr; }
  __device__ std::uint64_t c_stride() const { return 0; }
  __device__ bool multiply(const RowTile&, std::uint32_t, const TileRect&, const std::byte*) {
    return true;
  }
  __device__ bool multiply(const AgGemmTile&, const std::byte*, std::uint64_t) { return true; }
  __device__ void begin(const AttentionItem&) {}
  __device__ void resume(const AttentionItem&) {}
  __device__ void attend(const AttentionItem&, const AttentionKeys&, bool, std::int64_t) {}
  __device__ void put_aside(const AttentionItem&) {}
  __device__ void finish(const AttentionItem&) {}
  __device__ void copy(const CopyJob&) {}
  __device__ void stores_done() {}
  __device__ void loads_begin() {}
  __device__ std::uint64_t now_ns() { return 0; }
  __device__ bool pause(std::uint32_t) { return true; }
};

}  // namespace

__global__ void run_role(const __grid_constant__ GemmArLaunch launch, Role role,
                         std::uint32_t index) {
  NullExecutor executor;
  BlockTotals totals;
  GemmArBlock block(executor, launch, role, index, totals);
  announce_launch(launch);
  switch (role) {
    case Role::kCompute:
      gemm_ar::compute(block);
      break;
    case Role::kReduce:
      gemm_ar::reduce(block);
      break;
    case Role::kSend:
      gemm_ar::send(block);
      break;
    case Role::kReceive:
      gemm_ar::receive(block);
      break;
    case Role::kCollect:
      gemm_ar::collect(block);
      break;
    default:
      break;
  }
}

__global__ void run_ag_gemm_role(const __grid_constant__ AgGemmLaunch launch, Role role,
                                 std::uint32_t index) {
  NullExecutor executor;
  BlockTotals totals;
  AgGemmBlock<NullExecutor> block(executor, launch, role, index, totals);
  switch (role) {
    case Role::kCompute:
      ag_gemm::compute(block);
      break;
    case Role::kCollect:
      ag_gemm::collect(block);
      break;
    case Role::kShare:
      ag_gemm::share(block);
      break;
    case Role::kSend:
      ag_gemm::send(block);
      break;
    case Role::kReceive:
      ag_gemm::receive(block);
      break;
    default:
      break;
  }
}

__global__ void run_gemm_rs_role(const __grid_constant__ GemmRsLaunch launch, Role role,
                                 std::uint32_t index) {
  NullExecutor executor;
  BlockTotals totals;
  GemmRsBlock block(executor, launch, role, index, totals);
  announce_launch(launch);
  switch (role) {
    case Role::kCompute:
      gemm_rs::compute(block);
      break;
    case Role::kReduce:
      gemm_rs::reduce(block);
      break;
    case Role::kSend:
      gemm_rs::send(block);
      break;
    default:
      gemm_rs::receive(block);
      break;
  }
}

__global__ void run_moe_dispatch_role(const __grid_constant__ MoeDispatchLaunch launch, Role role,
                                      std::uint32_t index) {
  NullExecutor executor;
  BlockTotals totals;
  MoeDispatchBlock<NullExecutor> block(executor, launch, role, index, totals);
  announce_launch(launch);
  switch (role) {
    case Role::kShare:
      moe_dispatch::share(block);
      break;
    case Role::kSend:
      moe_dispatch::send(block);
      break;
    case Role::kReceive:
      moe_dispatch::receive(block);
      break;
    case Role::kPlan:
      moe_dispatch::plan(block);
      break;
    case Role::kPull:
      moe_dispatch::pull(block);
      break;
    default:
      moe_dispatch::compute(block);
      break;
  }
}

__global__ void run_ring_attention_role(const __grid_constant__ RingAttentionLaunch launch,
                                        Role role, std::uint32_t index) {
  NullExecutor executor;
  BlockTotals totals;
  RingAttentionBlock<NullExecutor> block(executor, launch, role, index, totals);
  announce_launch(launch);
  switch (role) {
    case Role::kShare:
      ring_attention::share(block);
      break;
    case Role::kSend:
      ring_attention::send(block);
      break;
    case Role::kReceive:
      ring_attention::receive(block);
      break;
    default:
      ring_attention::compute(block);
      break;
  }
}

}  // namespace mk::kernels
