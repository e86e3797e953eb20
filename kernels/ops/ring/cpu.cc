#include "kernels/ops/ring/cpu.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "kernels/comm/plan_tools.h"
#include "kernels/cpu/copy_rows.h"
#include "kernels/cpu/cpu_attention.h"
#include "kernels/cpu/pacer.h"
#include "kernels/gather/chunks_sent.h"
#include "kernels/ops/ring/packed.h"
#include "kernels/ops/ring/roles.h"
#include "kernels/ops/ring/windows.h"
#include "kernels/plan/account.h"

namespace mk::kernels {
namespace {

constexpr const char* kOp = "ring_attention";

/// What kernels/ops/ring/roles.h asks of an executor, for one block on one thread. Stores and
/// loads are this thread's own plain ones, so flags order them without further ado.
class CpuExecutor : public CpuPacer {
 public:
  /// `rows`: this rank's, of each batch. `attention`, of this block, and `state`, of all items, are
  /// null but for compute blocks.
  CpuExecutor(const RingAttentionGeometry& plan, const RingAttentionTensors& tensors,
              std::uint32_t rows, CpuAttention* attention, float* state)
      : plan_(plan), tensors_(tensors), rows_(rows), attention_(attention), state_(state) {}

  void begin(const AttentionItem& item) {
    const auto* q = static_cast<const std::uint16_t*>(tensors_.q);
    const std::uint64_t first = item.batch * tensors_.q_strides.batch +
                                item.query.row * tensors_.q_strides.row + first_element(item);
    attention_->begin({q + first, tensors_.q_strides.row}, item.query.rows, tensors_.scale);
  }
  void resume(const AttentionItem& item) {
    begin(item);
    attention_->resume(state_ + state_offset(item));
  }
  void attend(const AttentionItem&, const AttentionKeys& keys, bool all, std::int64_t diagonal) {
    attention_->attend({element(keys.keys), keys.key_stride / kElementBytes},
                       {element(keys.values), keys.value_stride / kElementBytes}, keys.rows,
                       all ? CpuAttention::kSeesAll : diagonal);
  }
  void put_aside(const AttentionItem& item) { attention_->save(state_ + state_offset(item)); }
  void finish(const AttentionItem& item) {
    auto* out = static_cast<std::uint16_t*>(tensors_.out);
    float* lse = tensors_.lse;
    if (lse != nullptr) {
      lse += item.batch * tensors_.lse_strides.batch + item.query.row * tensors_.lse_strides.row +
             item.key_head * plan_.group();
    }
    const std::uint64_t first = item.batch * tensors_.out_strides.batch +
                                item.query.row * tensors_.out_strides.row + first_element(item);
    attention_->finish(out + first, tensors_.out_strides.row, lse, tensors_.lse_strides.row);
  }
  void copy(const CopyJob& job) { copy_rows(job); }
  void stores_done() {}
  void loads_begin() {}

 private:
  static const std::uint16_t* element(const std::byte* bytes) {
    return reinterpret_cast<const std::uint16_t*>(bytes);
  }
  /// Of the item's heads, within a row.
  std::uint64_t first_element(const AttentionItem& item) const {
    return std::uint64_t{item.key_head} * plan_.group() * plan_.head_dim;
  }
  /// States lie in the order of the items, each as large as its queries need.
  std::uint64_t state_offset(const AttentionItem& item) const {
    const std::uint64_t queries =
        (std::uint64_t{item.batch} * rows_ + item.query.row) * plan_.query_heads +
        std::uint64_t{item.key_head} * plan_.group() * item.query.rows;
    return queries * (plan_.head_dim + 2);
  }

  const RingAttentionGeometry& plan_;
  const RingAttentionTensors& tensors_;
  const std::uint32_t rows_;
  CpuAttention* attention_;
  float* state_;
};

std::vector<RoleThread> threads_of(const RoleBlocks& blocks, const World& world) {
  std::vector<RoleThread> threads;
  add_role(threads, Role::kCompute, blocks.compute);
  if (world.size() > 1) add_role(threads, Role::kShare, blocks.share);
  if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
  if (world.nodes > 1 && world.locals > 1) add_role(threads, Role::kReceive, blocks.receive);
  return threads;
}

std::vector<Workers RoleBlocks::*> communicating_roles(const World& world) {
  std::vector<Workers RoleBlocks::*> roles;
  if (world.size() > 1) roles.push_back(&RoleBlocks::share);
  if (world.nodes > 1 && world.locals > 1) roles.push_back(&RoleBlocks::receive);
  return roles;
}

}  // namespace

class RingAttentionCpu::Impl : private RoleBody {
 public:
  Impl(const RingAttentionPlan& plan, const RankContext& context, const CpuOptions& options)
      : plan_(plan),
        launch_(make_launch<RingAttentionLaunch>(plan, context, options.blocks, plan.banks)),
        adaptive_(AdaptiveThreads::create(options.adaptive, options.blocks,
                                          communicating_roles(context.world))),
        rates_(rank_rates(options, context.world, attention_math().flops_per_s)),
        runner_(kOp, launch_, *this, options) {}
  virtual ~Impl() = default;

  Status start() {
    const CpuAttentionShape shape{plan_.head_dim, plan_.group(), plan_.tile_q, plan_.tile_k,
                                  plan_.dtype};
    const std::uint32_t compute = compute_threads(adaptive_.get(), launch_.blocks);
    for (std::uint32_t i = 0; i < compute; ++i) {
      attention_.push_back(std::make_unique<CpuAttention>(shape));
    }
    if (plan_.nodes > 1) {
      state_.resize(CpuAttention::state_floats(shape, plan_.rows_max()) * plan_.head_pairs());
    }
    if (adaptive_ != nullptr) runner_.adapt(*adaptive_, threads_of);
    return runner_.start(threads_of(launch_.blocks, launch_.context.world));
  }

  Result<LaunchStats> launch(const RingAttentionTensors& tensors, std::uint64_t seq, Mode mode) {
    if (plan_.sequences_max != 0) {
      MK_RETURN_IF_ERROR(pack(tensors, seq));
    } else {
      MK_RETURN_IF_ERROR(plan_.check_seq(seq));
    }
    const World& world = launch_.context.world;
    const bool packed = plan_.sequences_max != 0;
    const std::uint32_t own = packed ? packed_.rows(world.rank()) : rows(seq);
    if (packed && tensors.room != 0 && own > tensors.room) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: by the sequences' lengths this rank has {} rows, and its tensors have room "
                  "for {}; make them larger",
                  kOp, own, tensors.room);
    }
    MK_ASSIGN_OR_RETURN(const RingAttentionTensors all, checked_tensors(plan_, tensors, own));
    MK_RETURN_IF_ERROR(check_heads(all));
    MK_RETURN_IF_ERROR(runner_.ready());
    const auto length = static_cast<std::uint32_t>(seq);
    const std::uint32_t m = packed ? packed_.digest() : length;
    const Estimate expected =
        plan::expected(packed ? packed_.work() : plan_.work(world, length), rates_);
    LaunchStats stats;
    seq_ = length;
    for (std::uint32_t i = 0; i < plan_.windows(); ++i) {
      set_window(plan_.window(i), all, own);
      MK_ASSIGN_OR_RETURN(const LaunchStats window, runner_.run(m, mode, expected));
      stats = with_window(stats, window);
    }
    return stats;
  }

  std::uint32_t rows(std::uint64_t seq) const {
    const World& world = launch_.context.world;
    return RingAttentionSchedule(plan_, world, static_cast<std::uint32_t>(seq), Mode::kFused)
        .rows(world.rank());
  }
  const RingAttentionPlan& plan() const { return plan_; }
  std::uint32_t epoch() const { return launch_.epoch; }
  LaunchRunner& runner() { return runner_; }

 private:
  /// Tiles are of queries and keys that these see.
  LaunchTasks tasks() const override {
    const World& world = launch_.context.world;
    const RingAttentionGeometry& its = launch_.plan;
    const auto schedule_of = [&](std::uint32_t seq) {
      return RingAttentionSchedule(its, world, seq, launch_.mode);
    };
    const bool packed = plan_.sequences_max != 0;
    std::uint32_t tiles = 0;
    for (std::uint32_t i = 0; i < (packed ? launch_.packed.count : 1); ++i)
      tiles += tiles_seen(schedule_of(packed ? launch_.packed.rows[i] : seq_));
    const RingAttentionSchedule all = schedule_of(seq_);
    const auto rows_of = [&](std::uint32_t rank) {
      return packed ? its.gathered_rows(packed_.rows(rank)) : all.gathered_rows(rank);
    };
    return {tiles * its.head_pairs(),
            gather_chunks_sent(all.gather(), rows_of),
            {its.query_heads, its.key_heads, its.head_dim, its.batch}};
  }
  std::uint32_t height() const override { return seq_; }
  /// Of one sequence, for each pair of a batch and a key head.
  static std::uint32_t tiles_seen(const RingAttentionSchedule& schedule) {
    std::uint32_t tiles = 0;
    for (std::uint32_t q = 0; q < schedule.query_tiles(); ++q) {
      const SequenceTile query = schedule.query_tile(q);
      for (std::uint32_t step = 0; step < schedule.steps(); ++step)
        tiles += schedule.sight(query, schedule.key_tile(step)) != Sight::kNone ? 1 : 0;
    }
    return tiles;
  }
  bool run_role(Role role, std::uint32_t index, BlockTotals& totals) override {
    const bool computes = role == Role::kCompute;
    CpuExecutor executor(launch_.plan, tensors_, launch_.keys_values.sequence,
                         computes ? attention_[index].get() : nullptr,
                         computes ? state_.data() : nullptr);
    RingAttentionBlock<CpuExecutor> block(executor, launch_, role, index, totals);
    switch (role) {
      case Role::kCompute:
        return ring_attention::compute(block);
      case Role::kShare:
        return ring_attention::share(block);
      case Role::kSend:
        return ring_attention::send(block);
      case Role::kReceive:
        return ring_attention::receive(block);
      default:
        return true;
    }
  }

  Status pack(const RingAttentionTensors& tensors, std::uint64_t seq) {
    if (tensors.starts == nullptr) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: the operator was made for sequences of different lengths, and their starts "
                  "are null",
                  kOp);
    }
    const std::span<const std::uint32_t> starts(tensors.starts, std::size_t{tensors.sequences} + 1);
    MK_RETURN_IF_ERROR(check_starts(plan_, starts));
    if (starts.back() != seq) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} rows in all, but the last sequence ends at row {}", kOp, seq,
                  starts.back());
    }
    packed_ = PackedTables(plan_, launch_.context.world, starts);
    starts_ = starts;
    return {};
  }
  /// The next launch of the protocol is that of these heads.
  void set_window(const HeadWindow& heads, const RingAttentionTensors& all, std::uint32_t rows) {
    launch_.plan = plan_.of_window(heads);
    tensors_ = of_window(launch_.plan, all, heads);
    const auto heads_of = [this](const void* tensor, const RingStrides& strides) {
      return HeadTensor{static_cast<const std::byte*>(tensor), strides.batch * kElementBytes,
                        strides.row * kElementBytes, plan_.head_bytes()};
    };
    launch_.keys_values = KeySource::of(launch_.plan, heads_of(tensors_.k, tensors_.k_strides),
                                        heads_of(tensors_.v, tensors_.v_strides), rows);
    if (plan_.sequences_max == 0) return;
    if (plan_.windows() > 1) packed_ = PackedTables(launch_.plan, launch_.context.world, starts_);
    launch_.packed = packed_.view();
  }
  /// What the executor takes for granted.
  Status check_heads(const RingAttentionTensors& tensors) const {
    for (const auto& [name, strides] : {std::pair{"q", &tensors.q_strides},
                                        {"k", &tensors.k_strides},
                                        {"v", &tensors.v_strides},
                                        {"out", &tensors.out_strides}}) {
      if (strides->head == plan_.head_dim) continue;
      return fail(ErrorCode::kInvalidArgument,
                  "{}: heads of {} are {} elements apart; on CPUs the heads of a row follow each "
                  "other, {} apart",
                  kOp, name, strides->head, plan_.head_dim);
    }
    if (tensors.lse_strides.head == 1) return {};
    return fail(ErrorCode::kInvalidArgument,
                "{}: heads of lse are {} elements apart; on CPUs those of a row follow each other",
                kOp, tensors.lse_strides.head);
  }

  const RingAttentionPlan plan_;
  std::uint32_t seq_ = 0;                                 ///< of the launch, as the caller counts
  RingAttentionTensors tensors_;                          ///< of the window of heads
  PackedTables packed_;                                   ///< of the last launch
  std::span<const std::uint32_t> starts_;                 ///< likewise, the caller's
  std::vector<std::unique_ptr<CpuAttention>> attention_;  ///< by compute block
  std::vector<float> state_;                              ///< of items that are put aside
  RingAttentionLaunch launch_;
  const std::unique_ptr<AdaptiveThreads> adaptive_;  ///< null: launches have the options' blocks
  const MachineRates rates_;
  LaunchRunner runner_;  ///< ends first: its threads use the rest
};

RingAttentionCpu::RingAttentionCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RingAttentionCpu::~RingAttentionCpu() = default;

Result<std::unique_ptr<RingAttentionCpu>> RingAttentionCpu::create(const RingAttentionPlan& plan,
                                                                   const RankContext& context,
                                                                   const CpuOptions& options) {
  MK_RETURN_IF_ERROR(check_options(kOp, options));
  MK_RETURN_IF_ERROR(
      check_context(kOp, plan.nodes, plan.locals, plan.flag_count(), options.blocks.send, context));
  auto impl = std::make_unique<Impl>(plan, context, options);
  MK_RETURN_IF_ERROR(impl->start());
  return std::unique_ptr<RingAttentionCpu>(new RingAttentionCpu(std::move(impl)));
}

Result<LaunchStats> RingAttentionCpu::launch(const RingAttentionTensors& tensors, std::uint64_t seq,
                                             Mode mode) {
  return impl_->launch(tensors, seq, mode);
}

std::uint32_t RingAttentionCpu::rows(std::uint64_t seq) const { return impl_->rows(seq); }
const RingAttentionPlan& RingAttentionCpu::plan() const { return impl_->plan(); }
std::uint32_t RingAttentionCpu::epoch() const { return impl_->epoch(); }
LaunchRunner& RingAttentionCpu::runner() { return impl_->runner(); }

}  // namespace mk::kernels
