#include "tests/bench/mkbench/attention_core.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <utility>

#include "kernels/cuda/core/attention.h"

namespace mk::bench {
namespace {

namespace cuda = kernels::cuda;

constexpr int kRuns = 5;

Status check(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return fail(ErrorCode::kSystem, "the attention core alone: {}", cudaGetErrorString(error));
}

struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct EndStream {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
struct EndEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Memory = std::unique_ptr<void, Free>;
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, EndStream>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EndEvent>;

/// Random elements within +-1: values decide what a GPU's clock does.
Result<Memory> make_tensor(std::uint64_t elements, DataType type) {
  constexpr std::size_t kDrawn = 1 << 20;
  std::mt19937 random(1);
  std::vector<std::uint16_t> drawn(std::min<std::uint64_t>(kDrawn, elements));
  // Sign and low bits at random, exponents of 1/4 to 1.
  const bool bf16 = type == DataType::kBf16;
  const std::uint32_t exponent = bf16 ? 0x3e80 : 0x3400, mask = bf16 ? 0x80ff : 0x87ff;
  for (std::uint16_t& element : drawn)
    element = static_cast<std::uint16_t>(exponent + (random() & mask));
  void* memory = nullptr;
  MK_RETURN_IF_ERROR(check(cudaMalloc(&memory, elements * 2)));
  Memory made(memory);
  for (std::uint64_t at = 0; at < elements; at += drawn.size()) {
    const std::uint64_t count = std::min<std::uint64_t>(drawn.size(), elements - at);
    MK_RETURN_IF_ERROR(check(cudaMemcpy(static_cast<std::uint16_t*>(memory) + at, drawn.data(),
                                        count * 2, cudaMemcpyHostToDevice)));
  }
  return made;
}

class Core final : public AttentionCore {
 public:
  Status start(const CoreProblem& wanted) {
    std::uint64_t queries = 0, keys = 0;
    for (const CoreProblem::Part& part : wanted.parts) {
      queries += part.queries;
      keys = std::max(keys, part.keys);
    }
    cudaStream_t stream = nullptr;
    MK_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
    stream_.reset(stream);
    for (Event& event : events_) {
      cudaEvent_t made = nullptr;
      MK_RETURN_IF_ERROR(check(cudaEventCreate(&made)));
      event.reset(made);
    }
    const std::uint64_t query_row = std::uint64_t{wanted.query_heads} * wanted.head_dim;
    const std::uint64_t key_row = std::uint64_t{wanted.key_heads} * wanted.head_dim;
    MK_ASSIGN_OR_RETURN(q_, make_tensor(wanted.batch * queries * query_row, wanted.dtype));
    MK_ASSIGN_OR_RETURN(o_, make_tensor(wanted.batch * queries * query_row, wanted.dtype));
    MK_ASSIGN_OR_RETURN(k_, make_tensor(wanted.batch * keys * key_row, wanted.dtype));
    MK_ASSIGN_OR_RETURN(v_, make_tensor(wanted.batch * keys * key_row, wanted.dtype));
    const auto tensor = [&](const Memory& memory, std::uint64_t rows, std::uint64_t first,
                            std::uint64_t row) {
      cuda::AttentionTensor of;
      of.data = static_cast<std::uint16_t*>(memory.get()) + first * row;
      of.head_stride = wanted.head_dim;
      of.row_stride = static_cast<std::int64_t>(row);
      of.batch_stride = static_cast<std::int64_t>(rows * row);
      return of;
    };
    std::uint64_t first = 0;
    for (const CoreProblem::Part& part : wanted.parts) {
      cuda::AttentionProblem problem;
      problem.dtype = wanted.dtype == DataType::kBf16 ? cuda::DType::kBf16 : cuda::DType::kF16;
      problem.head_dim = static_cast<int>(wanted.head_dim);
      problem.batch = static_cast<int>(wanted.batch);
      problem.query_heads = static_cast<int>(wanted.query_heads);
      problem.key_heads = static_cast<int>(wanted.key_heads);
      problem.queries = static_cast<int>(part.queries);
      problem.keys = static_cast<int>(part.keys);
      problem.causal = wanted.causal;
      problem.q = tensor(q_, queries, first, query_row);
      problem.o = tensor(o_, queries, first, query_row);
      problem.k = tensor(k_, keys, 0, key_row);
      problem.v = tensor(v_, keys, 0, key_row);
      first += part.queries;
      if (part.queries == 0) continue;
      MK_ASSIGN_OR_RETURN(auto plan, cuda::AttentionPlan::create(problem));
      plans_.push_back(std::move(plan));
    }
    return {};
  }

  Result<std::uint64_t> measure_ns() override {
    for (int run = 0; run < kRuns + 1; ++run) {
      // The first one loads the kernel.
      if (run == 1) MK_RETURN_IF_ERROR(check(cudaEventRecord(events_[0].get(), stream_.get())));
      for (const cuda::AttentionPlan& plan : plans_) MK_RETURN_IF_ERROR(plan.launch(stream_.get()));
    }
    MK_RETURN_IF_ERROR(check(cudaEventRecord(events_[1].get(), stream_.get())));
    MK_RETURN_IF_ERROR(check(cudaEventSynchronize(events_[1].get())));
    float milliseconds = 0;
    MK_RETURN_IF_ERROR(
        check(cudaEventElapsedTime(&milliseconds, events_[0].get(), events_[1].get())));
    return static_cast<std::uint64_t>(double{milliseconds} * 1e6 / kRuns);
  }

 private:
  Memory q_, k_, v_, o_;
  std::vector<cuda::AttentionPlan> plans_;
  Stream stream_;
  Event events_[2];
};

}  // namespace

Result<std::unique_ptr<AttentionCore>> AttentionCore::create(const CoreProblem& problem) {
  auto made = std::make_unique<Core>();
  MK_RETURN_IF_ERROR(made->start(problem));
  return made;
}

}  // namespace mk::bench
