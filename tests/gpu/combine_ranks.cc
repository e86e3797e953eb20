#include "tests/gpu/combine_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <utility>

#include "kernels/cuda/host/operator_inputs.h"
#include "tests/gpu/summed_reference.h"
#include "tests/gpu/transfers.h"
#include "tests/kernels/combine/handles.h"

namespace mk::test {

using kernels::MoeRow;
using kernels::shard_of;
using kernels::ShardRange;
using kernels::testing::Handle;

namespace {

constexpr std::uint16_t kNan = 0x7fc0;  // of bf16; of f16 a NaN, too

}  // namespace

bool CombineSetup::has_kernel() const {
  const auto layout = kernels::cuda::cuda_layout(options.b_layout);
  const auto* const kernel = dtype == kernels::DType::kBf16
                                 ? kernels::cuda::combine_kernel_bf16(layout, shape.partials)
                                 : kernels::cuda::combine_kernel_f16(layout, shape.partials);
  return kernel != nullptr;
}

CombineRanks::CombineRanks(const CombineSetup& setup)
    : PlacedRanks(setup.world()), setup_(setup), routing_(setup.sets) {
  kernels::Tiling tiling = kernels::combine_cuda_tiling();
  tiling.chunk_bytes = setup.chunk_bytes;
  plan_ = or_exit(kernels::CombinePlan::make(setup.nodes, setup.locals, setup.shape, setup.dtype,
                                             tiling, kernels::combine_cuda_steps(setup.nodes)));
  const kernels::CombineShape& shape = plan_.shape;
  const auto fill_in = [&](CombineRank& rank, std::uint32_t r) {
    const std::size_t here = shard_of(shape.experts, world(), r).count;
    rank.expert_weights = device_memory(here * shape.hidden * shape.features * 2);
    rank.out = device_memory(static_cast<std::size_t>(output_elements()) * 2);
    rank.sets.resize(setup.sets);
  };
  const auto create = [&](std::uint32_t r, const kernels::RankContext& context,
                          const kernels::CudaOptions& options) {
    ranks_[r].op = or_exit(kernels::CombineCuda::create(plan_, context, options));
    poison_output(r);
    delay(1, stream(r));
  };
  place(setup, plan_.workspace_bytes(), plan_.flag_count(), fill_in, create);
}

void CombineRanks::fill(const JobRouting& routing, std::uint64_t seed, bool residual,
                        std::uint32_t set) {
  const kernels::CombineShape& shape = plan_.shape;
  const auto type = kernels::cuda::cuda_type(plan_.dtype);
  std::mt19937_64 random(seed);
  routing_[set] = routing;
  for (std::uint32_t r = 0; r < world(); ++r) {
    make_current(r);
    CombineRank& rank = ranks_[r];
    CombineSet& to = rank.sets[set];
    const kernels::testing::RankRouting& its = routing[r];
    const Handle handle =
        kernels::testing::draw_handle(routing, shape.experts, shape.top_k, r, random);
    const auto rows = static_cast<std::int64_t>(handle.rows.size());
    const auto upload = [](std::unique_ptr<DeviceMemory>& memory, const auto& host) {
      memory =
          std::make_unique<DeviceMemory>(std::max<std::size_t>(host.size() * sizeof(host[0]), 16));
      to_device(*memory, host);
    };
    const auto draw = [&](std::unique_ptr<DeviceMemory>& memory, std::int64_t elements,
                          std::uint64_t of) {
      memory = std::make_unique<DeviceMemory>(static_cast<std::size_t>(elements) * 2 + 16);
      fill_normal(memory->data(), type, elements, seed * 128 + of * 32 + r, stream(r));
    };
    upload(to.rows, handle.rows);
    upload(to.offsets, handle.offsets);
    upload(to.ids, its.ids);
    draw(to.y, rows * shape.features, 0);
    draw(to.residual, std::int64_t{its.tokens} * shape.hidden, 1);
    const std::int64_t here = shard_of(shape.experts, world(), r).count;
    fill_normal(rank.expert_weights->data(), type, here * shape.hidden * shape.features,
                seed * 128 + 64 + r, stream(r));
    to.input.y = to.y->data();
    to.input.rows = static_cast<const MoeRow*>(to.rows->data());
    to.input.offsets = static_cast<const std::uint32_t*>(to.offsets->data());
    to.input.room = static_cast<std::uint32_t>(rows);
    to.input.expert_weights = rank.expert_weights->data();
    to.input.ids = static_cast<const std::int32_t*>(to.ids->data());
    to.input.count = its.tokens;
    to.input.residual = residual ? to.residual->data() : nullptr;
    poison_output(r);
    require(cudaStreamSynchronize(stream(r)), "inputs");
  }
  require(cudaSetDevice(0), "cudaSetDevice");
}

void CombineRanks::take(MoeRanks& from, const JobRouting& routing, std::uint32_t set) {
  fill(routing, 1, false, set);
  for (std::uint32_t r = 0; r < world(); ++r) {
    kernels::CombineDeviceInput& its = input(r, set);
    const kernels::MoeDispatchDeviceOutput left = from.op(r).output();
    its.y = from.y(r);
    its.rows = left.rows;
    its.offsets = left.offsets;
    its.room = from.plan().shape.rows_max;
  }
}

void CombineRanks::renew_ids(const JobRouting& routing, std::uint32_t set) {
  routing_[set] = routing;
  for (std::uint32_t r = 0; r < world(); ++r) {
    to_device(*ranks_[r].sets[set].ids, routing[r].ids);
    poison_output(r);
  }
}

std::uint32_t CombineRanks::spoil_row(std::uint32_t r, std::uint32_t set) {
  const CombineSet& its = ranks_[r].sets[set];
  const auto rows = from_device<MoeRow>(its.rows->data(), its.input.room);
  if (rows.empty()) return ~0u;
  auto* const y = static_cast<std::uint16_t*>(its.y->data());
  require(cudaMemcpy(y, &kNan, 2, cudaMemcpyDefault), "row");
  return rows[0].token;
}

Status CombineRanks::launch(std::uint32_t r, kernels::Mode mode, std::uint32_t set,
                            cudaStream_t stream) {
  const CombineRank& rank = ranks_[r];
  return rank.op->launch(stream != nullptr ? stream : rank.stream, rank.sets[set].input,
                         rank.out->data(), mode);
}

void CombineRanks::poison_output(std::uint32_t r) {
  poison(ranks_[r].out->data(), output_elements(), stream(r));
  require(cudaStreamSynchronize(stream(r)), "poison");
}

std::vector<std::uint16_t> CombineRanks::output(std::uint32_t rank) const {
  return from_device<std::uint16_t>(ranks_[rank].out->data(),
                                    static_cast<std::size_t>(output_elements()));
}

bool CombineRanks::untouched(std::uint32_t rank) {
  const std::vector<std::uint16_t> out = output(rank);
  return std::all_of(out.begin(), out.end(), [](std::uint16_t bits) { return bits == 0xffff; });
}

std::vector<CombineSlot> CombineRanks::slots_of(std::uint32_t rank, std::uint32_t set) const {
  const kernels::CombineShape& shape = plan_.shape;
  std::vector<CombineSlot> slots(routing_[set][rank].ids.size());
  for (std::uint32_t r = 0; r < world(); ++r) {
    const kernels::CombineDeviceInput& its = ranks_[r].sets[set].input;
    const ShardRange here = shard_of(shape.experts, world(), r);
    const auto offsets = from_device<std::uint32_t>(its.offsets, here.count + 1);
    const auto rows = from_device<MoeRow>(its.rows, offsets.back());
    for (std::uint32_t expert = 0; expert < here.count; ++expert) {
      for (std::uint32_t row = offsets[expert]; row < offsets[expert + 1]; ++row) {
        if (rows[row].rank != rank) continue;
        slots[rows[row].token * shape.top_k + rows[row].slot] = {
            static_cast<std::int32_t>(r), static_cast<std::int32_t>(row),
            static_cast<std::int32_t>(expert), rows[row].weight};
      }
    }
  }
  return slots;
}

std::string CombineRanks::judge(std::uint32_t r, std::uint32_t set, bool behind) {
  make_current(r);
  const kernels::CombineShape& shape = plan_.shape;
  const kernels::testing::RankRouting& its = routing_[set][r];
  const std::vector<CombineSlot> slots = slots_of(r, set);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if ((slots[i].rank >= 0) != (its.ids[i] >= 0))
      return fmt::format("rank {}: no row for slot {}", r, i);
  }
  const DeviceMemory slots_here(std::max<std::size_t>(slots.size() * sizeof(CombineSlot), 16));
  to_device(slots_here, slots);
  CombineProblem problem;
  problem.dtype = plan_.dtype;
  problem.b_layout = setup_.options.b_layout;
  problem.f32_partials = shape.partials == kernels::CombinePartials::kF32;
  problem.nodes = static_cast<int>(plan_.nodes);
  problem.top_k = static_cast<int>(shape.top_k);
  problem.hidden = static_cast<int>(shape.hidden);
  problem.features = static_cast<int>(shape.features);
  problem.tokens = static_cast<int>(its.tokens);
  for (std::uint32_t rank = 0; rank < world(); ++rank) {
    problem.y[rank] = ranks_[rank].sets[set].input.y;
    problem.weights[rank] = ranks_[rank].expert_weights->data();
  }
  problem.slots = static_cast<const CombineSlot*>(slots_here.data());
  problem.residual = ranks_[r].sets[set].input.residual;
  problem.out = ranks_[r].out->data();
  const Verdict verdict = judge_combine(problem, stream(r));
  worst_ = std::max(worst_, verdict.worst);
  if (!verdict.right()) {
    return fmt::format(
        "rank {}: of {} tokens {} elements are wrong, one of token {}, column {} (worst {} of its "
        "bound)",
        r, its.tokens, verdict.bad, verdict.first_bad / shape.hidden,
        verdict.first_bad % shape.hidden, verdict.worst);
  }
  if (behind) return {};
  const std::vector<std::uint16_t> out = output(r);
  const auto end = static_cast<std::ptrdiff_t>(its.tokens) * shape.hidden;
  const bool clean =
      std::all_of(out.begin() + end, out.end(), [](std::uint16_t bits) { return bits == 0xffff; });
  return clean ? "" : fmt::format("rank {}: memory behind its tokens was written", r);
}

}  // namespace mk::test
