#include "tests/gpu/ring_abi.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/host/operator_frame.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/ops/ring/sm90.h"
#include "tests/gpu/bench_world.h"
#include "tests/gpu/partial_attention.h"

namespace {

using namespace mk;        // NOLINT(google-build-using-namespace): a file of forwarders
using namespace mk::test;  // NOLINT(google-build-using-namespace)

class Ring {
 public:
  explicit Ring(BenchWorld& world_in) : world(world_in) {}
  ~Ring() {
    world.watched.erase(&ops);
    for (std::uint32_t r = 0; r < ops.size(); ++r) {
      current(r);
      cudaStreamSynchronize(world.streams[r]);
      ops[r].reset();
    }
    current(0);
  }

  Status start(const MkRingShape& from) {
    kernels::RingAttentionShape shape;
    shape.seq_max = from.seq;
    shape.query_heads = from.query_heads;
    shape.key_heads = from.key_heads;
    shape.head_dim = from.head_dim;
    shape.causal = from.causal != 0;
    shape.dtype = from.dtype == 0 ? kernels::DType::kBf16 : kernels::DType::kF16;
    shape.batch = from.batch;
    seq_ = from.seq;
    kernels::CudaOptions options;
    if (from.transport != 0) options.dma = from.transport == 1;
    current(0);
    MK_ASSIGN_OR_RETURN(const auto job, kernels::cuda::job_plan_of(options));
    MK_ASSIGN_OR_RETURN(auto tiling,
                        kernels::cuda::planned_ring_tiling(world.nodes, world.locals, shape, 0,
                                                           job->machine.sms, *job, options));
    if (tiling.engines && from.heads_together != 0) tiling.heads_together = from.heads_together;
    if (from.window_pairs != 0) tiling.window_pairs = from.window_pairs;
    MK_ASSIGN_OR_RETURN(const auto plan,
                        kernels::RingAttentionPlan::make(world.nodes, world.locals, shape, tiling));
    options.stream_groups = kernels::Warpgroups{from.stream_groups};
    memory_.emplace(world, plan.workspace_bytes, plan.flag_count());
    for (std::uint32_t r = 0; r < world.size(); ++r) {
      current(r);
      MK_ASSIGN_OR_RETURN(auto op,
                          kernels::RingAttentionCuda::create(plan, memory_->contexts[r], options));
      ops.push_back(std::move(op));
    }
    watch(world, ops);
    current(0);
    return {};
  }

  Status launch(const MkRingTensors* by_rank, bool unfused) {
    for (std::uint32_t r = 0; r < ops.size(); ++r) {
      current(r);
      const MkRingTensors& from = by_rank[r];
      const auto tensor = [&](void* data, int row) {
        return kernels::cuda::AttentionTensor{data, from.strides[row][0], from.strides[row][1],
                                              from.strides[row][2]};
      };
      kernels::RingAttentionDeviceTensors tensors;
      tensors.q = tensor(from.q, 0);
      tensors.k = tensor(from.k, 1);
      tensors.v = tensor(from.v, 2);
      tensors.o = tensor(from.o, 3);
      tensors.lse = from.lse;
      tensors.lse_batch_stride = from.strides[4][0];
      tensors.lse_row_stride = from.strides[4][1];
      tensors.lse_head_stride = from.strides[4][2];
      const auto mode = unfused ? kernels::Mode::kUnfused : kernels::Mode::kFused;
      MK_RETURN_IF_ERROR(ops[r]->launch(world.streams[r], tensors, seq_, mode));
    }
    return {};
  }

  BenchWorld& world;
  std::vector<std::unique_ptr<kernels::RingAttentionCuda>> ops;

 private:
  std::optional<BenchMemory> memory_;
  std::uint64_t seq_ = 0;
};

Ring& ring_of(void* ring) { return *static_cast<Ring*>(ring); }

}  // namespace

extern "C" {

void* mk_ring_create(void* world, const MkRingShape* shape) {
  auto made = std::make_unique<Ring>(world_of(world));
  return failed(made->start(*shape)) ? nullptr : made.release();
}
void mk_ring_destroy(void* ring) { delete static_cast<Ring*>(ring); }
int mk_ring_tile_keys(void* ring) { return ring_of(ring).ops[0]->tile_keys(); }
int mk_ring_engines(void* ring, std::uint32_t* heads_together) {
  const auto& op = *ring_of(ring).ops[0];
  *heads_together = op.plan().heads_together;
  return op.shares_by_dma() ? 1 : 0;
}
void mk_ring_blocks(void* ring, std::uint32_t* compute, std::uint32_t* others) {
  constexpr std::uint32_t kMultiprocessors = 132;
  *compute = ring_of(ring).ops[0]->blocks().compute;
  *others = kMultiprocessors - *compute;
}
int mk_ring_launch(void* ring, const MkRingTensors* by_rank, int unfused) {
  const int wrong = failed(ring_of(ring).launch(by_rank, unfused != 0)) ? 1 : 0;
  current(0);
  return wrong;
}
int mk_ring_finish(void* ring, MkRingStats* by_rank) {
  Ring& it = ring_of(ring);
  for (std::uint32_t r = 0; r < it.ops.size(); ++r) {
    current(r);
    const auto stats = it.ops[r]->finish(it.world.streams[r]);
    if (!stats) return failed(propagate(stats)) ? 1 : 0;
    const kernels::RoleStats& compute = stats->role(kernels::Role::kCompute);
    by_rank[r] = {stats->total_ns, compute.end_ns, stats->role(kernels::Role::kShare).end_ns,
                  compute.wait_ns, compute.waits};
  }
  current(0);
  return 0;
}
void mk_ring_set_trace(void* ring, int on) {
  for (const auto& op : ring_of(ring).ops) op->set_trace(on != 0);
}
std::uint32_t mk_ring_trace(void* ring, std::uint32_t rank, MkRingSpan* spans, std::uint32_t most) {
  const auto events = ring_of(ring).ops[rank]->trace();
  for (std::size_t i = 0; i < events.size() && i < most; ++i) {
    const kernels::TraceSpan& span = events[i].span;
    spans[i] = {span.begin_ns,
                span.end_ns,
                static_cast<std::uint32_t>(events[i].role),
                events[i].block,
                static_cast<std::uint32_t>(span.kind),
                span.index[0],
                span.rank};
  }
  return static_cast<std::uint32_t>(events.size());
}

void mk_ring_merge(void* /*world*/, std::uint32_t rank, void* o, int batch, std::int64_t rows,
                   int heads, int dim, const MkRingPartial* partials, int count, void* stream) {
  current(rank);
  std::vector<PartialAttention> all;
  for (int i = 0; i < count; ++i)
    all.push_back({partials[i].o, partials[i].lse, partials[i].first, partials[i].rows});
  merge({o, batch, rows, heads, dim}, all.data(), count, stream_of(stream));
  current(0);
}

}  // extern "C"
