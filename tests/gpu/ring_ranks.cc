#include "tests/gpu/ring_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "kernels/comm/shard.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/rank_operator.h"

namespace mk::test {

using kernels::cuda::AttentionProblem;
using kernels::cuda::AttentionTensor;

RingRanks::RingRanks(const RingSetup& setup) : PlacedRanks(setup.world()), setup_(setup) {
  kernels::RingAttentionTiling tiling = kernels::ring_attention_cuda_tiling(setup.shape);
  if (setup.chunk_bytes != 0) tiling.chunk_bytes = setup.chunk_bytes;
  if (setup.banks != 0) tiling.banks = setup.banks;
  tiling.window_pairs = setup.window_pairs;
  tiling.engines = setup.engines_together != 0;
  tiling.heads_together = setup.engines_together;
  plan_ = or_exit(kernels::RingAttentionPlan::make(setup.nodes, setup.locals, setup.shape, tiling));
  const std::size_t dim_bytes = plan_.head_dim * 2;
  const auto bytes_of = [&](std::size_t rows, std::size_t heads) {
    return plan_.batch * rows * (heads * dim_bytes + setup.gap * 2);
  };
  const auto fill_in = [&](RingRank& rank, std::uint32_t) {
    rank.q = device_memory(bytes_of(plan_.rows_max(), plan_.query_heads));
    rank.k = device_memory(bytes_of(plan_.rows_max(), plan_.key_heads));
    rank.v = device_memory(bytes_of(plan_.rows_max(), plan_.key_heads));
    rank.o = device_memory(bytes_of(plan_.rows_max(), plan_.query_heads));
    rank.lse = device_memory(std::size_t{4} * plan_.batch * plan_.rows_max() * plan_.query_heads);
    rank.starts = device_memory((plan_.sequences_max + 1) * sizeof(std::uint32_t));
  };
  const auto create = [&](std::uint32_t r, const kernels::RankContext& context,
                          const kernels::CudaOptions& options) {
    ranks_[r].op = or_exit(kernels::RingAttentionCuda::create(plan_, context, options));
    poison(ranks_[r].o->data(), 8, stream(r));
    delay(1, stream(r));
  };
  place(setup, plan_.workspace_bytes, plan_.flag_count(), fill_in, create);
  const std::size_t rows = std::size_t{plan_.batch} * plan_.seq_max;
  q_ = device_memory(rows * plan_.query_heads * dim_bytes);
  k_ = device_memory(rows * plan_.key_heads * dim_bytes);
  v_ = device_memory(rows * plan_.key_heads * dim_bytes);
  o_ = device_memory(rows * plan_.query_heads * dim_bytes);
  lse_ = device_memory(rows * plan_.query_heads * 4);
}

std::int64_t RingRanks::output_elements() const {
  return std::int64_t{plan_.batch} * seq_ * plan_.query_heads * plan_.head_dim;
}

/// By the definition of the parts.
template <class Take>
void RingRanks::for_parts(std::uint32_t rank, Take&& take) const {
  std::uint32_t row = 0;
  for (std::size_t i = 0; i + 1 < starts_.size(); ++i) {
    for (const std::uint32_t part : {rank, plan_.parts() - 1 - rank}) {
      const kernels::ShardRange range =
          kernels::shard_of(starts_[i + 1] - starts_[i], plan_.parts(), part);
      if (range.count != 0) take(row, starts_[i] + range.first, range.count);
      row += range.count;
      if (!plan_.causal) break;
    }
  }
}

AttentionTensor RingRanks::tensor(void* data, std::uint32_t rows, std::uint32_t heads,
                                  HeadLayout layout, std::uint32_t gap) const {
  const std::int64_t dim = plan_.head_dim;
  AttentionTensor tensor;
  tensor.data = data;
  if (layout == HeadLayout::kRowsFirst) {
    tensor.row_stride = heads * dim + gap;
    tensor.head_stride = dim;
    tensor.batch_stride = rows * tensor.row_stride;
  } else {
    tensor.row_stride = dim;
    tensor.head_stride = rows * dim;
    tensor.batch_stride = heads * tensor.head_stride;
  }
  return tensor;
}

kernels::RingAttentionDeviceTensors RingRanks::tensors(std::uint32_t r) const {
  const RingRank& rank = ranks_[r];
  const std::uint32_t own = rows(r);
  const auto of = [&](const std::unique_ptr<DeviceMemory>& memory, std::uint32_t heads) {
    return tensor(memory->data(), own, heads, setup_.layout, setup_.gap);
  };
  kernels::RingAttentionDeviceTensors tensors;
  tensors.q = of(rank.q, plan_.query_heads);
  tensors.k = of(rank.k, plan_.key_heads);
  tensors.v = of(rank.v, plan_.key_heads);
  tensors.o = of(rank.o, plan_.query_heads);
  tensors.lse = static_cast<float*>(rank.lse->data());
  tensors.lse_head_stride = 1;
  tensors.lse_row_stride = plan_.query_heads;
  tensors.lse_batch_stride = std::int64_t{own} * plan_.query_heads;
  tensors.scale = inputs_.scale;
  if (packed()) {
    tensors.starts = static_cast<const std::uint32_t*>(rank.starts->data());
    tensors.sequences = static_cast<std::uint32_t>(starts_.size() - 1);
    tensors.room = room_ != 0 ? room_ : own;
  }
  return tensors;
}

namespace {

/// Rows of one head from one tensor to another.
void copy_rows(const AttentionTensor& to, std::int64_t to_row, const AttentionTensor& from,
               std::int64_t from_row, std::uint32_t batch, std::uint32_t head, std::uint32_t rows,
               std::uint32_t dim) {
  const auto at = [&](const AttentionTensor& tensor, std::int64_t row) {
    return static_cast<std::uint16_t*>(tensor.data) + batch * tensor.batch_stride +
           head * tensor.head_stride + row * tensor.row_stride;
  };
  require(cudaMemcpy2DAsync(at(to, to_row), static_cast<std::size_t>(to.row_stride) * 2,
                            at(from, from_row), static_cast<std::size_t>(from.row_stride) * 2,
                            std::size_t{dim} * 2, rows, cudaMemcpyDefault, nullptr),
          "rows");
}

}  // namespace

void RingRanks::deal_out(const DeviceMemory& whole, std::uint32_t heads,
                         std::unique_ptr<DeviceMemory> RingRank::*part) {
  const AttentionTensor from = tensor(whole.data(), seq_, heads, HeadLayout::kRowsFirst, 0);
  for (std::uint32_t r = 0; r < world(); ++r) {
    const AttentionTensor to =
        tensor((ranks_[r].*part)->data(), rows(r), heads, setup_.layout, setup_.gap);
    for_parts(r, [&](std::uint32_t row, std::uint32_t first, std::uint32_t count) {
      for (std::uint32_t batch = 0; batch < plan_.batch; ++batch) {
        for (std::uint32_t head = 0; head < heads; ++head)
          copy_rows(to, row, from, first, batch, head, count, plan_.head_dim);
      }
    });
  }
}

void RingRanks::fill(std::uint32_t seq, const RingInputs& inputs) {
  starts_ = {0, seq};
  fill_rows(seq, inputs);
}

void RingRanks::fill_packed(const std::vector<std::uint32_t>& lengths, const RingInputs& inputs) {
  starts_ = {0};
  for (const std::uint32_t length : lengths) starts_.push_back(starts_.back() + length);
  for (std::uint32_t r = 0; r < world(); ++r) set_starts(r, starts_);
  fill_rows(starts_.back(), inputs);
}

void RingRanks::set_starts(std::uint32_t r, const std::vector<std::uint32_t>& starts) {
  make_current(r);
  require(cudaMemcpyAsync(ranks_[r].starts->data(), starts.data(),
                          starts.size() * sizeof(std::uint32_t), cudaMemcpyDefault, stream(r)),
          "starts");
  require(cudaStreamSynchronize(stream(r)), "starts");
}

void RingRanks::fill_rows(std::uint32_t seq, const RingInputs& inputs) {
  seq_ = seq;
  inputs_ = inputs;
  require(cudaSetDevice(0), "cudaSetDevice");
  const auto type = kernels::cuda::cuda_type(plan_.dtype);
  const auto elements = [&](std::uint32_t heads) {
    return std::int64_t{plan_.batch} * seq * heads * plan_.head_dim;
  };
  fill_normal(q_->data(), type, elements(plan_.query_heads), inputs.seed * 4, nullptr);
  fill_normal(k_->data(), type, elements(plan_.key_heads), inputs.seed * 4 + 1, nullptr);
  fill_normal(v_->data(), type, elements(plan_.key_heads), inputs.seed * 4 + 2, nullptr);
  const std::size_t row = std::size_t{plan_.key_heads} * plan_.head_dim;
  for (std::uint32_t batch = 0; batch < plan_.batch; ++batch) {
    auto* const keys = static_cast<std::uint16_t*>(k_->data()) + batch * seq * row;
    auto* const values = static_cast<std::uint16_t*>(v_->data()) + batch * seq * row;
    for (std::uint32_t i = 1; inputs.equal_keys && i < seq; ++i) {
      require(cudaMemcpyAsync(keys + i * row, keys, row * 2, cudaMemcpyDefault, nullptr), "keys");
    }
    if (inputs.from >= inputs.to) continue;
    const std::vector<std::uint16_t> bits((inputs.to - inputs.from) * row, inputs.value);
    for (std::uint16_t* tensor : {keys, values}) {
      if (tensor == keys && !inputs.keys_too) continue;
      require(
          cudaMemcpy(tensor + inputs.from * row, bits.data(), bits.size() * 2, cudaMemcpyDefault),
          "bits");
    }
  }
  // What a tile reads beyond its own rows must not matter.
  for (std::uint32_t r = 0; packed() && r < world(); ++r) {
    const std::int64_t room = std::int64_t{rows(r)} * plan_.head_dim;
    make_current(r);
    test::poison(ranks_[r].q->data(), room * plan_.query_heads, nullptr);
    test::poison(ranks_[r].k->data(), room * plan_.key_heads, nullptr);
    test::poison(ranks_[r].v->data(), room * plan_.key_heads, nullptr);
    require(cudaStreamSynchronize(nullptr), "poison");
  }
  require(cudaSetDevice(0), "cudaSetDevice");
  deal_out(*q_, plan_.query_heads, &RingRank::q);
  deal_out(*k_, plan_.key_heads, &RingRank::k);
  deal_out(*v_, plan_.key_heads, &RingRank::v);
  require(cudaStreamSynchronize(nullptr), "inputs");
  for (std::uint32_t r = 0; r < world(); ++r) {
    make_current(r);
    const std::int64_t queries = std::int64_t{plan_.batch} * rows(r) * plan_.query_heads;
    test::poison(ranks_[r].o->data(), queries * plan_.head_dim, stream(r));
    test::poison(ranks_[r].lse->data(), 2 * queries, stream(r));
    require(cudaStreamSynchronize(stream(r)), "poison");
  }
  require(cudaSetDevice(0), "cudaSetDevice");
}

Status RingRanks::launch(std::uint32_t r, kernels::Mode mode) {
  // The GPU alone knows how many rows packed sequences have.
  return launch_of(r, packed() ? plan_.seq_max : seq_, mode);
}

Status RingRanks::launch_of(std::uint32_t r, std::uint32_t seq, kernels::Mode mode) {
  return op(r).launch(stream(r), tensors(r), seq, mode);
}

void RingRanks::collect() {
  const std::uint32_t heads = plan_.query_heads;
  const AttentionTensor to = tensor(o_->data(), seq_, heads, HeadLayout::kRowsFirst, 0);
  require(cudaSetDevice(0), "cudaSetDevice");
  test::poison(o_->data(), output_elements(), nullptr);
  for (std::uint32_t r = 0; r < world(); ++r) {
    const std::uint32_t own = rows(r);
    const AttentionTensor from = tensor(ranks_[r].o->data(), own, heads, setup_.layout, setup_.gap);
    for_parts(r, [&](std::uint32_t row, std::uint32_t first, std::uint32_t count) {
      for (std::uint32_t batch = 0; batch < plan_.batch; ++batch) {
        for (std::uint32_t head = 0; head < heads; ++head)
          copy_rows(to, first, from, row, batch, head, count, plan_.head_dim);
        auto* const lse = static_cast<float*>(lse_->data()) + (batch * seq_ + first) * heads;
        const auto* const its =
            static_cast<const float*>(ranks_[r].lse->data()) + (batch * own + row) * heads;
        require(
            cudaMemcpyAsync(lse, its, std::size_t{count} * heads * 4, cudaMemcpyDefault, nullptr),
            "lse");
      }
    });
  }
  require(cudaStreamSynchronize(nullptr), "collect");
}

AttentionVerdict RingRanks::judge() {
  collect();
  AttentionVerdict all;
  for (std::size_t i = 0; i + 1 < starts_.size(); ++i) {
    if (starts_[i] == starts_[i + 1]) continue;
    const AttentionVerdict one = judge_sequence(starts_[i], starts_[i + 1]);
    all.o.include(one.o);
    all.lse.include(one.lse);
  }
  return all;
}

/// Rows [begin, end) of all, which are a sequence.
AttentionVerdict RingRanks::judge_sequence(std::uint32_t begin, std::uint32_t end) {
  AttentionProblem problem;
  problem.dtype = kernels::cuda::cuda_type(plan_.dtype);
  problem.head_dim = static_cast<int>(plan_.head_dim);
  problem.batch = static_cast<int>(plan_.batch);
  problem.query_heads = static_cast<int>(plan_.query_heads);
  problem.key_heads = static_cast<int>(plan_.key_heads);
  problem.queries = problem.keys = static_cast<int>(end - begin);
  problem.causal = plan_.causal;
  problem.scale = inputs_.scale;
  const auto whole = [&](const std::unique_ptr<DeviceMemory>& memory, std::uint32_t heads) {
    AttentionTensor all = tensor(memory->data(), seq_, heads, HeadLayout::kRowsFirst, 0);
    all.data = static_cast<std::uint16_t*>(all.data) + begin * all.row_stride;
    return all;
  };
  problem.q = whole(q_, plan_.query_heads);
  problem.k = whole(k_, plan_.key_heads);
  problem.v = whole(v_, plan_.key_heads);
  problem.o = whole(o_, plan_.query_heads);
  problem.lse = static_cast<float*>(lse_->data()) + std::size_t{begin} * plan_.query_heads;
  problem.lse_head_stride = 1;
  problem.lse_row_stride = plan_.query_heads;
  problem.lse_batch_stride = std::int64_t{seq_} * plan_.query_heads;
  return judge_attention(problem, op(0).tile_keys(), 0, problem.queries, nullptr,
                         static_cast<int>(plan_.parts()));
}

}  // namespace mk::test
