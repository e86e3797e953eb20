#include "kernels/ops/combine/cpu.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "kernels/cpu/combine_rows.h"
#include "kernels/cpu/pacer.h"
#include "kernels/cpu/tile_gemm.h"
#include "kernels/ops/combine/run_role.h"
#include "kernels/plan/account.h"

namespace mk::kernels {
namespace {

constexpr const char* kOp = "gemm_combine";

/// The caller's matrices of one launch.
struct Matrices {
  const std::uint16_t* y = nullptr;  ///< [rows][I]
  std::uint32_t rows = 0;
  const std::uint16_t* weights = nullptr;  ///< [experts of this rank][I * H]
  const std::uint16_t* residual = nullptr;
  std::uint16_t* out = nullptr;
};

/// What all blocks of a rank share, of any launch.
struct Shared {
  std::unique_ptr<TileGemm> gemm;
  const RowMath* math = nullptr;
  /// By compute block: rows of a tile that ends where y does, padded.
  std::vector<std::vector<std::uint16_t>> padded;
  /// By row tile: column tiles done so far.
  std::vector<std::atomic<std::uint32_t>> parts_done;
};

/// What kernels/ops/combine/protocol.h asks of an executor, for one block on one thread. Stores
/// and loads are this thread's own plain ones, so flags order them without further ado.
class CpuExecutor : public CpuPacer {
 public:
  CpuExecutor(Shared& shared, const CombineLaunch& launch, const Matrices& matrices,
              std::uint32_t compute_block, std::atomic<std::uint64_t>* nonfinite)
      : shared_(shared),
        launch_(launch),
        matrices_(matrices),
        block_(compute_block),
        nonfinite_(nonfinite),
        sums_(*shared.math, launch.plan.shape.partials, launch.plan.shape.hidden) {}

  template <class PlaceOf>
  bool multiply(const CombineTile& tile, std::uint32_t padded_rows, const TileRect& columns,
                PlaceOf&& place_of) {
    const CombineShape& shape = launch_.plan.shape;
    const std::uint64_t expert = std::uint64_t{shape.hidden} * shape.features;
    float* const product = shared_.gemm->product(
        block_, {padded_rows, columns.columns}, rows_of(tile, padded_rows), shape.features,
        matrices_.weights + tile.expert * expert, columns.column);
    if (product == nullptr) return false;
    for (std::uint32_t i = 0; i < tile.rows; ++i) {
      float* const row = product + std::size_t{i} * columns.columns;
      const float weight = launch_.rows[tile.row + i].weight;
      for (std::uint32_t c = 0; c < columns.columns; ++c) row[c] *= weight;
      std::byte* const place = place_of(i);
      if (place != nullptr) sums_.store(row, place, columns.columns);
    }
    return true;
  }

  template <class Before, class Rows, class After>
  void sum(const CombineSum& job, Before&& before, Rows&& rows, After&& after) {
    const std::uint64_t at = std::uint64_t{job.token} * launch_.plan.shape.hidden;
    const bool result = job.target == nullptr;
    const bool residual = result && matrices_.residual != nullptr;
    NonfiniteCounter counter(launch_.plan.dtype);
    sums_.sum(before, rows, after, job.target, result ? matrices_.out + at : nullptr,
              residual ? matrices_.residual + at : nullptr, nonfinite_ ? &counter : nullptr);
    if (nonfinite_ && counter.count() != 0) {
      nonfinite_->fetch_add(counter.count(), std::memory_order_relaxed);
    }
  }

  /// Acquire and release: the last one's next release shows what all have stored.
  bool last_part(Role, std::uint32_t tile, std::uint32_t parts) {
    std::atomic<std::uint32_t>& done = shared_.parts_done[tile];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != parts) return false;
    done.store(0, std::memory_order_relaxed);
    return true;
  }
  void stores_done() {}
  void loads_begin() {}

 private:
  /// The tile's rows, with something readable behind them.
  const std::uint16_t* rows_of(const CombineTile& tile, std::uint32_t padded_rows) {
    const std::size_t features = launch_.plan.shape.features;
    const std::uint16_t* const rows = matrices_.y + tile.row * features;
    if (tile.row + padded_rows <= matrices_.rows) return rows;
    std::uint16_t* const padded = shared_.padded[block_].data();
    std::copy_n(rows, tile.rows * features, padded);
    std::fill_n(padded + tile.rows * features, (padded_rows - tile.rows) * features,
                std::uint16_t{0});
    return padded;
  }

  Shared& shared_;
  const CombineLaunch& launch_;
  const Matrices& matrices_;
  std::uint32_t block_;
  std::atomic<std::uint64_t>* nonfinite_;  ///< null: nobody counts
  CombineRows sums_;
};

std::vector<Workers RoleBlocks::*> communicating_roles(const World& world) {
  std::vector<Workers RoleBlocks::*> roles{&RoleBlocks::receive};
  if (world.nodes > 1) roles.push_back(&RoleBlocks::reduce);
  return roles;
}

/// That the offsets are of `experts` experts, and of the rows, if there are any.
Status check_offsets(std::span<const std::uint32_t> offsets, std::size_t rows,
                     std::uint32_t experts) {
  if (offsets.size() != experts + std::size_t{1}) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} expert offsets; this rank has {} experts, so it takes {}", kOp,
                offsets.size(), experts, experts + 1);
  }
  for (std::uint32_t i = 0; i < experts; ++i) {
    if (offsets[i] <= offsets[i + 1] && (i != 0 || offsets[0] == 0)) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}: expert {} has rows {} to {}; expert offsets begin at 0 and never fall", kOp, i,
                offsets[i], offsets[i + 1]);
  }
  if (rows != 0 && offsets.back() != rows) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: the expert offsets end at row {}, but there are {} rows; give both of the same "
        "launch",
        kOp, offsets.back(), rows);
  }
  return {};
}

}  // namespace

class CombineCpu::Impl : private RoleBody {
 public:
  Impl(const CombinePlan& plan, const RankContext& context, const CombineCpuOptions& options)
      : plan_(plan),
        options_(options),
        launch_(make_launch<CombineLaunch>(plan, context, options.blocks, plan.banks)),
        adaptive_(AdaptiveThreads::create(options.adaptive, options.blocks,
                                          communicating_roles(context.world))),
        runner_(kOp, launch_, *this, options) {}
  virtual ~Impl() = default;

  Status start() {
    const CombineShape& shape = plan_.shape;
    const std::uint32_t columns = std::min(plan_.tile_n, shape.hidden);
    const std::uint32_t compute = compute_threads(adaptive_.get(), launch_.blocks);
    MK_ASSIGN_OR_RETURN(
        shared_.gemm,
        TileGemm::create(compute, {plan_.tile_m, columns}, shape.hidden, shape.features,
                         plan_.dtype, options_.b_layout, options_.batch_invariant));
    const CombineSchedule schedule(plan_, world());
    const std::uint32_t widths[] = {schedule.columns_at(0).columns,
                                    schedule.columns_at(schedule.column_tiles() - 1).columns};
    MK_RETURN_IF_ERROR(shared_.gemm->prepare_row_tiles(plan_.tile_m, plan_.row_pad, widths));
    shared_.math = &row_math(plan_.dtype);
    shared_.padded.assign(compute,
                          std::vector<std::uint16_t>(std::size_t{plan_.tile_m} * shape.features));
    shared_.parts_done = std::vector<std::atomic<std::uint32_t>>(plan_.tiles_max);
    rates_ = rank_rates(options_, world(), shared_.gemm->path());
    if (adaptive_ != nullptr) runner_.adapt(*adaptive_, gemm_combine::threads_of);
    return runner_.start(gemm_combine::threads_of(launch_.blocks, world()));
  }

  Result<LaunchStats> launch(const CombineInput& input, void* out, Mode mode) {
    MK_RETURN_IF_ERROR(runner_.ready());
    MK_RETURN_IF_ERROR(check_handle(input));
    MK_RETURN_IF_ERROR(check_tokens(input, out));
    launch_.rows = input.rows.data();
    launch_.offsets = input.offsets.data();
    launch_.room = static_cast<std::uint32_t>(input.rows.size());
    launch_.complete = input.offsets.back() == input.rows.size();
    launch_.routing = {input.count, plan_.shape.top_k, input.ids, nullptr};
    matrices_ = {
        static_cast<const std::uint16_t*>(input.y), static_cast<std::uint32_t>(input.rows.size()),
        static_cast<const std::uint16_t*>(input.expert_weights),
        static_cast<const std::uint16_t*>(input.residual), static_cast<std::uint16_t*>(out)};
    const LaunchWork work = plan_.work(matrices_.rows, input.count);
    nonfinite_.store(0, std::memory_order_relaxed);
    MK_ASSIGN_OR_RETURN(LaunchStats stats,
                        runner_.run(kCombineM, mode, plan::expected(work, rates_)));
    stats.nonfinite_partials = nonfinite_.load(std::memory_order_relaxed);
    MK_RETURN_IF_ERROR(check_verdict(input));
    stats.m = input.count;
    return stats;
  }

  ShardRange experts() const { return experts_of(plan_.shape.experts, world()); }
  const CombinePlan& plan() const { return plan_; }
  std::uint32_t epoch() const { return launch_.epoch; }
  LaunchRunner& runner() { return runner_; }

 private:
  const World& world() const { return launch_.context.world; }

  /// Which tiles there are, and what goes to other nodes, the index says.
  LaunchTasks tasks() const override {
    const CombineShape& shape = plan_.shape;
    return {0, 0, {shape.hidden, shape.features, shape.experts, shape.top_k}};
  }
  std::uint32_t height() const override { return launch_.routing.tokens; }
  bool plan_rows(CombineBlock<CpuExecutor>& block) {
    if (!gemm_combine::plan(block)) return false;
    if (block.index != 0) return true;
    runner_.tell_tiles(block.words->tiles * block.schedule.column_tiles());
    std::uint32_t chunks = 0;
    for (std::uint32_t position = 0; position + 1 < block.world.nodes; ++position)
      chunks += block.schedule.chunks(block.peer(block.schedule.node_after(position))->tokens);
    runner_.tell_chunks(chunks);
    return true;
  }
  bool run_role(Role role, std::uint32_t index, BlockTotals& totals) override {
    CpuExecutor executor(shared_, launch_, matrices_, role == Role::kCompute ? index : 0,
                         options_.count_nonfinite ? &nonfinite_ : nullptr);
    CombineBlock block(executor, launch_, role, index, totals);
    return role == Role::kPlan ? plan_rows(block) : gemm_combine::run_role(block, role);
  }
  Status role_error() const override { return shared_.gemm->error(); }

  Status check_handle(const CombineInput& input) const {
    const std::size_t rows = input.rows.size();
    MK_RETURN_IF_ERROR(check_offsets(input.offsets, rows, experts().count));
    if (rows > plan_.rows_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} rows; {} ranks of at most {} tokens with {} slots can give {}", kOp, rows,
                  world().size(), plan_.shape.tokens_max, plan_.shape.top_k, plan_.rows_max);
    }
    const RowIndex index(plan_, world(), input.rows.data(), input.offsets.data(),
                         static_cast<std::uint32_t>(rows));
    const std::uint32_t wrong = index.first_impossible_row(static_cast<std::uint32_t>(rows));
    if (wrong != rows) {
      const MoeRow& row = input.rows[wrong];
      return fail(ErrorCode::kInvalidArgument,
                  "{}: row {} is of rank {}, token {}, slot {}; there are {} ranks of at most {} "
                  "tokens with {} slots",
                  kOp, wrong, row.rank, row.token, row.slot, world().size(), plan_.shape.tokens_max,
                  plan_.shape.top_k);
    }
    if (rows > 0 && input.y == nullptr)
      return fail(ErrorCode::kInvalidArgument, "{}: y is null", kOp);
    if (rows > 0 && input.expert_weights == nullptr)
      return fail(ErrorCode::kInvalidArgument, "{}: expert_weights is null", kOp);
    return {};
  }

  Status check_tokens(const CombineInput& input, const void* out) const {
    const CombineShape& shape = plan_.shape;
    if (input.count > shape.tokens_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} tokens are not in 0 to {}, which the operator was made for", kOp,
                  input.count, shape.tokens_max);
    }
    if (input.count > 0 && input.ids == nullptr)
      return fail(ErrorCode::kInvalidArgument, "{}: ids is null", kOp);
    if (input.count > 0 && out == nullptr)
      return fail(ErrorCode::kInvalidArgument, "{}: out is null", kOp);
    for (std::uint64_t i = 0; i < std::uint64_t{input.count} * shape.top_k; ++i) {
      if (input.ids[i] >= -1 && input.ids[i] < static_cast<std::int64_t>(shape.experts)) continue;
      return fail(ErrorCode::kInvalidArgument,
                  "{}: token {}, slot {} goes to expert {}; allowed are 0 to {}, and -1 for none",
                  kOp, i / shape.top_k, i % shape.top_k, input.ids[i], shape.experts - 1);
    }
    return {};
  }

  /// Of a launch that ran to its end.
  Status check_verdict(const CombineInput& input) const {
    const auto* words = reinterpret_cast<const CombineWords*>(
        launch_.context.workspaces[world().local] + plan_.layout.words);
    const CombineVerdict& verdict = words->verdict;
    if (verdict.bad_rank == 0) return {};
    CombineRefusals refusals;
    refusals.epoch = launch_.epoch;
    refusals.verdict = verdict;
    refusals.rows = input.offsets.back();
    return tl::unexpected<Error>(plan_.refusal(world(), input.count, refusals));
  }

  const CombinePlan plan_;
  const CombineCpuOptions options_;
  MachineRates rates_;
  Matrices matrices_;
  std::atomic<std::uint64_t> nonfinite_{0};  ///< of the launch; its threads add to it
  Shared shared_;
  CombineLaunch launch_;
  const std::unique_ptr<AdaptiveThreads> adaptive_;  ///< null: launches have the options' blocks
  LaunchRunner runner_;                              ///< ends first: its threads use the rest
};

CombineCpu::CombineCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CombineCpu::~CombineCpu() = default;

Result<std::unique_ptr<CombineCpu>> CombineCpu::create(const CombinePlan& plan,
                                                       const RankContext& context,
                                                       const CombineCpuOptions& options) {
  MK_RETURN_IF_ERROR(check_options(kOp, options));
  MK_RETURN_IF_ERROR(
      check_context(kOp, plan.nodes, plan.locals, plan.flag_count(), options.blocks.send, context));
  auto impl = std::make_unique<Impl>(plan, context, options);
  MK_RETURN_IF_ERROR(impl->start());
  return std::unique_ptr<CombineCpu>(new CombineCpu(std::move(impl)));
}

Result<LaunchStats> CombineCpu::launch(const CombineInput& input, void* out, Mode mode) {
  return impl_->launch(input, out, mode);
}
ShardRange CombineCpu::experts() const { return impl_->experts(); }
const CombinePlan& CombineCpu::plan() const { return impl_->plan(); }
std::uint32_t CombineCpu::epoch() const { return impl_->epoch(); }
LaunchRunner& CombineCpu::runner() { return impl_->runner(); }

}  // namespace mk::kernels
