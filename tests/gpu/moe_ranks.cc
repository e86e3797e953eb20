#include "tests/gpu/moe_ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/cuda/host/operator_inputs.h"
#include "tests/gpu/summed_reference.h"
#include "tests/gpu/transfers.h"

namespace mk::test {

using kernels::cuda::GroupedActivation;
using kernels::cuda::GroupedGemmProblem;

namespace {

constexpr std::uint16_t kNan = 0x7fc0;  // of bf16; of f16 a NaN, too

GroupedActivation activation_of(kernels::MoeEpilogue epilogue) {
  switch (epilogue) {
    case kernels::MoeEpilogue::kNone:
      return GroupedActivation::kNone;
    case kernels::MoeEpilogue::kGatedSilu:
      return GroupedActivation::kGatedSiluHalves;
    case kernels::MoeEpilogue::kGatedSiluInterleaved:
      return GroupedActivation::kGatedSiluPairs;
  }
  return GroupedActivation::kNone;
}

}  // namespace

bool MoeSetup::has_kernel() const {
  const auto layout = kernels::cuda::cuda_layout(options.b_layout);
  const auto* const kernel =
      dtype == kernels::DType::kBf16
          ? kernels::cuda::moe_dispatch_kernel_bf16(layout, shape.epilogue, shape.bias)
          : kernels::cuda::moe_dispatch_kernel_f16(layout, shape.epilogue, shape.bias);
  return kernel != nullptr;
}

MoeRanks::MoeRanks(const MoeSetup& setup)
    : PlacedRanks(setup.world()), setup_(setup), routing_(setup.sets), sources_(setup.sets) {
  kernels::Tiling tiling = kernels::moe_dispatch_cuda_tiling();
  tiling.chunk_bytes = setup.chunk_bytes;
  tiling.banks = setup.banks;
  kernels::MoeDispatchWay way = kernels::moe_dispatch_cuda_way(setup.nodes);
  way.kind = setup.kind;
  way.engines = setup.engines;
  plan_ = or_exit(kernels::MoeDispatchPlan::make(setup.nodes, setup.locals, setup.shape,
                                                 setup.dtype, tiling, way));
  const kernels::MoeDispatchShape& shape = plan_.shape;
  const std::size_t slots = std::size_t{shape.tokens_max} * shape.top_k;
  const auto fill_in = [&](MoeRank& rank, std::uint32_t r) {
    const std::size_t here = kernels::shard_of(shape.experts, world(), r).count;
    rank.expert_weights = device_memory(here * shape.hidden * shape.weight_columns() * 2);
    rank.bias = device_memory(here * shape.weight_columns() * 2);
    rank.y = device_memory(static_cast<std::size_t>(output_elements()) * 2);
    for (std::uint32_t set = 0; set < setup.sets; ++set) {
      rank.sets.push_back({device_memory(std::size_t{shape.tokens_max} * shape.hidden * 2),
                           device_memory(slots * 4), device_memory(slots * 4)});
    }
  };
  const auto create = [&](std::uint32_t r, const kernels::RankContext& context,
                          const kernels::CudaOptions& options) {
    ranks_[r].op = or_exit(kernels::MoeDispatchCuda::create(plan_, context, options));
    poison(ranks_[r].y->data(), 8, stream(r));
    delay(1, stream(r));
  };
  place(setup, plan_.workspace_bytes(), plan_.flag_count(), fill_in, create);
}

void MoeRanks::fill(const JobRouting& routing, std::uint64_t seed, std::uint32_t set) {
  const kernels::MoeDispatchShape& shape = plan_.shape;
  const auto type = kernels::cuda::cuda_type(plan_.dtype);
  routing_[set] = routing;
  sources_[set].clear();
  last_set_ = set;
  for (std::uint32_t r = 0; r < world(); ++r) {
    make_current(r);
    MoeRank& rank = ranks_[r];
    const kernels::testing::RankRouting& its = routing[r];
    to_device(*rank.sets[set].ids, its.ids);
    to_device(*rank.sets[set].weights, its.weights);
    sources_[set].push_back({its.tokens, its.ids, its.weights, {}});
    fill_normal(rank.sets[set].tokens->data(), type, std::int64_t{its.tokens} * shape.hidden,
                seed * 64 + r, stream(r));
    const std::int64_t here = kernels::shard_of(shape.experts, world(), r).count;
    fill_normal(rank.expert_weights->data(), type, here * shape.hidden * shape.weight_columns(),
                seed * 64 + 32 + r, stream(r));
    fill_normal(rank.bias->data(), type, here * shape.weight_columns(), seed * 64 + 48 + r,
                stream(r));
    poison(rank.y->data(), output_elements(), stream(r));
    require(cudaStreamSynchronize(stream(r)), "inputs");
  }
  require(cudaSetDevice(0), "cudaSetDevice");
}

void MoeRanks::spoil_token(std::uint32_t rank, std::uint32_t token) {
  const std::vector<std::uint16_t> bits(plan_.shape.hidden, kNan);
  auto* const tokens = static_cast<std::uint16_t*>(ranks_[rank].sets[last_set_].tokens->data()) +
                       std::size_t{token} * plan_.shape.hidden;
  require(cudaMemcpy(tokens, bits.data(), bits.size() * 2, cudaMemcpyDefault), "token");
}

Status MoeRanks::launch(std::uint32_t r, kernels::Mode mode, std::uint32_t set,
                        std::uint32_t capacity) {
  const MoeRank& rank = ranks_[r];
  kernels::MoeDispatchInput input;
  input.tokens = rank.sets[set].tokens->data();
  input.ids = static_cast<const std::int32_t*>(rank.sets[set].ids->data());
  input.weights = static_cast<const float*>(rank.sets[set].weights->data());
  input.count = routing_[set][r].tokens;
  input.expert_weights = rank.expert_weights->data();
  if (plan_.shape.bias) input.bias = rank.bias->data();
  return rank.op->launch(rank.stream, input, rank.y->data(),
                         std::min(capacity, plan_.shape.rows_max), mode);
}

tools::MoeReference MoeRanks::reference(std::uint32_t rank, std::uint32_t set) const {
  const kernels::MoeDispatchShape& shape = plan_.shape;
  tools::MoeJobShape job;
  job.nodes = setup_.nodes;
  job.locals = setup_.locals;
  job.experts = shape.experts;
  job.top_k = shape.top_k;
  job.hidden = shape.hidden;
  job.features = shape.features;
  return {job, rank, sources_[set]};
}

std::uint32_t MoeRanks::rows(std::uint32_t rank, std::uint32_t set) const {
  return static_cast<std::uint32_t>(reference(rank, set).rows().size());
}

std::vector<std::uint16_t> MoeRanks::tokens_of(std::uint32_t rank, std::uint32_t set) const {
  return from_device<std::uint16_t>(ranks_[rank].sets[set].tokens->data(),
                                    std::size_t{routing_[set][rank].tokens} * plan_.shape.hidden);
}

std::vector<std::uint16_t> MoeRanks::output(std::uint32_t rank) const {
  return from_device<std::uint16_t>(ranks_[rank].y->data(),
                                    static_cast<std::size_t>(output_elements()));
}

bool MoeRanks::untouched(std::uint32_t rank) {
  const std::vector<std::uint16_t> y = output(rank);
  return std::all_of(y.begin(), y.end(), [](std::uint16_t bits) { return bits == 0xffff; });
}

std::string MoeRanks::judge(std::uint32_t r, std::uint32_t set, bool behind) {
  make_current(r);
  const kernels::MoeDispatchShape& shape = plan_.shape;
  const tools::MoeReference expected = reference(r, set);
  const std::size_t count = expected.rows().size();
  const kernels::MoeDispatchDeviceOutput output = op(r).output();
  if (op(r).rows() != count)
    return fmt::format("rank {}: {} rows, expected {}", r, op(r).rows(), count);
  std::vector<std::uint32_t> offsets;
  for (std::uint32_t e = 0; e <= expected.expert_count(); ++e)
    offsets.push_back(static_cast<std::uint32_t>(expected.offset(e)));
  if (from_device<std::uint32_t>(output.offsets, offsets.size()) != offsets)
    return fmt::format("rank {}: the offsets are wrong", r);
  std::vector<std::vector<std::uint16_t>> tokens;
  for (std::uint32_t rank = 0; rank < world(); ++rank) tokens.push_back(tokens_of(rank, set));
  std::vector<std::uint16_t> a(std::max<std::size_t>(count, 1) * shape.hidden);
  const auto rows = from_device<kernels::MoeRow>(output.rows, count);
  for (std::size_t i = 0; i < count; ++i) {
    const tools::MoeReference::Row& row = expected.rows()[i];
    if (rows[i] != kernels::MoeRow{row.rank, row.token, row.slot, row.weight}) {
      return fmt::format("rank {}, row {}: of rank {}, token {}, slot {}; expected {}, {}, {}", r,
                         i, rows[i].rank, rows[i].token, rows[i].slot, row.rank, row.token,
                         row.slot);
    }
    std::copy_n(tokens[row.rank].begin() + std::ptrdiff_t{row.token} * shape.hidden, shape.hidden,
                a.begin() + static_cast<std::ptrdiff_t>(i * shape.hidden));
  }
  const DeviceMemory a_here(a.size() * 2);
  const DeviceMemory offsets_here(offsets.size() * 4);
  to_device(a_here, a);
  to_device(offsets_here, offsets);
  GroupedGemmProblem problem;
  problem.dtype = kernels::cuda::cuda_type(plan_.dtype);
  problem.b_layout = kernels::cuda::cuda_layout(setup_.options.b_layout);
  problem.activation = activation_of(shape.epilogue);
  problem.experts = static_cast<int>(expected.expert_count());
  problem.rows_max = static_cast<int>(shape.rows_max);
  problem.n = static_cast<int>(shape.weight_columns());
  problem.k = static_cast<int>(shape.hidden);
  problem.a = a_here.data();
  problem.b = ranks_[r].expert_weights->data();
  problem.bias = shape.bias ? ranks_[r].bias->data() : nullptr;
  problem.c = ranks_[r].y->data();
  problem.offsets = static_cast<const std::uint32_t*>(offsets_here.data());
  const auto stored =
      behind ? static_cast<std::int64_t>(count) : std::int64_t{shape.rows_max} + kGuardRows;
  if (stored == 0) return {};
  const GroupedVerdict verdict = judge_grouped(problem, stored, stream(r));
  worst_ = std::max(worst_, verdict.rows.worst);
  if (verdict.right()) return {};
  return fmt::format(
      "rank {}: of {} rows {} elements are wrong, one in row {}, column {} (worst {} of its "
      "bound); "
      "{} elements behind the rows were touched",
      r, count, verdict.rows.bad, verdict.rows.first_bad / shape.features,
      verdict.rows.first_bad % shape.features, verdict.rows.worst, verdict.touched);
}

}  // namespace mk::test
