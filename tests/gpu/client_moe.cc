#include "tests/gpu/client_moe.h"

#include <algorithm>
#include <random>

#include "kernels/comm/shard.h"
#include "tests/gpu/grouped_reference.h"

namespace mk {
namespace {

constexpr auto kType = kernels::cuda::DType::kBf16;
constexpr std::uint32_t kTopK = 2;

MoeDispatchGemm::Shape shape_of(const Work& work, std::uint32_t world) {
  MoeDispatchGemm::Shape shape;
  shape.tokens_max = work.m;
  shape.hidden = work.k;
  shape.features = work.n;
  shape.experts = 2 * world + 1;  // the ranks have different numbers
  shape.top_k = kTopK;
  shape.rows_max = std::uint64_t{world} * work.m * kTopK;
  shape.b_layout = BLayout::kNK;
  return shape;
}

}  // namespace

RankTokens::RankTokens(const Work& work, const AttachOptions& at)
    : work_(work),
      at_(at),
      shape_(shape_of(work, at.world)),
      experts_here_(kernels::shard_of(shape_.experts, at.world, at.rank).count),
      ids_(std::size_t{work.m} * kTopK * 4),
      weights_(std::size_t{work.m} * kTopK * 4),
      experts_(std::size_t{experts_here_} * work.k * work.n * 2),
      y_(shape_.rows_max * work.n * 2) {
  for (std::uint32_t rank = 0; rank < at.world; ++rank)
    tokens_.emplace_back(std::size_t{work.m} * work.k * 2);
}

void RankTokens::draw(std::uint64_t launch, cudaStream_t stream) {
  const std::uint64_t seed = work_.seed * 1000 + launch * 64;
  std::mt19937_64 random(seed);
  routing_.clear();
  for (std::uint32_t rank = 0; rank < at_.world; ++rank) {
    test::fill_normal(tokens_[rank].data(), kType, std::int64_t{work_.m} * work_.k, seed + rank,
                      stream);
    tools::MoeSource& source = routing_.emplace_back();
    for (std::uint32_t i = 0; i < work_.m * kTopK; ++i) {
      source.ids.push_back(static_cast<std::int32_t>(random() % (shape_.experts + 1)) - 1);
      source.weights.push_back(static_cast<float>(random() % 1000) * 1e-3f);
    }
  }
  test::fill_normal(experts_.data(), kType, std::int64_t{experts_here_} * work_.k * work_.n,
                    seed + 32 + at_.rank, stream);
  test::poison(y_.data(), static_cast<std::int64_t>(shape_.rows_max * work_.n), stream);
  const auto bring = [&](const test::DeviceMemory& to, const auto& from) {
    test::require(
        cudaMemcpyAsync(to.data(), from.data(), from.size() * 4, cudaMemcpyHostToDevice, stream),
        "routing");
  };
  bring(ids_, routing_[at_.rank].ids);
  bring(weights_, routing_[at_.rank].weights);
}

MoeDispatchGemm::Input RankTokens::input(std::uint32_t count) const {
  MoeDispatchGemm::Input input;
  input.tokens = tokens_[at_.rank].data();
  input.ids = static_cast<const std::int32_t*>(ids_.data());
  input.weights = static_cast<const float*>(weights_.data());
  input.count = count;
  input.expert_weights = experts_.data();
  return input;
}

Status RankTokens::launch(MoeDispatchGemm& op, cudaStream_t stream, std::uint32_t count) const {
  return op.launch_on(stream, input(count), output());
}

std::int64_t RankTokens::bad(std::uint32_t count, cudaStream_t stream) const {
  tools::MoeJobShape job;
  job.nodes = at_.nodes;
  job.locals = at_.local_size;
  job.experts = shape_.experts;
  job.top_k = kTopK;
  job.hidden = work_.k;
  job.features = work_.n;
  std::vector<tools::MoeSource> sources = routing_;
  for (tools::MoeSource& source : sources) source.tokens = count;
  const tools::MoeReference expected(job, at_.rank, sources);
  const std::size_t rows = expected.rows().size();
  if (rows == 0) return 0;
  // The rows of A, as the definition has them.
  const test::DeviceMemory a(rows * work_.k * 2);
  for (std::size_t i = 0; i < rows; ++i) {
    const tools::MoeReference::Row& row = expected.rows()[i];
    test::require(cudaMemcpyAsync(static_cast<std::uint16_t*>(a.data()) + i * work_.k,
                                  static_cast<const std::uint16_t*>(tokens_[row.rank].data()) +
                                      std::size_t{row.token} * work_.k,
                                  std::size_t{work_.k} * 2, cudaMemcpyDeviceToDevice, stream),
                  "rows");
  }
  std::vector<std::uint32_t> offsets;
  for (std::uint32_t e = 0; e <= expected.expert_count(); ++e)
    offsets.push_back(static_cast<std::uint32_t>(expected.offset(e)));
  const test::DeviceMemory offsets_here(offsets.size() * 4);
  test::require(cudaMemcpyAsync(offsets_here.data(), offsets.data(), offsets.size() * 4,
                                cudaMemcpyHostToDevice, stream),
                "offsets");
  kernels::cuda::GroupedGemmProblem problem;
  problem.dtype = kType;
  problem.experts = static_cast<int>(experts_here_);
  problem.rows_max = static_cast<int>(rows);
  problem.n = static_cast<int>(work_.n);
  problem.k = static_cast<int>(work_.k);
  problem.a = a.data();
  problem.b = experts_.data();
  problem.c = y_.data();
  problem.offsets = static_cast<const std::uint32_t*>(offsets_here.data());
  return test::judge_grouped(problem, static_cast<std::int64_t>(rows), stream).rows.bad;
}

Result<MoeDispatchGemm> create_moe(Session& session, const RankTokens& tokens,
                                   std::chrono::seconds wait_timeout) {
  Tuning tuning;
  tuning.executor = Executor::kCuda;
  tuning.wait_timeout = wait_timeout;
  tuning.transport = tokens.transport();
  return MoeDispatchGemm::create(session, tokens.shape(), tuning);
}

}  // namespace mk
