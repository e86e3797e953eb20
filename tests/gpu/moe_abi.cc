#include "tests/gpu/moe_abi.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/host/operator_frame.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/ops/combine/sm90.h"
#include "kernels/ops/moe/sm90.h"
#include "tests/gpu/bench_world.h"

namespace {

using namespace mk;        // NOLINT(google-build-using-namespace): a file of forwarders
using namespace mk::test;  // NOLINT(google-build-using-namespace)

/// An operator's ranks, and their memory.
template <class Op>
struct Ranks {
  std::optional<BenchMemory> memory;
  std::vector<std::unique_ptr<Op>> ops;

  template <class Plan>
  Status start(BenchWorld& world, const Plan& plan, const kernels::CudaOptions& options) {
    memory.emplace(world, plan.workspace_bytes(), plan.flag_count());
    for (std::uint32_t r = 0; r < world.size(); ++r) {
      current(r);
      MK_ASSIGN_OR_RETURN(auto op, Op::create(plan, memory->contexts[r], options));
      ops.push_back(std::move(op));
    }
    watch(world, ops);
    return {};
  }
  Status finish(const BenchWorld& world, MkMoeStats* by_rank) {
    for (std::uint32_t r = 0; r < ops.size(); ++r) {
      current(r);
      MK_ASSIGN_OR_RETURN(const auto stats, ops[r]->finish(world.streams[r]));
      const kernels::RoleStats& compute = stats.role(kernels::Role::kCompute);
      by_rank[r] = {
          stats.total_ns,           compute.end_ns,
          compute.wait_ns,          compute.waits,
          ops[r]->blocks().compute, std::max(ops[r]->blocks().pull, ops[r]->blocks().reduce)};
    }
    return {};
  }
};

class Layer {
 public:
  explicit Layer(BenchWorld& world) : world_(world) {}
  ~Layer() {
    world_.watched.erase(&first_.ops);
    world_.watched.erase(&second_.ops);
    for (std::uint32_t r = 0; r < world_.size(); ++r) {
      current(r);
      cudaStreamSynchronize(world_.streams[r]);
      if (r < second_.ops.size()) second_.ops[r].reset();
      if (r < first_.ops.size()) first_.ops[r].reset();
    }
    current(0);
  }

  Status start(const MkMoeShape& from) {
    const auto dtype = from.dtype == 0 ? kernels::DType::kBf16 : kernels::DType::kF16;
    kernels::MoeDispatchShape shape;
    shape.tokens_max = from.tokens_max;
    shape.hidden = from.hidden;
    shape.features = from.features;
    shape.experts = from.experts;
    shape.top_k = from.top_k;
    shape.rows_max = from.rows_max;
    shape.epilogue = static_cast<kernels::MoeEpilogue>(from.epilogue);
    kernels::CudaOptions options;
    options.b_layout = kernels::BLayout::kNK;
    if (from.transport != 0) options.dma = from.transport == 1;
    options.dma_bytes = from.dma_bytes;
    current(0);
    MK_ASSIGN_OR_RETURN(const auto job, kernels::cuda::job_plan_of(options));
    MK_ASSIGN_OR_RETURN(const auto way,
                        kernels::cuda::planned_moe_way(world_.nodes, world_.locals, shape, dtype,
                                                       job->machine.sms, *job, options));
    MK_ASSIGN_OR_RETURN(const auto first,
                        kernels::MoeDispatchPlan::make(world_.nodes, world_.locals, shape, dtype,
                                                       kernels::moe_dispatch_cuda_tiling(), way));
    kernels::CombineShape combined;
    combined.tokens_max = from.tokens_max;
    combined.hidden = from.hidden;
    combined.features = from.features;
    combined.experts = from.experts;
    combined.top_k = from.top_k;
    combined.partials = from.f32_partials != 0 ? kernels::CombinePartials::kF32
                                               : kernels::CombinePartials::kElement;
    MK_ASSIGN_OR_RETURN(const auto second,
                        kernels::CombinePlan::make(world_.nodes, world_.locals, combined, dtype,
                                                   kernels::combine_cuda_tiling(),
                                                   kernels::combine_cuda_steps(world_.nodes)));
    options.stream_groups = kernels::Warpgroups{from.stream_groups};
    room_ = first.shape.rows_max;
    MK_RETURN_IF_ERROR(first_.start(world_, first, options));
    if (from.first_only != 0) return {};
    options.dma.reset();
    return second_.start(world_, second, options);
  }

  Status launch(const MkMoeTensors* by_rank, bool first, bool second, kernels::Mode mode) {
    for (std::uint32_t r = 0; r < world_.size(); ++r) {
      current(r);
      const MkMoeTensors& its = by_rank[r];
      if (first) {
        const kernels::MoeDispatchInput input{its.tokens, its.ids, its.weights, its.count,
                                              its.first};
        MK_RETURN_IF_ERROR(first_.ops[r]->launch(world_.streams[r], input, its.y, room_, mode));
      }
      if (second) {
        const kernels::MoeDispatchDeviceOutput left = output(r);
        kernels::CombineDeviceInput input;
        input.y = its.y;
        input.rows = left.rows;
        input.offsets = left.offsets;
        input.room = room_;
        input.expert_weights = its.second;
        input.ids = its.ids;
        input.count = its.count;
        MK_RETURN_IF_ERROR(second_.ops[r]->launch(world_.streams[r], input, its.out, mode));
      }
    }
    return {};
  }
  Status finish(bool second, MkMoeStats* by_rank) {
    return second ? second_.finish(world_, by_rank) : first_.finish(world_, by_rank);
  }
  bool by_engines() const { return first_.ops[0]->shares_by_dma(); }
  kernels::MoeDispatchDeviceOutput output(std::uint32_t r) const { return first_.ops[r]->output(); }

 private:
  BenchWorld& world_;
  std::uint32_t room_ = 0;
  Ranks<kernels::MoeDispatchCuda> first_;
  Ranks<kernels::CombineCuda> second_;
};

Layer& layer_of(void* layer) { return *static_cast<Layer*>(layer); }

/// Of a call.
int answer(const Status& status) {
  const int wrong = failed(status) ? 1 : 0;
  current(0);
  return wrong;
}

}  // namespace

extern "C" {

void* mk_moe_create(void* world, const MkMoeShape* shape) {
  auto made = std::make_unique<Layer>(world_of(world));
  return answer(made->start(*shape)) != 0 ? nullptr : made.release();
}
void mk_moe_destroy(void* layer) { delete static_cast<Layer*>(layer); }
int mk_moe_engines(void* layer) { return layer_of(layer).by_engines() ? 1 : 0; }
int mk_moe_launch(void* layer, const MkMoeTensors* by_rank, int first, int second, int unfused) {
  const auto mode = unfused != 0 ? kernels::Mode::kUnfused : kernels::Mode::kFused;
  return answer(layer_of(layer).launch(by_rank, first != 0, second != 0, mode));
}
int mk_moe_finish(void* layer, int second, MkMoeStats* by_rank) {
  return answer(layer_of(layer).finish(second != 0, by_rank));
}
void mk_moe_output(void* layer, std::uint32_t rank, const void** offsets, const void** rows) {
  const kernels::MoeDispatchDeviceOutput left = layer_of(layer).output(rank);
  *offsets = left.offsets;
  *rows = left.rows;
}

}  // extern "C"
