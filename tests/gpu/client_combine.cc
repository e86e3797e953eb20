#include "tests/gpu/client_combine.h"

#include <algorithm>
#include <random>

#include "kernels/comm/shard.h"

namespace mk {
namespace {

constexpr auto kType = kernels::cuda::DType::kBf16;
constexpr std::uint32_t kTopK = 2;

GemmCombine::Shape shape_of(const Work& work, std::uint32_t world) {
  GemmCombine::Shape shape;
  shape.tokens_max = work.m;
  shape.hidden = work.n;
  shape.features = work.k;
  shape.experts = 2 * world + 1;  // the ranks have different numbers
  shape.top_k = kTopK;
  shape.b_layout = BLayout::kNK;
  return shape;
}

}  // namespace

RankRows::RankRows(const Work& work, const AttachOptions& at)
    : work_(work),
      at_(at),
      shape_(shape_of(work, at.world)),
      rows_max_(std::size_t{at.world} * work.m * kTopK),
      ids_(std::size_t{work.m} * kTopK * 4),
      residual_(std::size_t{work.m} * work.n * 2),
      out_(std::size_t{work.m} * work.n * 2) {
  for (std::uint32_t rank = 0; rank < at.world; ++rank) {
    y_.emplace_back(rows_max_ * work.k * 2);
    experts_.emplace_back(std::size_t{kernels::shard_of(shape_.experts, at.world, rank).count} *
                          work.k * work.n * 2);
  }
}

void RankRows::draw(std::uint64_t launch, cudaStream_t stream) {
  seed_ = work_.seed * 1000 + launch * 128;
  std::mt19937_64 random(seed_);
  routing_.assign(at_.world, {});
  for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
    test::fill_normal(y_[rank].data(), kType, static_cast<std::int64_t>(rows_max_) * work_.k,
                      seed_ + rank, stream);
    const std::int64_t here = kernels::shard_of(shape_.experts, at_.world, rank).count;
    test::fill_normal(experts_[rank].data(), kType, here * work_.k * work_.n, seed_ + 32 + rank,
                      stream);
    for (std::uint32_t i = 0; i < work_.m * kTopK; ++i) {
      routing_[rank].ids.push_back(static_cast<std::int32_t>(random() % (shape_.experts + 1)) - 1);
      routing_[rank].weights.push_back(static_cast<float>(random() % 1000) * 1e-3f);
    }
  }
  const std::int64_t elements = std::int64_t{work_.m} * work_.n;
  test::fill_normal(residual_.data(), kType, elements, seed_ + 64 + at_.rank, stream);
  test::poison(out_.data(), elements, stream);
  const std::vector<std::int32_t>& ids = routing_[at_.rank].ids;
  test::require(
      cudaMemcpyAsync(ids_.data(), ids.data(), ids.size() * 4, cudaMemcpyHostToDevice, stream),
      "ids");
  bring(work_.m, stream);
  for (const auto& [count, handle] : handles_) bring(count, stream);
}

kernels::testing::Handle RankRows::handle_of(std::uint32_t rank, std::uint32_t count) const {
  std::vector<kernels::testing::RankRouting> routing = routing_;
  for (kernels::testing::RankRouting& one : routing) {
    one.tokens = count;
    one.ids.resize(std::size_t{count} * kTopK);
  }
  std::mt19937_64 random(seed_ + 96 + rank);
  return kernels::testing::draw_handle(routing, shape_.experts, kTopK, rank, random);
}

void RankRows::bring(std::uint32_t count, cudaStream_t stream) const {
  const kernels::testing::Handle handle = handle_of(at_.rank, count);
  DeviceHandle& to = handles_[count];
  if (to.rows == nullptr) {
    to.rows = std::make_unique<test::DeviceMemory>(rows_max_ * sizeof(MoeRow));
    to.offsets = std::make_unique<test::DeviceMemory>(handle.offsets.size() * 4);
  }
  // All that there is room for: the offsets say how many they are.
  to.room = std::size_t{at_.world} * count * kTopK;
  const auto copy = [&](const test::DeviceMemory& memory, const auto& host) {
    test::require(cudaMemcpyAsync(memory.data(), host.data(), host.size() * sizeof(host[0]),
                                  cudaMemcpyHostToDevice, stream),
                  "handle");
  };
  copy(*to.rows, handle.rows);
  copy(*to.offsets, handle.offsets);
}

Status RankRows::launch(GemmCombine& op, cudaStream_t stream, std::uint32_t count) const {
  if (handles_.find(count) == handles_.end()) bring(count, stream);
  const DeviceHandle& handle = handles_.at(count);
  GemmCombine::Input input;
  input.y = y_[at_.rank].data();
  input.rows = {static_cast<const MoeRow*>(handle.rows->data()), handle.room};
  input.expert_offsets = {static_cast<const std::uint32_t*>(handle.offsets->data()),
                          op.expert_count() + std::size_t{1}};
  input.expert_weights = experts_[at_.rank].data();
  input.ids = static_cast<const std::int32_t*>(ids_.data());
  input.count = count;
  input.residual = residual_.data();
  return op.launch_on(stream, input, out_.data());
}

std::int64_t RankRows::bad(std::uint32_t count, cudaStream_t stream) const {
  std::vector<test::CombineSlot> slots(std::size_t{count} * kTopK);
  if (count == 0) return 0;
  for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
    const kernels::testing::Handle handle = handle_of(rank, count);
    for (std::size_t expert = 0; expert + 1 < handle.offsets.size(); ++expert) {
      for (std::uint32_t i = handle.offsets[expert]; i < handle.offsets[expert + 1]; ++i) {
        const kernels::MoeRow& row = handle.rows[i];
        if (row.rank != at_.rank) continue;
        slots[std::size_t{row.token} * kTopK + row.slot] = {
            static_cast<std::int32_t>(rank), static_cast<std::int32_t>(i),
            static_cast<std::int32_t>(expert), row.weight};
      }
    }
  }
  const test::DeviceMemory slots_here(slots.size() * sizeof(test::CombineSlot));
  test::require(
      cudaMemcpyAsync(slots_here.data(), slots.data(), slots.size() * sizeof(test::CombineSlot),
                      cudaMemcpyHostToDevice, stream),
      "slots");
  test::CombineProblem problem;
  problem.nodes = static_cast<int>(at_.nodes);
  problem.top_k = kTopK;
  problem.hidden = static_cast<int>(work_.n);
  problem.features = static_cast<int>(work_.k);
  problem.tokens = static_cast<int>(count);
  for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
    problem.y[rank] = y_[rank].data();
    problem.weights[rank] = experts_[rank].data();
  }
  problem.slots = static_cast<const test::CombineSlot*>(slots_here.data());
  problem.residual = residual_.data();
  problem.out = out_.data();
  return test::judge_combine(problem, stream).bad;
}

Result<GemmCombine> create_combine(Session& session, const RankRows& rows,
                                   std::chrono::seconds wait_timeout) {
  Tuning tuning;
  tuning.executor = Executor::kCuda;
  tuning.wait_timeout = wait_timeout;
  return GemmCombine::create(session, rows.shape(), tuning);
}

}  // namespace mk
