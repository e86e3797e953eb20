// Every job up to the largest, 1,024 nodes and 8,192 ranks, has its flags, sources of sums, and
// plans.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/comm/banks.h"
#include "kernels/comm/sum_job.h"
#include "kernels/cpu/row_math.h"
#include "kernels/cpu/sum_rows.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/all_gather/spec.h"
#include "kernels/ops/combine/spec.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "kernels/ops/moe/spec.h"
#include "kernels/ops/reduce_scatter/spec.h"
#include "kernels/ops/ring/spec.h"
#include "shm/limits.h"

namespace mk::kernels {
namespace {

/// The most chunks of a sender with which an operator's flags are no more than it should take.
std::uint32_t chunks_most(std::uint32_t nodes, std::uint32_t banks) {
  std::uint32_t chunks = 1;
  while (FlagMap{nodes, banks, chunks + 1}.count() <= kOperatorFlagsMax) ++chunks;
  return chunks;
}

/// Each flag of a node has one meaning, and lies within the count.
void expect_flags_apart(const FlagMap& map, std::uint32_t at) {
  std::vector<bool> taken(map.count());
  const auto take = [&](std::uint32_t flag) {
    ASSERT_GE(flag, map.first);
    ASSERT_LT(flag - map.first, map.count());
    ASSERT_FALSE(taken[flag - map.first]) << flag;
    taken[flag - map.first] = true;
  };
  for (std::uint32_t from = 0; from < map.nodes; ++from) {
    if (from == at) continue;
    for (std::uint32_t bank = 0; bank < map.banks; ++bank) {
      for (std::uint32_t chunk = 0; chunk < map.chunks_max; ++chunk)
        take(map.arrival(bank, at, from, chunk));
    }
    if (map.has_releases()) take(map.release(at, from));
  }
}

TEST(LargeWorlds, EveryFlagHasOneMeaning) {
  for (std::uint32_t nodes = 2; nodes <= shm::kNodesMax; ++nodes) {
    for (const std::uint32_t banks : {1u, 2u}) {
      const std::uint32_t most = chunks_most(nodes, banks);
      ASSERT_GE(most, kSenderFlagsLeast) << nodes;
      for (const std::uint32_t chunks : {1u, 2u, most}) {
        const FlagMap map{nodes, banks, chunks, 128};
        SCOPED_TRACE(testing::Message() << nodes << " nodes, " << banks << " banks, " << chunks);
        ASSERT_LE(map.count(), kOperatorFlagsMax);
        ASSERT_EQ(map.bank_arrivals() % 4, 0u) << "a GPU looks at four at a time";
        for (const std::uint32_t at : {0u, nodes / 2, nodes - 1}) expect_flags_apart(map, at);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The first flag of each sender shows every epoch, and those that a launch leaves alone are shown
// where a refresh is due. Then no granule is left alone.
TEST(LargeWorlds, ARefreshReachesEveryGranule) {
  for (std::uint32_t nodes = 2; nodes <= shm::kNodesMax;
       nodes = nodes < 80 ? nodes + 1 : nodes * 2) {
    for (const std::uint32_t banks : {1u, 2u}) {
      const FlagMap map{nodes, banks, chunks_most(nodes, banks)};
      for (const std::uint32_t chunks : {1u, map.chunks_max / 2, map.chunks_max}) {
        std::vector<bool> fresh((map.bank_arrivals() + shm::kFlagGranule - 1) / shm::kFlagGranule);
        for (std::uint32_t from = 1; from < nodes; ++from) {
          const auto shown = [&](std::uint32_t chunk) {
            fresh[map.arrival(0, 0, from, chunk) / shm::kFlagGranule] = true;
            return true;
          };
          for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) shown(chunk);
          map.for_idle_granules(chunks, [&](std::uint32_t chunk) {
            EXPECT_GE(chunk, chunks) << "a flag has one value in a launch";
            return shown(chunk);
          });
        }
        ASSERT_EQ(std::count(fresh.begin(), fresh.end(), false), 0)
            << nodes << " nodes, " << banks << " banks, " << chunks << " of " << map.chunks_max;
      }
    }
  }
}

TEST(LargeWorlds, SmallOnesKeepAGranuleForEachSender) {
  for (std::uint32_t nodes = 2; nodes <= 33; ++nodes) {
    const FlagMap map{nodes, 2, 5};
    EXPECT_EQ(map.stride(), shm::kFlagGranule);
    EXPECT_EQ(map.rules(7), 7u) << "as an older version has it";
  }
  EXPECT_NE((FlagMap{34, 2, 5}.rules(7)), 7u);
}

/// The sources that add_banks adds, one after the other.
std::vector<const std::byte*> sources_of(std::uint32_t before, const std::byte* base,
                                         std::uint64_t step, std::uint32_t nodes,
                                         std::uint32_t node, const std::byte* own) {
  std::vector<const std::byte*> all;
  for (std::uint32_t i = 0; i < before; ++i) all.push_back(base - 1 - i);
  for (std::uint32_t n = 0; n < nodes; ++n) {
    if (n != node) {
      all.push_back(base + peer_index(node, n) * step);
    } else if (own != nullptr) {
      all.push_back(own);
    }
  }
  return all;
}

TEST(LargeWorlds, AJobHasTheSumsOfAllNodesInTheirOrder) {
  const std::vector<std::byte> memory(100);
  const std::byte* const base = memory.data() + 50;
  const std::byte* const elsewhere = memory.data();
  constexpr std::uint64_t kStep = 4096;
  for (std::uint32_t nodes = 2; nodes <= shm::kNodesMax;
       nodes = nodes < 40 ? nodes + 1 : 2 * nodes) {
    for (std::uint32_t node = 0; node < nodes; ++node) {
      for (const std::uint32_t before : {0u, 1u, 8u, kListedSources}) {
        for (const std::byte* const own : {elsewhere, static_cast<const std::byte*>(nullptr)}) {
          SumJob job;
          for (std::uint32_t i = 0; i < before; ++i) job.add_source(base - 1 - i);
          job.add_banks({base, kStep, own, own == nullptr ? BankedSources::kNowhere : node},
                        own == nullptr ? nodes - 1 : nodes);
          auto all = sources_of(before, base, kStep, nodes, node, own);
          ASSERT_EQ(job.source_count, all.size());
          for (const std::uint64_t moved : {0u, 32u}) {
            job.move_sources(moved);
            for (std::uint32_t i = 0; i < all.size(); ++i) {
              ASSERT_EQ(job.source(i), all[i] + moved) << "source " << i << " of node " << node
                                                       << " of " << nodes << " behind " << before;
            }
          }
        }
      }
    }
  }
}

// More sources than are listed, by the code that adds them: against float64, in small whole
// numbers, whose sums are exact in fp32.
TEST(LargeWorlds, ManySourcesAreAddedUp) {
  constexpr std::uint32_t kColumns = 40;
  constexpr std::uint32_t kRows = 3;
  std::mt19937 random(11);
  const RowMath& math = row_math(DType::kBf16);
  for (const std::uint32_t nodes : {16u, 17u, 18u, 129u, shm::kNodesMax}) {
    for (const std::uint32_t node : {0u, 15u, 16u, nodes - 1}) {
      if (node >= nodes) continue;
      constexpr std::uint32_t kBank = kRows * kColumns;
      std::vector<float> values(std::size_t{nodes} * kBank);  // by node
      for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 9) - 4);
      std::vector<std::uint16_t> banks(std::size_t{nodes - 1} * kBank), own(kBank),
          out(kBank, 0x7fc0);
      for (std::uint32_t n = 0; n < nodes; ++n) {
        std::uint16_t* const to =
            n == node ? own.data() : banks.data() + peer_index(node, n) * kBank;
        math.narrow(values.data() + n * kBank, to, kBank);
      }
      SumJob job;
      job.add_banks({reinterpret_cast<const std::byte*>(banks.data()), kBank * kElementBytes,
                     reinterpret_cast<const std::byte*>(own.data()), node},
                    nodes);
      job.source_stride = job.target_stride = kColumns;
      job.target_count = 1;
      job.targets[0] = out.data();
      job.rows = kRows;
      job.columns = kColumns;
      sum_rows(math, job);
      for (std::uint32_t i = 0; i < kBank; ++i) {
        double sum = 0;
        for (std::uint32_t n = 0; n < nodes; ++n) sum += values[n * kBank + i];
        const auto exact = static_cast<float>(sum);
        std::uint16_t expected = 0;
        math.narrow(&exact, &expected, 1);
        ASSERT_EQ(out[i], expected) << "element " << i << ", node " << node << " of " << nodes;
      }
    }
  }
}

/// A plan is there, takes no more flags than it may, and its workspace can be registered.
template <class Plan>
void expect_plan(const char* op, const Result<Plan>& plan, std::uint32_t flags_most) {
  ASSERT_TRUE(plan) << op << ": " << plan.error().message;
  EXPECT_LE(plan->flag_count(), flags_most) << op;
  EXPECT_GT(plan->flag_count(), 0u) << op;
  EXPECT_LT(plan->workspace.bytes(), shm::kBufferBytesMax) << op;
}

TEST(LargeWorlds, EveryOperatorHasAPlan) {
  constexpr std::uint32_t kLocals = 8;
  for (const std::uint32_t nodes : {34u, 129u, 512u, 513u, 704u, 1023u, shm::kNodesMax}) {
    for (const std::uint32_t banks : {0u, 1u, 2u}) {
      SCOPED_TRACE(testing::Message() << nodes << " nodes, " << banks << " banks");
      const std::uint32_t ranks = nodes * kLocals;
      const Shape shape{ranks * 16, 4096, 1024};
      Tiling tiling;
      tiling.banks = banks;
      expect_plan("ag_gemm", AgGemmPlan::make(nodes, kLocals, shape, DType::kBf16, tiling),
                  kOperatorFlagsMax);
      expect_plan("gemm_rs", GemmRsPlan::make(nodes, kLocals, shape, DType::kBf16, tiling),
                  kOperatorFlagsMax);
      for (const Exchange exchange : {Exchange::kOneShot, Exchange::kTwoShot}) {
        Tiling with = tiling;
        with.exchange = exchange;
        expect_plan("gemm_ar",
                    GemmArPlan::make(nodes, kLocals, {4096, 4096, 1024}, DType::kBf16, with),
                    kOperatorFlagsMax);
      }
      RingAttentionTiling ring;
      ring.banks = banks;
      RingAttentionShape sequence;
      sequence.seq_max = ranks * 16;
      sequence.query_heads = sequence.key_heads = 8;
      sequence.head_dim = 128;
      expect_plan("ring", RingAttentionPlan::make(nodes, kLocals, sequence, ring),
                  kOperatorFlagsMax);
      MoeDispatchShape dispatch;
      dispatch.tokens_max = 64;
      dispatch.hidden = dispatch.features = 1024;
      dispatch.experts = ranks;
      dispatch.top_k = 8;
      expect_plan("moe", MoeDispatchPlan::make(nodes, kLocals, dispatch, DType::kBf16, tiling),
                  FlagMap{nodes, banks == 1 ? 1u : 2u}.shares_granules() && nodes <= 512
                      ? kOperatorFlagsMax
                      : 2 * kOperatorFlagsMax);
      const CombineShape combine{64, 1024, 1024, ranks, 8};
      expect_plan("combine", CombinePlan::make(nodes, kLocals, combine, DType::kBf16, tiling),
                  kOperatorFlagsMax);
      expect_plan("all_gather",
                  AllGatherPlan::make(nodes, kLocals, ranks * 16, 1024, DType::kBf16, tiling),
                  kOperatorFlagsMax);
    }
  }
}

TEST(LargeWorlds, OneNodeTooManyIsRefusedWithTheLimit) {
  for (const auto& [nodes, locals] : {std::pair{shm::kNodesMax + 1, 1u}, {shm::kNodesMax, 9u}}) {
    const auto plan = GemmRsPlan::make(nodes, locals, {65536, 1024, 1024}, DType::kBf16, {});
    ASSERT_FALSE(plan);
    EXPECT_NE(plan.error().message.find("1 to 1024 nodes"), std::string::npos)
        << plan.error().message;
    EXPECT_NE(plan.error().message.find("at most 8192 ranks"), std::string::npos);
  }
}

}  // namespace
}  // namespace mk::kernels
