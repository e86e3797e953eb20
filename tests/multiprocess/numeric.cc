#include "tests/multiprocess/numeric.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "kernels/ops/registry.h"
#include "tests/bench/mkbench/moe_routing.h"

namespace mk::test {
namespace {

struct Running {
  std::string fabric;
  std::unique_ptr<tools::DaemonSet> daemons;
};
Running& running() {
  static Running running;
  return running;
}

/// They all have tokens, experts and a routing.
bool is_moe(const std::string& op) { return op == "moe" || op == "combine" || op == "moe-layer"; }

bool is_collective(const std::string& op) {
#define MK_NAME(id, name, Class) name,
  constexpr std::string_view kNames[] = {MK_COLLECTIVES(MK_NAME)};
#undef MK_NAME
  return std::ranges::find(kNames, op) != std::end(kNames);
}

/// A dispatch's, of all ranks: how many rows and experts each has, where its experts' rows begin,
/// each row's origin and its elements. A combine's: an output row for each token.
std::uint64_t moe_values_of(const bench::BenchSpec& spec, std::uint32_t launch) {
  const auto& o = spec.operation;
  const auto number = [&](const char* key) { return o.at(key).get<std::uint32_t>(); };
  const bench::MoeRouting routing(o.at("routing").get<std::string>(), number("tokens"),
                                  number("experts"), number("top_k"), spec.world(), spec.seed);
  std::uint64_t tokens = 0;
  std::uint64_t rows = 0;
  for (std::uint32_t rank = 0; rank < spec.world(); ++rank) {
    tools::MoeSource source;
    routing.draw(spec, launch, rank, &source);
    tokens += source.tokens;
    rows += source.ids.size() - std::ranges::count(source.ids, -1);
  }
  if (spec.op != "moe") return tokens * number("hidden");
  constexpr std::uint64_t kCounts = 2, kOrigin = 4;
  return spec.world() * (kCounts + 1) + number("experts") + rows * (kOrigin + number("features"));
}

/// Values that must have been compared.
std::uint64_t values_of(const bench::BenchSpec& spec, std::uint32_t launch) {
  const auto& o = spec.operation;
  const auto number = [&](const char* key) { return o.at(key).get<std::uint64_t>(); };
  if (is_moe(spec.op)) return moe_values_of(spec, launch);
  if (spec.op == "ring") {
    const std::uint64_t parts = spec.world() * (o.at("causal").get<bool>() ? 2 : 1);
    const std::uint64_t per_head = number("head_dim") + (o.at("lse").get<bool>() ? 1 : 0);
    return bench::extent_of(spec, launch, parts, number("seq")) * number("query_heads") * per_head;
  }
  const std::uint64_t m = bench::extent_of(spec, launch, 1, number("m"));
  if (is_collective(spec.op))
    return (bench::make_case(spec.op)->outputs_are_equal() ? spec.world() : 1) * m * number("n");
  if (spec.op == "ag-gemm") return spec.world() * m * (number("n") + number("k"));
  return m * number("n");
}

}  // namespace

std::vector<NumericSizes> edge_sizes(const std::string& op) {
  // Each case's own defaults, with what is given here in their place.
  const auto with = [&](const char* dtype, const nlohmann::json& changes) {
    auto operation = bench::make_case(op)->options();
    operation.update(changes);
    return NumericSizes{dtype, operation};
  };
  if (is_moe(op)) {
    return {with("bf16", {{"tokens", 37},
                          {"hidden", 72},
                          {"features", 40},
                          {"experts", 11},
                          {"top_k", 3},
                          {"chunk_bytes", 1024}}),
            // Fewer experts than ranks, and nearly everything at the first.
            with("f16", {{"tokens", 90},
                         {"hidden", 136},
                         {"features", 24},
                         {"experts", 3},
                         {"top_k", 2},
                         {"routing", "hot"}})};
  }
  if (op == "ring") {
    return {with("bf16", {{"seq", 203},
                          {"query_heads", 4},
                          {"key_heads", 2},
                          {"head_dim", 64},
                          {"lse", true},
                          {"chunk_bytes", 2048},
                          {"tile_q", 8},
                          {"tile_k", 16}}),
            with("f16", {{"seq", 150},
                         {"query_heads", 3},
                         {"key_heads", 1},
                         {"head_dim", 128},
                         {"causal", true},
                         {"lse", true}})};
  }
  if (is_collective(op))
    return {with("bf16", {{"m", 131}, {"n", 72}, {"chunk_bytes", 1024}}),
            with("f16", {{"m", 301}, {"n", 1001}})};
  return {with("bf16", {{"m", 131},
                        {"n", 72},
                        {"k", 40},
                        {"tile_m", 16},
                        {"tile_n", 24},
                        {"chunk_bytes", 1024},
                        {"gathered", op == "ag-gemm"}}),
          with("f16", {{"m", 301}, {"n", 200}, {"k", 136}, {"gathered", op == "ag-gemm"}})};
}

const tools::DaemonSet* daemons_for(const std::string& fabric, std::uint32_t nodes) {
  Running& now = running();
  if (!now.daemons || now.fabric != fabric || now.daemons->size() != nodes ||
      !now.daemons->check()) {
    stop_daemons();
    now = {fabric, start_daemons(nodes, fabric)};
  }
  return now.daemons.get();
}

void stop_daemons() {
  if (!running().daemons) return;
  const Status stopped = running().daemons->stop(120s);
  EXPECT_TRUE(stopped) << stopped.error().message;
  running().daemons.reset();
}

bench::BenchOptions numeric_job(const NumericWorld& world, const std::string& op,
                                const NumericSizes& sizes) {
  bench::BenchOptions options;
  options.spec.op = op;
  options.spec.nodes = world.nodes;
  options.spec.local = world.local;
  options.spec.dtype = sizes.dtype;
  options.spec.operation = sizes.operation;
  options.spec.warmup = 0;
  options.spec.iterations = 4;
  options.spec.sizes = "vary";
  options.spec.barrier = false;
  options.spec.seed = std::random_device{}();
  options.rank_program = MK_TEST_MKBENCH;
  if (const tools::DaemonSet* daemons = daemons_for(world.fabric, world.nodes)) {
    for (std::uint32_t node = 0; node < world.nodes; ++node)
      options.join_sockets.push_back(daemons->client_socket(node));
  }
  return options;
}

bench::BenchResult expect_right(const bench::BenchOptions& options) {
  const bench::BenchSpec& spec = options.spec;
  SCOPED_TRACE(nlohmann::json(spec).dump());
  auto result = bench::run_bench(options, [](const std::string&) {});
  EXPECT_TRUE(result) << result.error().message;
  if (!result) return {};
  const bench::Verification& verification = result->verification;
  EXPECT_EQ(0u, verification.wrong) << "worst " << verification.worst_ratio << " times its bound";
  EXPECT_EQ(0u, verification.launches_with_differing_ranks);
  EXPECT_EQ(spec.launches(), verification.launches_checked);
  EXPECT_LT(0u, verification.elements_compared);
  std::uint64_t values = 0;
  for (std::uint32_t launch = 0; launch < spec.launches(); ++launch)
    values += values_of(spec, launch);
  EXPECT_EQ(values, verification.elements_compared);
  return std::move(*result);
}

void NumericTest::expect_right_at_all_sizes() const {
  const auto& [world, op] = GetParam();
  for (const NumericSizes& sizes : edge_sizes(op)) {
    bench::BenchOptions options = numeric_job(world, op, sizes);
    options.spec.skew_ms = 5;
    expect_right(options);
  }
  // Ranks choose for themselves: they need not all run the same form.
  bench::BenchOptions options = numeric_job(world, op, edge_sizes(op).front());
  options.spec.modes = "auto";
  expect_right(options);
}

}  // namespace mk::test
