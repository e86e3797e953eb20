#include "tests/gpu/partition_ranks.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "tests/gpu/combine_ranks.h"
#include "tests/gpu/moe_ranks.h"
#include "tests/gpu/operator_ranks.h"
#include "tests/gpu/ring_ranks.h"

namespace mk::test {
namespace {

Op op_of(const std::string& op) {
  return op == name(Op::kAgGemm)   ? Op::kAgGemm
         : op == name(Op::kGemmRs) ? Op::kGemmRs
                                   : Op::kGemmAr;
}

/// A product over all ranks.
class Products final : public PartitionRanks {
 public:
  Products(const PartitionCase& what, const PlacedSetup& of) : job_(setup_of(what, of)) {
    for (std::uint32_t r = 0; r < world(); ++r) job_.fill(r, fresh_seed() >> 16);
    Products::poison();
  }
  std::uint32_t world() const override { return job_.world(); }
  int device(std::uint32_t rank) const override { return job_.device(rank); }
  cudaStream_t stream(std::uint32_t rank) const override { return job_.stream(rank); }
  Status launch(std::uint32_t rank) override {
    job_.make_current(rank);
    return job_.launch(rank, job_.setup().m);
  }
  Result<kernels::LaunchStats> finish(std::uint32_t rank) override {
    return job_.op(rank).finish(job_.stream(rank));
  }
  CommGroups groups(std::uint32_t rank) override {
    const kernels::RoleBlocks& blocks = job_.op(rank).blocks();
    return {job_.op(rank).stream_groups(), blocks.receive.count(), 0, blocks.compute.count()};
  }
  std::string progress(std::uint32_t rank) override { return job_.op(rank).progress(); }
  void poison() override {
    for (std::uint32_t r = 0; r < world(); ++r) {
      job_.poison(r);
      require(cudaStreamSynchronize(job_.stream(r)), "poison");
    }
  }
  bool right() override { return job_.judge_all(job_.setup().m).right(); }

 private:
  static JobSetup setup_of(const PartitionCase& what, const PlacedSetup& of) {
    JobSetup setup;
    setup.op = op_of(what.op);
    static_cast<PlacedSetup&>(setup) = of;
    setup.m = static_cast<std::uint32_t>(what.shape.m);
    setup.n = static_cast<std::uint32_t>(what.shape.n);
    setup.k.assign(setup.world(), static_cast<std::uint32_t>(what.shape.k));
    setup.in_workspace = setup.op == Op::kGemmAr;
    return setup;
  }

  Job job_;
};

/// `Kind`: the setup, the inputs and the judge of an operator that is no product.
template <class Kind>
class Others final : public PartitionRanks {
 public:
  Others(const PartitionCase& what, const PlacedSetup& job)
      : what_(what), seed_(fresh_seed() >> 16), ranks_(setup_of(what, job)) {
    Others::poison();
  }
  std::uint32_t world() const override { return ranks_.world(); }
  int device(std::uint32_t rank) const override { return ranks_.device(rank); }
  cudaStream_t stream(std::uint32_t rank) const override { return ranks_.stream(rank); }
  Status launch(std::uint32_t rank) override {
    ranks_.make_current(rank);
    return ranks_.launch(rank);
  }
  Result<kernels::LaunchStats> finish(std::uint32_t rank) override {
    ranks_.make_current(rank);
    return ranks_.op(rank).finish(ranks_.stream(rank));
  }
  CommGroups groups(std::uint32_t rank) override {
    CommGroups groups = Kind::groups(ranks_.op(rank).blocks(), ranks_.plan().nodes);
    groups.receives = ranks_.op(rank).blocks().receive.count();
    groups.compute_blocks = ranks_.op(rank).blocks().compute.count();
    return groups;
  }
  std::string progress(std::uint32_t rank) override { return ranks_.op(rank).progress(); }
  /// With the same inputs.
  void poison() override { Kind::fill(ranks_, what_, seed_); }
  bool right() override { return Kind::right(ranks_); }

 private:
  static typename Kind::Setup setup_of(const PartitionCase& what, const PlacedSetup& job) {
    typename Kind::Setup setup;
    static_cast<PlacedSetup&>(setup) = job;
    Kind::shape(what, setup);
    return setup;
  }

  const PartitionCase what_;
  const std::uint64_t seed_;
  typename Kind::Ranks ranks_;
};

struct RingKind {
  using Setup = RingSetup;
  using Ranks = RingRanks;
  static void shape(const PartitionCase& what, Setup& setup) {
    const auto heads = static_cast<std::uint32_t>(what.shape.n);
    setup.shape = {static_cast<std::uint64_t>(what.shape.m), heads, heads,
                   static_cast<std::uint32_t>(what.shape.k), false};
  }
  static void fill(Ranks& ranks, const PartitionCase& what, std::uint64_t seed) {
    RingInputs inputs;
    inputs.seed = seed;
    ranks.fill(static_cast<std::uint32_t>(what.shape.m), inputs);
  }
  static bool right(Ranks& ranks) { return ranks.judge().right(); }
  /// Those that receive share, too.
  static CommGroups groups(const kernels::RoleBlocks& blocks, std::uint32_t nodes) {
    return {(blocks.share - blocks.receive).count() - nodes, 0, nodes, 0};
  }
};

/// Each token's experts are different ones. With `hot` so much of the choices is of rank 0's.
JobRouting draw(const PartitionCase& what, std::uint32_t ranks, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> part(0, 1);
  const auto of_first = kernels::shard_of(what.experts, ranks, 0).count;
  JobRouting routing(ranks);
  for (kernels::testing::RankRouting& one : routing) {
    one.tokens = static_cast<std::uint32_t>(what.shape.m);
    for (std::uint32_t token = 0; token < one.tokens; ++token) {
      const std::size_t begin = one.ids.size();
      while (one.ids.size() < begin + what.top_k) {
        const std::uint32_t among = part(random) < what.hot ? of_first : what.experts;
        const auto id = static_cast<std::int32_t>(random() % among);
        const auto first = one.ids.begin() + static_cast<std::ptrdiff_t>(begin);
        if (std::find(first, one.ids.end(), id) != one.ids.end()) continue;
        one.ids.push_back(id);
        one.weights.push_back(static_cast<float>(part(random)));
      }
    }
  }
  return routing;
}
template <class Ranks>
bool all_right(Ranks& ranks) {
  for (std::uint32_t r = 0; r < ranks.world(); ++r) {
    if (!ranks.judge(r).empty()) return false;
  }
  return true;
}

template <class SetupOf, class RanksOf>
struct ExpertKind {
  using Setup = SetupOf;
  using Ranks = RanksOf;
  static void fill(Ranks& ranks, const PartitionCase& what, std::uint64_t seed) {
    ranks.fill(draw(what, ranks.world(), seed), seed);
  }
  static bool right(Ranks& ranks) { return all_right(ranks); }
};

struct MoeKind : ExpertKind<MoeSetup, MoeRanks> {
  static void shape(const PartitionCase& what, Setup& setup) {
    setup.shape = {static_cast<std::uint32_t>(what.shape.m),
                   static_cast<std::uint32_t>(what.shape.n),
                   static_cast<std::uint32_t>(what.shape.k),
                   what.experts,
                   what.top_k,
                   0,
                   kernels::MoeEpilogue::kNone};
  }
  static CommGroups groups(const kernels::RoleBlocks& blocks, std::uint32_t /*nodes*/) {
    return {blocks.share.count(), 0, 0, 0};
  }
};

struct CombineKind : ExpertKind<CombineSetup, CombineRanks> {
  static void shape(const PartitionCase& what, Setup& setup) {
    setup.shape = {static_cast<std::uint32_t>(what.shape.m),
                   static_cast<std::uint32_t>(what.shape.n),
                   static_cast<std::uint32_t>(what.shape.k),
                   what.experts,
                   what.top_k,
                   kernels::CombinePartials::kElement};
  }
  static CommGroups groups(const kernels::RoleBlocks& blocks, std::uint32_t /*nodes*/) {
    return {blocks.reduce.count(), 0, 0, 0};
  }
};

}  // namespace

std::unique_ptr<PartitionRanks> make_partition_ranks(const PartitionCase& what,
                                                     const PlacedSetup& job) {
  if (what.op == "ring") return std::make_unique<Others<RingKind>>(what, job);
  if (what.op == "moe") return std::make_unique<Others<MoeKind>>(what, job);
  if (what.op == "combine") return std::make_unique<Others<CombineKind>>(what, job);
  return std::make_unique<Products>(what, job);
}

std::vector<Shape> partition_shapes(const std::string& op) {
  if (op == "ring") return {{4096, 16, 128}, {16384, 16, 128}, {4096, 16, 64}};
  return {{256, 4096, 1536}, {2048, 4096, 1536}, {4096, 2048, 1024}};
}

}  // namespace mk::test
