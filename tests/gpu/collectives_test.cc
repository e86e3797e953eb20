// AllGather and ReduceScatter as persistent kernels: all ranks of a job on one GPU, or on two, one
// node or several that a HostProxy joins. Every element of every launch is compared.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/comm/shard.h"
#include "kernels/ops/all_gather/spec.h"
#include "kernels/ops/reduce_scatter/spec.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/graphs.h"
#include "tests/gpu/placed_ranks.h"
#include "tests/kernels/support/reference.h"

namespace mk::test {
namespace {

using kernels::DType;
using kernels::Mode;
using kernels::Partials;
using Bytes = std::vector<std::byte>;

struct Setup : PlacedSetup {
  std::uint32_t m = 0, n = 0;
  DType dtype = DType::kBf16;
  Partials partials = Partials::kElement;
  std::uint32_t chunk_bytes = 0;

  std::uint32_t share(std::uint32_t rank, std::uint32_t rows) const {
    return kernels::shard_of(rows, world(), rank).count;
  }
  std::size_t row_bytes() const { return std::size_t{n} * kernels::bytes_of(dtype); }
};

double value_at(DType dtype, const Bytes& bytes, std::size_t at) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, bytes.data() + at * sizeof value, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, bytes.data() + at * sizeof bits, sizeof bits);
  return kernels::testing::to_double(dtype, bits);
}

/// Within +-1; the same for the same numbers.
Bytes drawn(const Setup& setup, std::uint64_t seed, std::uint32_t rank, std::uint32_t rows) {
  std::mt19937_64 random(seed * 1009 + rank);
  Bytes bytes(rows * setup.row_bytes());
  const std::size_t count = std::size_t{rows} * setup.n;
  for (std::size_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(random() >> 40) * 0x1p-23F - 1;
    if (setup.dtype == DType::kF32) {
      std::memcpy(bytes.data() + i * 4, &value, 4);
    } else {
      const std::uint16_t bits = kernels::testing::from_float(setup.dtype, value);
      std::memcpy(bytes.data() + i * 2, &bits, 2);
    }
  }
  return bytes;
}

struct AllGather {
  using Plan = kernels::AllGatherPlan;
  static Result<Plan> plan(const Setup& s, const kernels::Tiling& tiling) {
    return Plan::make(s.nodes, s.locals, s.m, s.n, s.dtype, tiling);
  }
  static constexpr auto make = &kernels::make_all_gather_cuda;
  static std::uint32_t input_rows(const Setup& s, std::uint32_t rank, std::uint32_t m) {
    return s.share(rank, m);
  }
  static std::uint32_t output_rows(const Setup&, std::uint32_t, std::uint32_t m) { return m; }
  static std::string judge(const Setup& s, const std::vector<Bytes>& inputs, std::uint32_t,
                           std::uint32_t, const Bytes& output) {
    Bytes all;
    for (const Bytes& input : inputs) all.insert(all.end(), input.begin(), input.end());
    const auto at = std::mismatch(all.begin(), all.end(), output.begin(), output.end());
    if (at.first == all.end() && at.second == output.end()) return {};
    return fmt::format("byte {} of {} ({} to a row)", at.first - all.begin(), all.size(),
                       s.row_bytes());
  }
};

struct ReduceScatter {
  using Plan = kernels::ReduceScatterPlan;
  static Result<Plan> plan(const Setup& s, const kernels::Tiling& tiling) {
    return Plan::make(s.nodes, s.locals, s.m, s.n, s.dtype, tiling, s.partials);
  }
  static constexpr auto make = &kernels::make_reduce_scatter_cuda;
  static std::uint32_t input_rows(const Setup&, std::uint32_t, std::uint32_t m) { return m; }
  static std::uint32_t output_rows(const Setup& s, std::uint32_t rank, std::uint32_t m) {
    return s.share(rank, m);
  }
  static std::string judge(const Setup& s, const std::vector<Bytes>& inputs, std::uint32_t rank,
                           std::uint32_t m, const Bytes& output) {
    const double v = s.dtype == DType::kBf16 ? 0x1p-8 : s.dtype == DType::kF16 ? 0x1p-11 : 0;
    const bool rounds = s.nodes > 1 && s.locals > 1 && s.partials == Partials::kElement;
    const std::size_t first = std::size_t{kernels::shard_of(m, s.world(), rank).first} * s.n;
    for (std::size_t i = 0; i < output.size() / kernels::bytes_of(s.dtype); ++i) {
      double sum = 0;
      double magnitude = 0;
      for (const Bytes& input : inputs) {
        const double value = value_at(s.dtype, input, first + i);
        sum += value;
        magnitude += std::fabs(value);
      }
      const double bound = s.world() == 1
                               ? 0
                               : 1.02 * (s.world() * 0x1p-24 * magnitude + v * std::fabs(sum) +
                                         (rounds ? v * magnitude : 0)) +
                                     0x1p-24;
      const double found = value_at(s.dtype, output, i);
      if (!(std::fabs(found - sum) <= bound))
        return fmt::format("element {} is {}, expected {} within {}", i, found, sum, bound);
    }
    return {};
  }
};

struct CollectiveRank : PlacedRank<kernels::CollectiveCuda> {
  std::unique_ptr<DeviceMemory> input, output;
  void* from = nullptr;
};

/// A job of one process.
template <class Op>
class Ranks : public PlacedRanks<CollectiveRank> {
 public:
  explicit Ranks(const Setup& setup) : PlacedRanks(setup.world()), setup_(setup) {
    kernels::Tiling tiling;
    tiling.chunk_bytes = setup.chunk_bytes;
    const auto plan = or_exit(Op::plan(setup, tiling));
    const auto fill_in = [&](CollectiveRank& rank, std::uint32_t) {
      rank.input = std::make_unique<DeviceMemory>(setup.m * setup.row_bytes() + kGuard);
      rank.output = std::make_unique<DeviceMemory>(setup.m * setup.row_bytes() + kGuard);
    };
    const auto create = [&](std::uint32_t r, const kernels::RankContext& context,
                            const kernels::CudaOptions& options) {
      ranks_[r].op = or_exit(Op::make(plan, context, options));
    };
    place(setup, plan.workspace_bytes, plan.flag_count(), fill_in, create);
  }

  /// Draws inputs, in the operator's own memory where it has such and `in_place` says so, poisons
  /// outputs and their guards, and waits.
  void fill(std::uint64_t seed, std::uint32_t m, bool in_place = false) {
    inputs_.clear();
    for (std::uint32_t r = 0; r < setup_.world(); ++r) {
      CollectiveRank& rank = ranks_[r];
      make_current(r);
      inputs_.push_back(drawn(setup_, seed, r, Op::input_rows(setup_, r, m)));
      void* const place = in_place && r % 2 == 0 ? rank.op->input() : nullptr;
      rank.from = place != nullptr ? place : rank.input->data();
      require(cudaMemcpy(rank.from, inputs_[r].data(), inputs_[r].size(), cudaMemcpyHostToDevice),
              "inputs");
      poison(r);
    }
  }
  void poison(std::uint32_t r) {
    make_current(r);
    require(cudaMemset(ranks_[r].output->data(), 0xff, setup_.m * setup_.row_bytes() + kGuard),
            "outputs");
    require(cudaDeviceSynchronize(), "outputs");
  }
  Status launch(std::uint32_t r, std::uint32_t m, Mode mode = Mode::kFused) {
    make_current(r);
    CollectiveRank& rank = ranks_[r];
    return rank.op->launch(rank.stream, rank.from, rank.output->data(), m, mode);
  }
  void launch_all(std::uint32_t m, Mode mode) {
    for (std::uint32_t r = 0; r < setup_.world(); ++r) {
      const Status launched = launch(r, m, mode);
      ASSERT_TRUE(launched) << launched.error().message;
    }
  }
  Bytes output(std::uint32_t r, std::uint32_t m) {
    make_current(r);
    Bytes all(setup_.m * setup_.row_bytes() + kGuard);
    require(cudaMemcpy(all.data(), ranks_[r].output->data(), all.size(), cudaMemcpyDeviceToHost),
            "outputs");
    const std::size_t bytes = Op::output_rows(setup_, r, m) * setup_.row_bytes();
    EXPECT_TRUE(std::all_of(all.begin() + static_cast<std::ptrdiff_t>(bytes), all.end(),
                            [](std::byte b) { return b == std::byte{0xff}; }))
        << "rank " << r << " wrote beyond its output";
    all.resize(bytes);
    return all;
  }
  void expect_right(std::uint32_t m) {
    for (std::uint32_t r = 0; r < setup_.world(); ++r) {
      const Status finished = finish(r);
      ASSERT_TRUE(finished) << "rank " << r << ": " << finished.error().message;
    }
    for (std::uint32_t r = 0; r < setup_.world(); ++r)
      ASSERT_EQ("", Op::judge(setup_, inputs_, r, m, output(r, m))) << "rank " << r;
  }

 private:
  static constexpr std::size_t kGuard = 256;

  Setup setup_;
  std::vector<Bytes> inputs_;
};

bool has_hopper(int devices = 1) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError();
  return count >= devices;
}

template <class Op>
class CollectiveOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "no GPU";
  }
};
using Ops = testing::Types<AllGather, ReduceScatter>;
TYPED_TEST_SUITE(CollectiveOnGpu, Ops);

constexpr std::pair<std::uint32_t, std::uint32_t> kWorlds[] = {{1, 1}, {1, 2}, {1, 3}, {1, 4},
                                                               {2, 1}, {2, 2}, {3, 1}};

TYPED_TEST(CollectiveOnGpu, IsRightInEveryWorldForChangingM) {
  for (const auto& [nodes, locals] : kWorlds) {
    for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
      Setup setup;
      setup.nodes = nodes;
      setup.locals = locals;
      setup.m = 517;
      setup.n = 264;
      setup.dtype = dtype;
      setup.partials = dtype == DType::kF16 ? Partials::kF32 : Partials::kElement;
      setup.chunk_bytes = dtype == DType::kBf16 ? 4096 : 0;
      SCOPED_TRACE(fmt::format("{} x {}, {}", nodes, locals, kernels::name_of(dtype)));
      Ranks<TypeParam> ranks(setup);
      std::uint64_t seed = 1;
      for (const std::uint32_t m : {517u, 1u, 130u, 516u, 3u, 400u}) {
        ranks.fill(seed, m, seed % 2 == 0);
        ranks.launch_all(m, seed % 3 == 0 ? Mode::kUnfused : Mode::kFused);
        ranks.expect_right(m);
        if (this->HasFatalFailure() || this->HasFailure()) return;
        ++seed;
      }
    }
  }
}

TYPED_TEST(CollectiveOnGpu, LargeMatricesAreRightOnOneGpuAndOnTwo) {
  for (const std::uint32_t devices : {1u, 2u}) {
    if (!has_hopper(static_cast<int>(devices))) continue;
    for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {2u, 1u}, {2u, 2u}}) {
      Setup setup;
      setup.nodes = nodes;
      setup.locals = locals;
      setup.m = 3000;
      setup.n = 2048;
      setup.devices = static_cast<int>(devices);
      SCOPED_TRACE(fmt::format("{} x {} on {} GPUs", nodes, locals, devices));
      Ranks<TypeParam> ranks(setup);
      for (const Mode mode : {Mode::kFused, Mode::kUnfused}) {
        ranks.fill(7, 3000);
        ranks.launch_all(3000, mode);
        ranks.expect_right(3000);
        if (this->HasFailure()) return;
      }
    }
  }
}

TYPED_TEST(CollectiveOnGpu, AThousandLaunchesBackToBackGiveTheSameBits) {
  for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {2u, 2u}}) {
    Setup setup;
    setup.nodes = nodes;
    setup.locals = locals;
    setup.m = 300;
    setup.n = 136;
    setup.chunk_bytes = 4096;
    Ranks<TypeParam> ranks(setup);
    ranks.fill(3, 300);
    ranks.launch_all(300, Mode::kFused);
    ranks.expect_right(300);
    if (this->HasFailure()) return;
    std::vector<Bytes> first;
    for (std::uint32_t r = 0; r < setup.world(); ++r) {
      first.push_back(ranks.output(r, 300));
      ranks.poison(r);
    }
    for (int launch = 0; launch < 1000; ++launch) {
      ranks.launch_all(launch % 10 == 9 ? 300 : 1 + (launch * 37) % 300,
                       launch % 4 == 3 ? Mode::kUnfused : Mode::kFused);
    }
    for (std::uint32_t r = 0; r < setup.world(); ++r) ASSERT_TRUE(ranks.finish(r));
    for (std::uint32_t r = 0; r < setup.world(); ++r) EXPECT_EQ(first[r], ranks.output(r, 300));
  }
}

TYPED_TEST(CollectiveOnGpu, ACapturedLaunchReplays) {
  Setup setup;
  setup.nodes = 2;
  setup.locals = 1;
  setup.m = 260;
  setup.n = 128;
  Ranks<TypeParam> ranks(setup);
  ranks.fill(1, 260);
  Graphs graphs;
  for (std::uint32_t r = 0; r < 2; ++r)
    ASSERT_TRUE(graphs.capture(ranks.stream(r), [&] { return ranks.launch(r, 260); }));
  for (std::uint64_t seed = 2; seed < 8; ++seed) {
    ranks.fill(seed, 260);
    for (std::uint32_t r = 0; r < 2; ++r) graphs.replay(r, ranks.stream(r));
    ranks.expect_right(260);
    if (this->HasFailure()) break;
  }
}

TYPED_TEST(CollectiveOnGpu, AMissingRankIsNamedWithinTheDeadline) {
  for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {2u, 1u}}) {
    Setup setup;
    setup.nodes = nodes;
    setup.locals = locals;
    setup.m = 64;
    setup.n = 64;
    setup.options.wait_timeout = std::chrono::milliseconds(300);
    Ranks<TypeParam> ranks(setup);
    ranks.fill(1, 64);
    ASSERT_TRUE(ranks.launch(0, 64));
    const Status finished = ranks.finish(0);
    ASSERT_FALSE(finished);
    EXPECT_EQ(ErrorCode::kTimeout, finished.error().code);
    EXPECT_NE(std::string::npos, finished.error().message.find("for rank 1: flag"))
        << finished.error().message;
    const Status again = ranks.launch(0, 64);
    ASSERT_FALSE(again);
    EXPECT_EQ(finished.error().message, again.error().message);
  }
}

TYPED_TEST(CollectiveOnGpu, RanksWithDifferentMAreNamed) {
  Setup setup;
  setup.locals = 2;
  setup.m = 64;
  setup.n = 64;
  setup.options.wait_timeout = std::chrono::seconds(2);
  Ranks<TypeParam> ranks(setup);
  ranks.fill(1, 64);
  ASSERT_TRUE(ranks.launch(0, 64));
  ASSERT_TRUE(ranks.launch(1, 63));
  const Status one = ranks.finish(0);
  const Status other = ranks.finish(1);
  const std::string text = (one ? "" : one.error().message) + (other ? "" : other.error().message);
  EXPECT_NE(std::string::npos, text.find("launched with m = ")) << text;
}

TYPED_TEST(CollectiveOnGpu, WrongArgumentsAreRefusedAndChangeNothing) {
  Setup setup;
  setup.m = 8;
  setup.n = 16;
  Ranks<TypeParam> ranks(setup);
  ranks.fill(1, 8);
  const auto refused = [&](const void* input, void* output, std::uint32_t m, const char* part) {
    const Status launched = ranks.op(0).launch(ranks.stream(0), input, output, m, Mode::kFused);
    ASSERT_FALSE(launched);
    EXPECT_EQ(ErrorCode::kInvalidArgument, launched.error().code);
    EXPECT_NE(std::string::npos, launched.error().message.find(part)) << launched.error().message;
  };
  auto* const some = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 32);
  refused(some, some, 0, "m = 0 is not in 1 to 8");
  refused(some, some, 9, "m = 9 is not in 1 to 8");
  refused(some + 2, some, 8, "the input begins at");
  refused(some, some + 8, 8, "the output begins at");
  refused(nullptr, some, 8, "the input is null");
  refused(some, nullptr, 8, "the output is null");
  ranks.launch_all(8, Mode::kFused);
  ranks.expect_right(8);
}

}  // namespace
}  // namespace mk::test
