#include "kernels/ops/moe/cpu.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/cpu/copy_rows.h"
#include "kernels/cpu/gated_silu.h"
#include "kernels/cpu/pacer.h"
#include "kernels/cpu/row_math.h"
#include "kernels/cpu/tile_gemm.h"
#include "kernels/gather/chunks_sent.h"
#include "kernels/ops/moe/roles.h"
#include "kernels/plan/account.h"

namespace mk::kernels {
namespace {

constexpr const char* kOp = "moe_dispatch";

/// The caller's matrices of one launch.
struct Matrices {
  const std::uint16_t* weights = nullptr;  ///< [experts of this rank][H * F]
  const std::uint16_t* bias = nullptr;     ///< [experts of this rank][F], or null
  std::uint16_t* y = nullptr;
};

/// What kernels/ops/moe/roles.h asks of an executor, for one block on one thread. Stores and
/// loads are this thread's own plain ones, so flags order them without further ado.
class CpuExecutor : public CpuPacer {
 public:
  /// `gates`: the block's own room for a tile of fp32; only with a gated epilogue.
  CpuExecutor(TileGemm& gemm, const RowMath& math, const MoeDispatchShape& shape,
              const Matrices& matrices, std::uint32_t compute_block, float* gates)
      : gemm_(gemm),
        math_(math),
        shape_(shape),
        matrices_(matrices),
        block_(compute_block),
        gates_(gates) {}

  bool multiply(const RowTile& tile, std::uint32_t packed_rows, const TileRect& columns,
                const std::byte* packed) {
    const std::uint64_t expert = std::uint64_t{shape_.hidden} * shape_.weight_columns();
    std::uint16_t* y = matrices_.y + std::uint64_t{tile.row} * shape_.features + columns.column;
    const auto* rows = reinterpret_cast<const std::uint16_t*>(packed);
    const std::uint16_t* weights = matrices_.weights + tile.expert * expert;
    const std::uint32_t width = columns.columns;
    const std::uint16_t* const bias =
        matrices_.bias == nullptr
            ? nullptr
            : matrices_.bias + std::uint64_t{tile.expert} * shape_.weight_columns();
    if (shape_.epilogue == MoeEpilogue::kNone && bias != nullptr) {
      float* const product =
          gemm_.product(block_, {packed_rows, width}, rows, shape_.hidden, weights, columns.column);
      if (product == nullptr) return false;
      add_bias(tile.rows, width, bias + columns.column, product);
      for (std::uint32_t i = 0; i < tile.rows; ++i) {
        math_.narrow(product + std::size_t{i} * width, y + std::size_t{i} * shape_.features, width);
      }
      return true;
    }
    if (shape_.epilogue == MoeEpilogue::kNone) {
      TileOutput output;
      output.target = y;
      output.stride = shape_.features;
      output.rows_kept = tile.rows;
      return gemm_.multiply(block_, {packed_rows, width}, rows, shape_.hidden, weights,
                            columns.column, output);
    }
    if (shape_.epilogue == MoeEpilogue::kGatedSiluInterleaved) {
      float* const product = gemm_.product(block_, {packed_rows, 2 * width}, rows, shape_.hidden,
                                           weights, 2 * columns.column);
      if (product == nullptr) return false;
      if (bias != nullptr) add_bias(tile.rows, 2 * width, bias + 2 * columns.column, product);
      return store_gated(tile.rows, width, product, product + 1, 2, y);
    }
    const auto product = [&](std::uint32_t column) {
      float* const sums =
          gemm_.product(block_, {packed_rows, width}, rows, shape_.hidden, weights, column);
      if (sums != nullptr && bias != nullptr) add_bias(tile.rows, width, bias + column, sums);
      return sums;
    };
    const float* const gates = product(columns.column);
    if (gates == nullptr) return false;
    std::copy_n(gates, std::size_t{tile.rows} * width, gates_);
    const float* const ups = product(shape_.features + columns.column);
    return ups != nullptr && store_gated(tile.rows, width, gates_, ups, 1, y);
  }
  void copy(const CopyJob& job) { copy_rows(job); }
  void stores_done() {}
  void loads_begin() {}

 private:
  void add_bias(std::uint32_t rows, std::uint32_t width, const std::uint16_t* bias,
                float* sums) const {
    for (std::uint32_t i = 0; i < rows; ++i) math_.add(bias, sums + std::size_t{i} * width, width);
  }
  /// Of dense tiles whose elements are `step` apart.
  bool store_gated(std::uint32_t rows, std::uint32_t width, const float* gates, const float* ups,
                   std::uint32_t step, std::uint16_t* y) const {
    float row[kTileSideMax];
    for (std::uint32_t i = 0; i < rows; ++i) {
      const std::size_t at = std::size_t{i} * width * step;
      gated_silu(gates + at, ups + at, step, row, width);
      math_.narrow(row, y + std::size_t{i} * shape_.features, width);
    }
    return true;
  }

  TileGemm& gemm_;
  const RowMath& math_;
  const MoeDispatchShape& shape_;
  const Matrices& matrices_;
  std::uint32_t block_;
  float* gates_;
};

/// The widths of the products that a launch's column tiles take.
std::vector<std::uint32_t> product_widths(const MoeDispatchPlan& plan, const World& world) {
  const MoeDispatchSchedule schedule(plan, world);
  const bool pairs = plan.shape.epilogue == MoeEpilogue::kGatedSiluInterleaved;
  std::vector<std::uint32_t> widths;
  for (const std::uint32_t tile : {0u, schedule.column_tiles() - 1})
    widths.push_back(schedule.columns_at(tile).columns * (pairs ? 2 : 1));
  return widths;
}

std::vector<RoleThread> threads_of(const RoleBlocks& blocks, const World& world) {
  std::vector<RoleThread> threads;
  add_role(threads, Role::kCompute, blocks.compute);
  add_role(threads, Role::kPlan, blocks.plan);
  add_role(threads, Role::kPull, blocks.pull);
  if (world.size() > 1) add_role(threads, Role::kShare, blocks.share);
  if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
  if (world.nodes > 1 && world.locals > 1) add_role(threads, Role::kReceive, blocks.receive);
  return threads;
}

/// All that come before the product but the plan, for which nobody waits long.
std::vector<Workers RoleBlocks::*> communicating_roles(const World& world) {
  std::vector<Workers RoleBlocks::*> roles{&RoleBlocks::pull};
  if (world.size() > 1) roles.push_back(&RoleBlocks::share);
  if (world.nodes > 1 && world.locals > 1) roles.push_back(&RoleBlocks::receive);
  return roles;
}

/// The first slot that makes no sense.
Status check_routing(const RoutingTable& routing, const MoeDispatchShape& shape) {
  for (std::uint32_t token = 0; token < routing.tokens; ++token) {
    for (std::uint32_t slot = 0; slot < shape.top_k; ++slot) {
      const std::uint64_t at = std::uint64_t{token} * routing.stride + slot;
      const std::int32_t id = routing.ids[at];
      if (id < -1 || id >= static_cast<std::int64_t>(shape.experts)) {
        return fail(ErrorCode::kInvalidArgument,
                    "{}: token {}, slot {} goes to expert {}; allowed are 0 to {}, and -1 for none",
                    kOp, token, slot, id, shape.experts - 1);
      }
      if (id >= 0 && std::isnan(routing.weights[at])) {
        return fail(ErrorCode::kInvalidArgument,
                    "{}: the weight of token {}, slot {} is not a "
                    "number",
                    kOp, token, slot);
      }
    }
  }
  return {};
}

}  // namespace

class MoeDispatchCpu::Impl : private RoleBody {
 public:
  Impl(const MoeDispatchPlan& plan, const RankContext& context,
       const MoeDispatchCpuOptions& options)
      : plan_(plan),
        options_(options),
        launch_(make_launch<MoeDispatchLaunch>(plan, context, options.blocks, plan.banks)),
        adaptive_(AdaptiveThreads::create(options.adaptive, options.blocks,
                                          communicating_roles(context.world))),
        runner_(kOp, launch_, *this, options) {}
  virtual ~Impl() = default;

  Status start() {
    const std::vector<std::uint32_t> widths = product_widths(plan_, world());
    const std::uint32_t compute = compute_threads(adaptive_.get(), launch_.blocks);
    MK_ASSIGN_OR_RETURN(
        gemm_, TileGemm::create(compute, {plan_.tile_m, widths[0]}, plan_.shape.weight_columns(),
                                plan_.shape.hidden, plan_.dtype, options_.b_layout,
                                options_.batch_invariant));
    // Which rows an expert gets is not known before the launch, but packed tiles have few heights.
    MK_RETURN_IF_ERROR(gemm_->prepare_row_tiles(plan_.tile_m, plan_.row_pad, widths));
    if (plan_.shape.epilogue == MoeEpilogue::kGatedSilu)
      gates_.assign(compute, std::vector<float>(std::size_t{plan_.tile_m} * widths[0]));
    rates_ = rank_rates(options_, world(), gemm_->path());
    if (adaptive_ != nullptr) runner_.adapt(*adaptive_, threads_of);
    return runner_.start(threads_of(launch_.blocks, launch_.context.world));
  }

  Result<LaunchStats> launch(const MoeDispatchInput& input, void* y, std::uint32_t capacity,
                             Mode mode) {
    MK_RETURN_IF_ERROR(runner_.ready());
    MK_RETURN_IF_ERROR(check_arguments(input, y, capacity));
    launch_.routing = {input.count, plan_.shape.top_k, input.ids, input.weights};
    MK_RETURN_IF_ERROR(check_routing(launch_.routing, plan_.shape));
    launch_.tokens = static_cast<const std::byte*>(input.tokens);
    launch_.capacity = capacity;
    matrices_ = {static_cast<const std::uint16_t*>(input.expert_weights),
                 static_cast<const std::uint16_t*>(input.bias), static_cast<std::uint16_t*>(y)};
    MK_ASSIGN_OR_RETURN(
        LaunchStats stats,
        runner_.run(kMoeDispatchM, mode, plan::expected(plan_.work(world(), input.count), rates_)));
    const PlanSummary& summary = routing_plan().summary();
    if (summary.fits == 0) {
      return tl::unexpected<Error>(plan_.refusal(world(), launch_.epoch, capacity, summary));
    }
    stats.m = input.count;
    return stats;
  }

  ShardRange experts() const { return experts_of(plan_.shape.experts, world()); }
  std::span<const std::uint32_t> expert_offsets() const {
    return {routing_plan().offsets(), experts().count + std::size_t{1}};
  }
  std::span<const MoeRow> rows() const {
    const PlanSummary& summary = routing_plan().summary();
    return {routing_plan().rows(), summary.fits != 0 ? summary.rows : 0};
  }
  const MoeDispatchPlan& plan() const { return plan_; }
  std::uint32_t epoch() const { return launch_.epoch; }
  LaunchRunner& runner() { return runner_; }

 private:
  const World& world() const { return launch_.context.world; }
  RoutingPlan routing_plan() const { return routing_plan_of(launch_); }

  /// Which chunks of tokens go where, as which tiles there are, the routing says.
  LaunchTasks tasks() const override {
    const MoeDispatchShape& shape = plan_.shape;
    return {0, 0, {shape.features, shape.hidden, shape.experts, shape.top_k}};
  }
  std::uint32_t height() const override { return launch_.routing.tokens; }
  bool plan_rows(MoeDispatchBlock<CpuExecutor>& block) {
    if (!moe_dispatch::plan(block)) return false;
    if (block.index != 0) return true;
    runner_.tell_tiles(routing_plan().summary().tiles * block.schedule.column_tiles());
    // Every rank's routing is here, with as many rows as it has tokens.
    const auto rows_of = [&](std::uint32_t rank) { return block.routing.row_count(rank); };
    runner_.tell_chunks(gather_chunks_sent(block.routing.schedule, rows_of) +
                        gather_chunks_sent(block.tokens.schedule, rows_of));
    return true;
  }
  bool run_role(Role role, std::uint32_t index, BlockTotals& totals) override {
    const std::uint32_t compute = role == Role::kCompute ? index : 0;
    CpuExecutor executor(*gemm_, row_math(plan_.dtype), plan_.shape, matrices_, compute,
                         gates_.empty() ? nullptr : gates_[compute].data());
    MoeDispatchBlock block(executor, launch_, role, index, totals);
    switch (role) {
      case Role::kCompute:
        return moe_dispatch::compute(block);
      case Role::kPlan:
        return plan_rows(block);
      case Role::kPull:
        return moe_dispatch::pull(block);
      case Role::kShare:
        return moe_dispatch::share(block);
      case Role::kSend:
        return moe_dispatch::send(block);
      case Role::kReceive:
        return moe_dispatch::receive(block);
      default:
        return true;
    }
  }
  Status role_error() const override { return gemm_->error(); }

  Status check_arguments(const MoeDispatchInput& input, const void* y,
                         std::uint32_t capacity) const {
    const MoeDispatchShape& shape = plan_.shape;
    if (input.count > shape.tokens_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} tokens are not in 0 to {}, which the operator was made for", kOp,
                  input.count, shape.tokens_max);
    }
    if (capacity > shape.rows_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: room for {} output rows; the operator was made for at most {}", kOp,
                  capacity, shape.rows_max);
    }
    const auto missing = [&]() -> const char* {
      if (input.count > 0 && input.tokens == nullptr) return "tokens";
      if (input.count > 0 && input.ids == nullptr) return "ids";
      if (input.count > 0 && input.weights == nullptr) return "weights";
      if (experts().count > 0 && input.expert_weights == nullptr) return "expert_weights";
      if (capacity > 0 && y == nullptr) return "y";
      return nullptr;
    }();
    if (missing != nullptr)
      return fail(ErrorCode::kInvalidArgument, "{}: {} is null", kOp, missing);
    return plan_.check_bias(world(), input);
  }

  const MoeDispatchPlan plan_;
  const MoeDispatchCpuOptions options_;
  MachineRates rates_;
  Matrices matrices_;
  std::unique_ptr<TileGemm> gemm_;
  std::vector<std::vector<float>> gates_;  ///< by compute block
  MoeDispatchLaunch launch_;
  const std::unique_ptr<AdaptiveThreads> adaptive_;  ///< null: launches have the options' blocks
  LaunchRunner runner_;                              ///< ends first: its threads use the rest
};

MoeDispatchCpu::MoeDispatchCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeDispatchCpu::~MoeDispatchCpu() = default;

Result<std::unique_ptr<MoeDispatchCpu>> MoeDispatchCpu::create(
    const MoeDispatchPlan& plan, const RankContext& context, const MoeDispatchCpuOptions& options) {
  MK_RETURN_IF_ERROR(check_options(kOp, options));
  MK_RETURN_IF_ERROR(
      check_context(kOp, plan.nodes, plan.locals, plan.flag_count(), options.blocks.send, context));
  auto impl = std::make_unique<Impl>(plan, context, options);
  MK_RETURN_IF_ERROR(impl->start());
  return std::unique_ptr<MoeDispatchCpu>(new MoeDispatchCpu(std::move(impl)));
}

Result<LaunchStats> MoeDispatchCpu::launch(const MoeDispatchInput& input, void* y,
                                           std::uint32_t capacity, Mode mode) {
  return impl_->launch(input, y, capacity, mode);
}

ShardRange MoeDispatchCpu::experts() const { return impl_->experts(); }
std::span<const std::uint32_t> MoeDispatchCpu::expert_offsets() const {
  return impl_->expert_offsets();
}
std::span<const MoeRow> MoeDispatchCpu::rows() const { return impl_->rows(); }
const MoeDispatchPlan& MoeDispatchCpu::plan() const { return impl_->plan(); }
std::uint32_t MoeDispatchCpu::epoch() const { return impl_->epoch(); }
LaunchRunner& MoeDispatchCpu::runner() { return impl_->runner(); }

}  // namespace mk::kernels
