#include "tests/gpu/client_ring.h"

#include <algorithm>

#include "tests/gpu/gemm_reference.h"

namespace mk {
namespace {

using kernels::cuda::AttentionProblem;
using kernels::cuda::AttentionTensor;

RingAttention::Shape shape_of(const Work& work) {
  if (work.op == "ring-open") return {work.m, 6, 2, 64, false};
  if (work.op == "ring-f16") return {work.m, 6, 2, 64, false, DataType::kF16};
  if (work.op == "ring-packed") return {work.m, 4, 2, 128, true, DataType::kBf16, 1, 5};
  return {work.m, 4, 2, 128, true, DataType::kBf16, 2};
}

kernels::cuda::DType type_of(const RingAttention::Shape& shape) {
  return shape.dtype == DataType::kBf16 ? kernels::cuda::DType::kBf16 : kernels::cuda::DType::kF16;
}

/// Of the kernels: what the bounds of rounding go by.
int tile_keys(const RingAttention::Shape& shape) { return shape.head_dim == 64 ? 128 : 176; }

/// As if the tensor began so many rows later.
AttentionTensor shifted(AttentionTensor tensor, std::int64_t rows) {
  tensor.data = static_cast<std::uint16_t*>(tensor.data) + rows * tensor.row_stride;
  return tensor;
}

std::uint64_t stride(std::int64_t elements) { return static_cast<std::uint64_t>(elements); }

}  // namespace

RankSequences::RankSequences(const Work& work, const AttachOptions& at)
    : work_(work),
      at_(at),
      shape_(shape_of(work)),
      heads_first_(work.op == "ring-open" || work.op == "ring-f16"),
      // Two parts may each have a row more than their share, of each sequence.
      rows_max_(work.m / at.world + 2 * std::max(1u, shape_.sequences_max)),
      all_q_(bytes(work.m, shape_.query_heads)),
      all_k_(bytes(work.m, shape_.key_heads)),
      all_v_(bytes(work.m, shape_.key_heads)),
      q_(bytes(rows_max_, shape_.query_heads)),
      k_(bytes(rows_max_, shape_.key_heads)),
      v_(bytes(rows_max_, shape_.key_heads)),
      o_(bytes(rows_max_, shape_.query_heads)),
      lse_(std::size_t{shape_.batch} * rows_max_ * shape_.query_heads * 4),
      starts_((shape_.sequences_max + 1) * sizeof(std::uint32_t)) {}

std::vector<std::uint32_t> RankSequences::starts(std::uint32_t seq) const {
  if (!packed()) return {0, seq};
  // An empty one, one of a single row, and the rest in two.
  return {0, seq / 3, seq / 3, seq / 3 + 1, seq - seq / 5, seq};
}

std::vector<RankSequences::Part> RankSequences::parts(std::uint32_t seq) const {
  std::vector<Part> parts;
  const auto begins = starts(seq);
  for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
    const RowRange sequence{begins[i], begins[i + 1] - begins[i]};
    const SequenceRows rows =
        sequence_rows_of_rank(sequence.count, shape_.causal, at_.world, at_.rank);
    for (const RowRange& part : rows.parts) {
      if (part.count != 0) parts.push_back({sequence, {sequence.first + part.first, part.count}});
    }
  }
  return parts;
}

std::uint64_t RankSequences::count(std::uint32_t seq) const {
  std::uint64_t count = 0;
  for (const Part& part : parts(seq)) count += part.rows.count;
  return count;
}

void RankSequences::draw(std::uint64_t launch, cudaStream_t stream) {
  const std::uint64_t seed = work_.seed * 1000 + launch * 64;
  const auto elements = [](std::size_t bytes) { return static_cast<std::int64_t>(bytes / 2); };
  const auto fill = [&](const test::DeviceMemory& memory, std::uint32_t heads,
                        std::uint64_t which) {
    test::fill_normal(memory.data(), type_of(shape_), elements(bytes(work_.m, heads)), seed + which,
                      stream);
  };
  fill(all_q_, shape_.query_heads, 0);
  fill(all_k_, shape_.key_heads, 1);
  fill(all_v_, shape_.key_heads, 2);
  // CUDA loads what copies at its first use.
  deal_out(all_q_, q_, shape_.query_heads, work_.m, stream);
  test::poison(o_.data(), elements(bytes(rows_max_, shape_.query_heads)), stream);
  const std::uint64_t queries = shape_.batch * rows_max_ * shape_.query_heads;
  test::poison(lse_.data(), static_cast<std::int64_t>(queries * 2), stream);
}

AttentionTensor RankSequences::own(const test::DeviceMemory& memory, std::uint32_t heads,
                                   std::uint64_t rows) const {
  const std::int64_t dim = shape_.head_dim;
  const auto count = static_cast<std::int64_t>(rows);
  AttentionTensor tensor;
  tensor.data = memory.data();
  tensor.row_stride = heads_first_ ? dim : heads * dim;
  tensor.head_stride = heads_first_ ? count * dim : dim;
  tensor.batch_stride = count * heads * dim;
  return tensor;
}

AttentionTensor RankSequences::whole(const test::DeviceMemory& memory, std::uint32_t heads) const {
  AttentionTensor tensor;
  tensor.data = memory.data();
  tensor.head_stride = shape_.head_dim;
  tensor.row_stride = heads * tensor.head_stride;
  tensor.batch_stride = work_.m * tensor.row_stride;
  return tensor;
}

void RankSequences::deal_out(const test::DeviceMemory& from, const test::DeviceMemory& to,
                             std::uint32_t heads, std::uint32_t seq, cudaStream_t stream) const {
  const AttentionTensor all = whole(from, heads);
  const AttentionTensor mine = own(to, heads, count(seq));
  const auto at = [](const AttentionTensor& tensor, std::int64_t batch, std::int64_t row,
                     std::int64_t head) {
    return static_cast<std::uint16_t*>(tensor.data) + batch * tensor.batch_stride +
           row * tensor.row_stride + head * tensor.head_stride;
  };
  // A run of [B,S,H,D] is all heads of a row.
  const std::uint32_t runs = heads_first_ ? heads : 1;
  const std::size_t width = std::size_t{shape_.head_dim} * 2 * (heads_first_ ? 1 : heads);
  std::int64_t row = 0;
  for (const auto& [sequence, part] : parts(seq)) {
    for (std::uint32_t run = 0; run < shape_.batch * runs; ++run) {
      const std::uint32_t batch = run / runs, head = run % runs;
      test::require(cudaMemcpy2DAsync(at(mine, batch, row, head), stride(mine.row_stride) * 2,
                                      at(all, batch, static_cast<std::int64_t>(part.first), head),
                                      stride(all.row_stride) * 2, width, part.count,
                                      cudaMemcpyDeviceToDevice, stream),
                    "rows");
    }
    row += static_cast<std::int64_t>(part.count);
  }
}

Status RankSequences::launch(RingAttention& op, cudaStream_t stream, std::uint32_t seq) const {
  deal_out(all_q_, q_, shape_.query_heads, seq, stream);
  deal_out(all_k_, k_, shape_.key_heads, seq, stream);
  deal_out(all_v_, v_, shape_.key_heads, seq, stream);
  RingAttention::Input input;
  input.q = q_.data();
  input.k = k_.data();
  input.v = v_.data();
  RingAttention::Output output;
  output.out = o_.data();
  output.lse = static_cast<float*>(lse_.data());
  if (heads_first_) {
    const std::uint64_t rows = count(seq), head = rows * shape_.head_dim;
    input.q_stride = input.k_stride = input.v_stride = output.out_stride = shape_.head_dim;
    input.q_head_stride = input.k_head_stride = input.v_head_stride = output.out_head_stride = head;
    output.lse_stride = 1;
    output.lse_head_stride = rows;
  }
  if (packed()) {
    // Of memory that is not pinned the call takes a copy; a graph copies anew with each replay.
    begins_ = starts(seq);
    test::require(
        cudaMemcpyAsync(starts_.data(), begins_.data(), begins_.size() * sizeof begins_[0],
                        cudaMemcpyHostToDevice, stream),
        "starts");
    input.sequences = static_cast<std::uint32_t>(begins_.size() - 1);
    input.sequence_starts = begins_.data();
    if (op.launch_on(stream, input, output, seq))
      return fail(ErrorCode::kInternal, "starts in memory of the host were taken");
    input.sequence_starts = static_cast<const std::uint32_t*>(starts_.data());
    input.rows = rows_max_;
  }
  return op.launch_on(stream, input, output, seq);
}

std::int64_t RankSequences::bad(std::uint32_t seq, cudaStream_t stream) const {
  AttentionProblem problem;
  problem.dtype = type_of(shape_);
  problem.head_dim = static_cast<int>(shape_.head_dim);
  problem.batch = static_cast<int>(shape_.batch);
  problem.query_heads = static_cast<int>(shape_.query_heads);
  problem.key_heads = static_cast<int>(shape_.key_heads);
  problem.causal = shape_.causal;
  const std::uint64_t rows = count(seq);
  problem.lse_row_stride = heads_first_ ? 1 : shape_.query_heads;
  problem.lse_head_stride = heads_first_ ? static_cast<std::int64_t>(rows) : 1;
  problem.lse_batch_stride = static_cast<std::int64_t>(rows * shape_.query_heads);
  std::int64_t wrong = 0;
  std::int64_t row = 0;
  for (const auto& [sequence, part] : parts(seq)) {
    const auto begin = static_cast<std::int64_t>(sequence.first);
    problem.queries = problem.keys = static_cast<int>(sequence.count);
    problem.k = shifted(whole(all_k_, shape_.key_heads), begin);
    problem.v = shifted(whole(all_v_, shape_.key_heads), begin);
    problem.q = shifted(whole(all_q_, shape_.query_heads), begin);
    // The rank's own rows where the judge looks for the sequence's.
    const auto first = static_cast<std::int64_t>(part.first) - begin;
    problem.o = shifted(own(o_, shape_.query_heads, rows), row - first);
    problem.lse = static_cast<float*>(lse_.data()) + (row - first) * problem.lse_row_stride;
    const auto verdict = test::judge_attention(
        problem, tile_keys(shape_), static_cast<int>(first),
        static_cast<int>(first) + static_cast<int>(part.count), stream, static_cast<int>(least()));
    wrong += verdict.o.bad + verdict.lse.bad;
    row += static_cast<std::int64_t>(part.count);
  }
  return wrong;
}

Result<RingAttention> create_ring(Session& session, const RankSequences& sequences,
                                  std::chrono::seconds wait_timeout) {
  RingAttention::Tuning tuning;
  tuning.executor = Executor::kCuda;
  tuning.wait_timeout = wait_timeout;
  tuning.transport = sequences.transport();
  return RingAttention::create(session, sequences.shape(), tuning);
}

}  // namespace mk
