// Tuning::batch_invariant on GPUs, through libmkclient and daemons: ranks that are threads of this
// process and share the GPUs there are. (CPUs: tests/client/batch_invariance_test.cc.)
#include <cuda_runtime_api.h>

#include "tests/client/row_bits.h"
#include "tests/gpu/client_ranks.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {
namespace {

class GpuMemory : public Memory {
 public:
  void choose_device(std::uint32_t rank) const override {
    require(cudaSetDevice(device_of(rank)), "device");
  }
  std::shared_ptr<void> room(std::size_t bytes) const override {
    auto memory = std::make_shared<DeviceMemory>(bytes + 1);
    return {memory, memory->data()};
  }
  void copy(void* to, const void* from, std::size_t bytes) const override {
    require(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy");
  }
};

class BatchInvarianceOnGpus : public testing::TestWithParam<EmbeddedWorld> {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "no GPU";
  }
  const GpuMemory memory_{};
  /// 18 steps of K; tiles of several shapes, which are chosen where they are not named.
  const RowBits bits_{memory_,
                      Executor::kCuda,
                      GetParam(),
                      {{1536, 1536, 0, 0}, {520, 520, 0, 0}, {300, 1536, 64, 128}, {77, 77, 0, 0}},
                      264,
                      1096,
                      {BLayout::kNK},
                      false,
                      false,
                      1500,
                      {0}};
};

TEST_P(BatchInvarianceOnGpus, AllGatherGemm) { bits_.all_gather_gemm(); }
TEST_P(BatchInvarianceOnGpus, GemmReduceScatter) { bits_.gemm_reduce_scatter(); }
TEST_P(BatchInvarianceOnGpus, GemmAllReduce) { bits_.gemm_all_reduce(); }
TEST_P(BatchInvarianceOnGpus, MoeDispatchGemmAndGemmCombine) { bits_.experts(); }
TEST_P(BatchInvarianceOnGpus, RingAttention) { bits_.ring_attention(); }

INSTANTIATE_TEST_SUITE_P(Worlds, BatchInvarianceOnGpus,
                         testing::Values(EmbeddedWorld{1, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{1, 2, "loopback", DataType::kBf16},
                                         EmbeddedWorld{2, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{2, 2, "loopback", DataType::kBf16},
                                         EmbeddedWorld{3, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{3, 2, "loopback", DataType::kBf16}),
                         name_of_world);

}  // namespace
}  // namespace mk::test
