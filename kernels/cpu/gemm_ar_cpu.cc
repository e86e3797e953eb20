#include "kernels/cpu/gemm_ar_cpu.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/comm/wait_text.h"
#include "kernels/cpu/block_pool.h"
#include "kernels/cpu/cpu_gemm.h"
#include "kernels/cpu/pacer.h"
#include "kernels/cpu/row_math.h"
#include "kernels/cpu/sum_rows.h"
#include "kernels/gemm_ar/roles.h"

namespace mk::kernels {
namespace {

/// An operator is good for this many launches: a flag that a launch leaves alone (small m) must
/// stay less than 2^31 epochs behind.
constexpr std::uint32_t kLaunchesMax = 0x7fffffffu;

/// The caller's matrices of one launch.
struct Matrices {
  const std::uint16_t* a = nullptr;
  std::uint64_t lda = 0;
  const std::uint16_t* b = nullptr;
  std::uint64_t ldb = 0;
  std::uint16_t* c = nullptr;
  std::uint64_t ldc = 0;
};

/// What kernels/gemm_ar/roles.h asks of an executor, for one block on one thread. Stores and loads
/// are this thread's own plain ones, so flags order them without further ado.
class CpuExecutor : public CpuPacer {
 public:
  CpuExecutor(CpuGemm& gemm, const RowMath& math, const Matrices& matrices, BLayout b_layout,
              std::uint32_t compute_block, float* tile)
      : gemm_(gemm),
        math_(math),
        matrices_(matrices),
        b_layout_(b_layout),
        block_(compute_block),
        tile_(tile) {}

  bool multiply(const TileRect& rect, void* target, std::uint64_t target_stride) {
    const std::uint16_t* a = matrices_.a + rect.row * matrices_.lda;
    const std::uint16_t* b =
        matrices_.b + (b_layout_ == BLayout::kKN ? rect.column : rect.column * matrices_.ldb);
    if (!gemm_.multiply(block_, {rect.rows, rect.columns}, a, b, tile_)) return false;
    auto* row = static_cast<std::uint16_t*>(target);
    for (std::uint32_t i = 0; i < rect.rows; ++i, row += target_stride) {
      math_.narrow(tile_ + std::size_t{i} * rect.columns, row, rect.columns);
    }
    return true;
  }
  void sum(const SumJob& job) { sum_rows(math_, job); }
  bool wants_c() const { return matrices_.c != nullptr; }
  void copy_to_c(const TileRect& rect, const void* source, std::uint64_t source_stride) {
    const auto* from = static_cast<const std::uint16_t*>(source);
    std::uint16_t* to = matrices_.c + rect.row * matrices_.ldc + rect.column;
    for (std::uint32_t i = 0; i < rect.rows; ++i, from += source_stride, to += matrices_.ldc) {
      std::memcpy(to, from, std::size_t{rect.columns} * kElementBytes);
    }
  }
  void stores_done() {}
  void loads_begin() {}

 private:
  CpuGemm& gemm_;
  const RowMath& math_;
  const Matrices& matrices_;
  BLayout b_layout_;
  std::uint32_t block_;
  float* tile_;
};

/// Which role a block of the pool has, and its index within the role: compute blocks first, then
/// reduce, send, receive.
struct Part {
  Role role = Role::kCompute;
  std::uint32_t index = 0;
};

std::vector<Part> make_parts(const GemmArBlocks& blocks, const World& world) {
  std::vector<Part> parts;
  const auto add = [&](Role role, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) parts.push_back({role, i});
  };
  add(Role::kCompute, blocks.compute);
  if (world.locals > 1) add(Role::kReduce, blocks.reduce);
  if (world.nodes > 1) add(Role::kSend, blocks.send);
  if (world.nodes > 1) add(Role::kReceive, blocks.receive);
  return parts;
}

/// One block's account of one launch; written by its thread, read after the launch. On lines of its
/// own.
struct alignas(64) BlockReport {
  BlockTotals totals;
  BlockTotals collect;  ///< compute blocks: the second part of their work
  std::uint64_t end_ns = 0;
  std::uint64_t collect_end_ns = 0;
  bool completed = false;
};

Status check_context(const GemmArPlan& plan, const RankContext& context,
                     const GemmArCpuOptions& options) {
  const World& world = context.world;
  if (world.nodes != plan.nodes || world.locals != plan.locals) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: the plan is for {} nodes x {} local ranks, the context for {} x {}",
                plan.nodes, plan.locals, world.nodes, world.locals);
  }
  if (world.node >= world.nodes || world.local >= world.locals) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: node {}, local rank {} is not in a world of {} x {}", world.node,
                world.local, world.nodes, world.locals);
  }
  for (std::uint32_t local = 0; local < world.locals; ++local) {
    if (context.workspaces[local] == nullptr ||
        reinterpret_cast<std::uintptr_t>(context.workspaces[local]) % 64 != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: the workspace of local rank {} is missing or not aligned to 64 bytes",
                  local);
    }
  }
  if (world.nodes == 1) return {};
  if (context.lanes == nullptr || context.lane_count < options.send_blocks) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: {} send blocks need as many lanes; the context has {}",
                options.send_blocks, context.lane_count);
  }
  if (context.arrival_flags == nullptr || context.flag_count < plan.flag_count() ||
      context.flag_base % shm::kFlagGranule != 0) {
    return fail(
        ErrorCode::kInvalidArgument,
        "gemm_ar: needs {} arrival flags from a multiple of {} on; the context has {} from {} on",
        plan.flag_count(), shm::kFlagGranule, context.flag_count, context.flag_base);
  }
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node) continue;
    if (context.rail_peers[node].rank != world.rail_peer(node)) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: the rail peer on node {} is rank {}, the context says {}", node,
                  world.rail_peer(node), context.rail_peers[node].rank);
    }
  }
  return {};
}

Status check_options(const GemmArCpuOptions& options) {
  for (std::uint32_t blocks : {options.compute_blocks, options.reduce_blocks, options.send_blocks,
                               options.receive_blocks}) {
    if (blocks < 1 || blocks > kGemmArBlocksMax) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: {} blocks of one role are not possible; 1 to {} are", blocks,
                  kGemmArBlocksMax);
    }
  }
  if (options.send_blocks > shm::kLanesMax) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: {} send blocks are too many; a session has at most {} lanes",
                options.send_blocks, shm::kLanesMax);
  }
  if (options.wait_timeout <= std::chrono::nanoseconds::zero()) {
    return fail(ErrorCode::kInvalidArgument, "gemm_ar: the wait timeout must be more than zero");
  }
  return {};
}

}  // namespace

class GemmArCpu::Impl : public BlockWork {
 public:
  Impl(const GemmArPlan& plan, std::uint32_t k, const RankContext& context,
       const GemmArCpuOptions& options)
      : plan_(plan), k_(k), b_layout_(options.b_layout), math_(row_math(plan.dtype)) {
    launch_.plan = plan;
    launch_.context = context;
    launch_.blocks = {options.compute_blocks, options.reduce_blocks, options.send_blocks,
                      options.receive_blocks};
    launch_.local = &local_;
    launch_.control.session_abort = context.session_abort;
    launch_.control.process_abort = context.process_abort;
    launch_.control.peer_failed = failed_word(context.world.local);
    launch_.control.stop = &local_.stop;
    launch_.control.record = &local_.failure;
    launch_.control.timeout_ns = static_cast<std::uint64_t>(options.wait_timeout.count());
    parts_ = make_parts(launch_.blocks, context.world);
    reports_.resize(parts_.size());
  }
  virtual ~Impl() = default;

  Status start() {
    const GemmArPlan& plan = plan_;
    const GemmArSchedule largest(plan, plan.max.m);
    // Of any launch: smaller ones may have taller tiles.
    const CpuGemm::TileShape tile{std::min(plan.tile_m, plan.max.m), largest.tile_cols()};
    MK_ASSIGN_OR_RETURN(gemm_, CpuGemm::create(launch_.blocks.compute,
                                               {tile.rows, std::min(tile.columns, plan.max.n)}, k_,
                                               plan.dtype, b_layout_));
    tiles_.resize(launch_.blocks.compute);
    for (auto& scratch : tiles_) scratch.resize(std::size_t{tile.rows} * tile.columns);
    MK_ASSIGN_OR_RETURN(pool_, BlockPool::start(static_cast<std::uint32_t>(parts_.size())));
    return {};
  }

  Result<LaunchStats> launch(const Matrices& matrices, std::uint32_t m, Mode mode) {
    MK_RETURN_IF_ERROR(check_arguments(matrices, m));
    if (broken_) return tl::unexpected<Error>(*broken_);
    if (launch_.epoch == kLaunchesMax) {
      return fail(ErrorCode::kLimitExceeded,
                  "gemm_ar: {} launches are all that one operator makes; create a new one",
                  kLaunchesMax);
    }
    const std::uint64_t start_ns = CpuPacer::now_ns();
    ++launch_.epoch;
    launch_.m = m;
    launch_.mode = mode;
    matrices_ = matrices;
    if (auto prepared = prepare_tiles(); !prepared) return broken_by(prepared.error());
    std::fill(reports_.begin(), reports_.end(), BlockReport{});
    gemm_ar::announce_launch(launch_);
    pool_->run(*this);
    const bool completed = std::all_of(reports_.begin(), reports_.end(),
                                       [](const BlockReport& report) { return report.completed; });
    if (!completed) return broken_by(cause());
    return make_stats(start_ns);
  }

  void run_block(std::uint32_t index) override {
    const Part part = parts_[index];
    BlockReport& report = reports_[index];
    const bool computes = part.role == Role::kCompute;
    CpuExecutor executor(*gemm_, math_, matrices_, b_layout_, computes ? part.index : 0,
                         computes ? tiles_[part.index].data() : nullptr);
    GemmArBlock block(executor, launch_, part.role, part.index, report.totals);
    switch (part.role) {
      case Role::kCompute:
        report.completed = gemm_ar::compute(block);
        break;
      case Role::kReduce:
        report.completed = gemm_ar::reduce(block);
        break;
      case Role::kSend:
        report.completed = gemm_ar::send(block);
        break;
      case Role::kReceive:
        report.completed = gemm_ar::receive(block);
        break;
      case Role::kCollect:
        break;
    }
    report.end_ns = CpuPacer::now_ns();
    if (!computes || !report.completed) return;
    GemmArBlock collector(executor, launch_, Role::kCollect, part.index, report.collect);
    report.completed = gemm_ar::collect(collector);
    report.collect_end_ns = CpuPacer::now_ns();
  }

  const GemmArPlan& plan() const { return plan_; }
  std::uint32_t epoch() const { return launch_.epoch; }
  const void* output() const {
    return launch_.context.workspaces[launch_.context.world.local] + launch_.plan.layout.out;
  }

 private:
  std::uint32_t* failed_word(std::uint32_t local) const {
    return reinterpret_cast<std::uint32_t*>(launch_.context.workspaces[local] +
                                            launch_.plan.layout.failed);
  }

  Status check_arguments(const Matrices& matrices, std::uint32_t m) const {
    const std::uint32_t n = launch_.plan.max.n;
    if (m < 1 || m > launch_.plan.max.m) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: m = {} is not in 1 to {}, which the operator was made for", m,
                  launch_.plan.max.m);
    }
    if (matrices.a == nullptr || matrices.b == nullptr) {
      return fail(ErrorCode::kInvalidArgument, "gemm_ar: {} is null",
                  matrices.a == nullptr ? "a" : "b");
    }
    const std::uint32_t b_side = b_layout_ == BLayout::kKN ? n : k_;
    if (matrices.lda < k_ || matrices.ldb < b_side || (matrices.c != nullptr && matrices.ldc < n)) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: leading dimensions a {}, b {}, c {} are too small; at least {}, {}, {}",
                  matrices.lda, matrices.ldb, matrices.ldc, k_, b_side, n);
    }
    return {};
  }

  /// Interior tiles, the last column of tiles, the last row, and the corner.
  Status prepare_tiles() {
    const GemmArSchedule schedule(launch_.plan, launch_.m);
    const std::uint32_t n = launch_.plan.max.n;
    const std::uint32_t last_rows = (launch_.m - 1) % schedule.tile_rows() + 1;
    const std::uint32_t last_cols = (n - 1) % schedule.tile_cols() + 1;
    std::vector<CpuGemm::TileShape> shapes;
    for (std::uint32_t rows : {schedule.tile_rows(), last_rows}) {
      for (std::uint32_t columns : {schedule.tile_cols(), last_cols}) {
        const CpuGemm::TileShape shape{rows, columns};
        if (columns <= n && std::find(shapes.begin(), shapes.end(), shape) == shapes.end())
          shapes.push_back(shape);
      }
    }
    return gemm_->prepare(shapes, matrices_.lda, matrices_.ldb);
  }

  Error cause() const {
    if (local_.failure.claimed != 0) {
      const World& world = launch_.context.world;
      return describe(local_.failure, "gemm_ar", launch_.epoch, world,
                      shm::load_acquire(failed_word(world.local)));
    }
    if (auto status = gemm_->error(); !status) return status.error();
    return describe(local_.failure, "gemm_ar", launch_.epoch, launch_.context.world, 0);
  }

  /// Keeps the error for later launches, and tells the local ranks, whose waits would otherwise
  /// last to their deadlines.
  tl::unexpected<Error> broken_by(const Error& error) {
    broken_ = error;
    const World& world = launch_.context.world;
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      // The first to fail in the node is the cause; who failed because of it says nothing new.
      shm::compare_exchange(failed_word(local), 0u, world.rank() + 1);
    }
    return tl::unexpected<Error>(error);
  }

  LaunchStats make_stats(std::uint64_t start_ns) const {
    LaunchStats stats;
    stats.epoch = launch_.epoch;
    stats.m = launch_.m;
    stats.mode = launch_.mode;
    const auto account = [&](Role role, const BlockTotals& totals, std::uint64_t end_ns) {
      RoleStats& of_role = stats.roles[static_cast<std::uint32_t>(role)];
      ++of_role.blocks;
      of_role.end_ns = std::max(of_role.end_ns, end_ns - start_ns);
      of_role.wait_ns += totals.waits.ns;
      of_role.waits += totals.waits.count;
      stats.commands += totals.commands;
      stats.network_bytes += totals.network_bytes;
    };
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      account(parts_[i].role, reports_[i].totals, reports_[i].end_ns);
      if (parts_[i].role == Role::kCompute)
        account(Role::kCollect, reports_[i].collect, reports_[i].collect_end_ns);
    }
    stats.gemm_ns = stats.role(Role::kCompute).end_ns;
    stats.total_ns = CpuPacer::now_ns() - start_ns;
    return stats;
  }

  const GemmArPlan plan_;
  GemmArLaunch launch_;
  GemmArLocal local_;
  std::uint32_t k_;
  BLayout b_layout_;
  const RowMath& math_;
  Matrices matrices_;
  std::unique_ptr<CpuGemm> gemm_;
  std::vector<std::vector<float>> tiles_;  ///< by compute block: the tile in fp32
  std::vector<Part> parts_;
  std::vector<BlockReport> reports_;
  std::optional<Error> broken_;
  std::unique_ptr<BlockPool> pool_;  ///< ends first: its threads use the rest
};

GemmArCpu::GemmArCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmArCpu::~GemmArCpu() = default;

Result<std::unique_ptr<GemmArCpu>> GemmArCpu::create(const GemmArPlan& plan, std::uint32_t k,
                                                     const RankContext& context,
                                                     const GemmArCpuOptions& options) {
  if (k < 1 || k > 1u << 24)
    return fail(ErrorCode::kInvalidArgument, "gemm_ar: k = {} is not in 1 to {}", k, 1u << 24);
  MK_RETURN_IF_ERROR(check_options(options));
  MK_RETURN_IF_ERROR(check_context(plan, context, options));
  auto impl = std::make_unique<Impl>(plan, k, context, options);
  MK_RETURN_IF_ERROR(impl->start());
  return std::unique_ptr<GemmArCpu>(new GemmArCpu(std::move(impl)));
}

Result<LaunchStats> GemmArCpu::launch(const void* a, std::uint64_t lda, const void* b,
                                      std::uint64_t ldb, void* c, std::uint64_t ldc,
                                      std::uint32_t m, Mode mode) {
  return impl_->launch(
      {static_cast<const std::uint16_t*>(a), lda, static_cast<const std::uint16_t*>(b), ldb,
       static_cast<std::uint16_t*>(c), ldc},
      m, mode);
}

const void* GemmArCpu::output() const { return impl_->output(); }
const GemmArPlan& GemmArCpu::plan() const { return impl_->plan(); }
std::uint32_t GemmArCpu::epoch() const { return impl_->epoch(); }

}  // namespace mk::kernels
