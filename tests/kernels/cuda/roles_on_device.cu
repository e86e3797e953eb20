// Compiles the roles that no CUDA kernel runs yet (those that one does: kernels/cuda) for the
// device, so that they stay device code.
#include "kernels/ops/combine/protocol.h"
#include "kernels/ops/ring/roles.h"

namespace mk::kernels {
namespace {

struct NullExecutor {
  template <class PlaceOf>
  __device__ bool multiply(const CombineTile& tile, std::uint32_t, const TileRect&,
                           PlaceOf&& place_of) {
    for (std::uint32_t i = 0; i < tile.rows; ++i) *place_of(i) = std::byte{};
    return true;
  }
  template <class Before, class Rows, class After>
  __device__ void sum(const CombineSum& job, Before&& before, Rows&& rows, After&& after) {
    const auto add = [&](const std::byte* row) {
      if (job.target != nullptr) *job.target = *row;
    };
    before(add);
    rows(add);
    after(add);
  }
  __device__ bool last_part(Role, std::uint32_t, std::uint32_t) { return true; }
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

__global__ void run_combine_role(const __grid_constant__ CombineLaunch launch, Role role,
                                 std::uint32_t index) {
  NullExecutor executor;
  BlockTotals totals;
  CombineBlock<NullExecutor> block(executor, launch, role, index, totals);
  announce_launch(launch);
  switch (role) {
    case Role::kPlan:
      gemm_combine::plan(block);
      break;
    case Role::kReduce:
      gemm_combine::reduce(block);
      break;
    case Role::kSend:
      gemm_combine::send(block);
      break;
    case Role::kReceive:
      gemm_combine::receive(block);
      break;
    default:
      gemm_combine::compute(block);
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
