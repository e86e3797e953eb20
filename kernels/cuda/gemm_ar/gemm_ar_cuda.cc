#include "kernels/cuda/gemm_ar/gemm_ar_cuda.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "kernels/comm/wait_text.h"
#include "kernels/comm/workspace_head.h"
#include "kernels/cuda/gemm_ar/launch_arguments.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/gemm_ar/schedule.h"

namespace mk::kernels {
namespace {

constexpr std::uint32_t kTileRows = 128;
constexpr std::uint32_t kTileColumns = 256;
constexpr std::uint32_t kStep = 8;  ///< elements in the copy engine's 16 bytes
constexpr std::uint64_t kAlignBytes = 16;

std::uint32_t default_reduce_blocks(std::uint32_t share) { return std::max(1u, share / 16); }

Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return fail(ErrorCode::kSystem, "gemm_ar: {}: {}", what, cudaGetErrorString(error));
}

Status check_plan(const GemmArPlan& plan, std::uint32_t k, const RankContext& context) {
  const World& world = context.world;
  if (plan.nodes != 1) {
    return fail(ErrorCode::kUnsupported,
                "gemm_ar: {} nodes: the CUDA operator works within one node so far; the CPU "
                "operator takes several",
                plan.nodes);
  }
  if (world.nodes != plan.nodes || world.locals != plan.locals || world.node != 0 ||
      world.local >= world.locals) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: the plan is for 1 node x {} local ranks, the context for node {}, local "
                "rank {} of {} x {}",
                plan.locals, world.node, world.local, world.nodes, world.locals);
  }
  if (plan.tile_m > kTileRows || plan.tile_n > kTileColumns) {
    return fail(ErrorCode::kUnsupported,
                "gemm_ar: tiles of {} x {}: the CUDA operator's are at most {} x {} "
                "(gemm_ar_cuda_tiling)",
                plan.tile_m, plan.tile_n, kTileRows, kTileColumns);
  }
  if (k < 1 || k > 1u << 24 || k % kStep != 0 || plan.max.n % kStep != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: n = {} and k = {} must be multiples of {}, k at most {}: pad them",
                plan.max.n, k, kStep, 1u << 24);
  }
  for (std::uint32_t local = 0; local < world.locals; ++local) {
    if (context.workspaces[local] == nullptr ||
        reinterpret_cast<std::uintptr_t>(context.workspaces[local]) % 64 != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: the workspace of local rank {} is missing or not aligned to 64 bytes",
                  local);
    }
  }
  return {};
}

/// Blocks of each role, within this rank's share of the device.
Result<RoleBlocks> choose_blocks(const GemmArCudaOptions& options, const World& world,
                                 std::uint32_t device_blocks) {
  if (options.ranks_per_device < 1 || options.ranks_per_device > shm::kLocalRanksMax) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: {} ranks on one device; 1 to {} are possible", options.ranks_per_device,
                shm::kLocalRanksMax);
  }
  if (options.wait_timeout <= std::chrono::nanoseconds::zero())
    return fail(ErrorCode::kInvalidArgument, "gemm_ar: the wait timeout must be more than zero");
  const std::uint32_t share = device_blocks / options.ranks_per_device;
  const bool reduces = world.locals > 1;
  RoleBlocks blocks;
  blocks.reduce = 0;
  if (reduces) {
    blocks.reduce =
        options.reduce_blocks != 0 ? options.reduce_blocks : default_reduce_blocks(share);
  }
  const std::uint32_t rest = share > blocks.reduce ? share - blocks.reduce : 0;
  blocks.compute =
      options.compute_blocks != 0 ? options.compute_blocks : std::min(rest, kBlocksMax);
  if (blocks.compute < 1 || blocks.compute > kBlocksMax || blocks.reduce > kBlocksMax ||
      blocks.compute + blocks.reduce > share) {
    return fail(ErrorCode::kLimitExceeded,
                "gemm_ar: {} compute and {} reduce blocks do not fit: this device holds {} at a "
                "time, {} ranks share it, so at most {} each (and {} of one role)",
                blocks.compute, blocks.reduce, device_blocks, options.ranks_per_device, share,
                kBlocksMax);
  }
  return blocks;
}

/// Makes a device current while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace

GemmArTiling gemm_ar_cuda_tiling(std::uint32_t nodes, Shape max, std::uint32_t blocks) {
  GemmArTiling tiling;
  tiling.tile_m = kTileRows;
  tiling.tile_n = kTileColumns;
  // Half tiles where whole ones would leave blocks idle.
  if (std::uint64_t{div_up(max.m, kTileRows)} * div_up(max.n, kTileColumns) < blocks)
    tiling.tile_n = kTileColumns / 2;
  // Within a node a chunk is only what one reduce block does at a time: a tile.
  if (nodes == 1) tiling.chunk_bytes = kTileRows * tiling.tile_n * kElementBytes;
  return tiling;
}

class GemmArCuda::Impl {
 public:
  Impl(const GemmArPlan& plan, std::uint32_t k, const RankContext& context,
       const GemmArCudaOptions& options)
      : plan_(plan), k_(k), b_layout_(options.b_layout) {
    arguments_.launch.plan = plan;
    arguments_.launch.banks = plan.banks;
    arguments_.launch.context = context;
    WaitControl& control = arguments_.launch.control;
    control.session_abort = context.session_abort;
    control.process_abort = context.process_abort;
    control.peer_failed =
        reinterpret_cast<std::uint32_t*>(own_workspace() + WorkspaceHead::failed());
    control.timeout_ns = static_cast<std::uint64_t>(options.wait_timeout.count());
  }
  ~Impl() {
    const OnDevice on_device(device_);
    cudaFree(arguments_.state);
    cudaFreeHost(arguments_.report);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Status start(const GemmArCudaOptions& options) {
    int major = 0;
    int multiprocessors = 0;
    if (cudaError_t error = cudaGetDevice(&device_); error != cudaSuccess) {
      return fail(ErrorCode::kUnavailable, "gemm_ar: no CUDA device: {}",
                  cudaGetErrorString(error));
    }
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device_);
    if (major != 9) {
      return fail(ErrorCode::kUnsupported,
                  "gemm_ar: device {} has compute capability {}.x; the kernel is for 9.0 (H100, "
                  "H200)",
                  device_, major);
    }
    // The kernel takes nearly all of a multiprocessor's shared memory: one block on each.
    MK_ASSIGN_OR_RETURN(arguments_.launch.blocks,
                        choose_blocks(options, arguments_.launch.context.world,
                                      static_cast<std::uint32_t>(multiprocessors)));
    const GemmArSchedule largest(plan_, plan_.max.m);
    kernel_ =
        &(plan_.dtype == DType::kBf16 ? cuda::gemm_ar_kernel_bf16(b_layout(), largest.tile_cols())
                                      : cuda::gemm_ar_kernel_f16(b_layout(), largest.tile_cols()));
    MK_RETURN_IF_ERROR(check(kernel_->prepare(), "the device refuses the kernel"));

    void* state = nullptr;
    MK_RETURN_IF_ERROR(check(cudaMalloc(&state, sizeof(cuda::GemmArDeviceState)), "memory"));
    arguments_.state = static_cast<cuda::GemmArDeviceState*>(state);
    MK_RETURN_IF_ERROR(check(cudaMemset(state, 0, sizeof(cuda::GemmArDeviceState)), "memory"));
    MK_RETURN_IF_ERROR(check(cudaStreamSynchronize(nullptr), "memory"));
    void* report = nullptr;
    MK_RETURN_IF_ERROR(check(cudaHostAlloc(&report, sizeof(cuda::GemmArHostReport),
                                           cudaHostAllocMapped | cudaHostAllocPortable),
                             "pinned memory"));
    arguments_.report = new (report) cuda::GemmArHostReport;
    arguments_.launch.local = &arguments_.state->local;
    arguments_.launch.control.stop = &arguments_.state->local.stop;
    arguments_.launch.control.record = &arguments_.state->local.failure;
    return {};
  }

  Status launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m, Mode mode) {
    MK_RETURN_IF_ERROR(check_arguments(lda, ldb, c, ldc, m));
    MK_RETURN_IF_ERROR(status());
    const OnDevice on_device(device_);
    MK_RETURN_IF_ERROR(make_maps(a, lda, b, ldb, m));
    arguments_.launch.m = m;
    arguments_.launch.mode = mode == Mode::kAuto ? Mode::kFused : mode;  // no estimate yet
    arguments_.c = c;
    arguments_.ldc = ldc;
    return check(kernel_->launch(arguments_, blocks().compute + blocks().reduce, stream),
                 "the launch was refused");
  }

  Status status() const {
    const cuda::GemmArHostReport& report = *arguments_.report;
    switch (shm::load_acquire(&report.failed)) {
      case cuda::GemmArHostReport::kNone:
        return {};
      case cuda::GemmArHostReport::kLaunchesSpent:
        return fail(ErrorCode::kLimitExceeded,
                    "gemm_ar: {} launches are all that one operator makes; create a new one",
                    report.epoch - 1);
      default:
        return tl::unexpected<Error>(describe(report.record, "gemm_ar", report.epoch,
                                              arguments_.launch.context.world, report.peer_failed));
    }
  }

  Result<LaunchStats> finish(cudaStream_t stream) {
    const OnDevice on_device(device_);
    MK_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "the launch failed"));
    MK_RETURN_IF_ERROR(status());
    auto state = std::make_unique<cuda::GemmArDeviceState>();
    MK_RETURN_IF_ERROR(check(cudaMemcpyAsync(state.get(), arguments_.state, sizeof *state,
                                             cudaMemcpyDeviceToHost, stream),
                             "statistics"));
    MK_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "statistics"));
    return make_stats(*state);
  }

  const GemmArPlan& plan() const { return plan_; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  const void* output() const { return own_workspace() + plan_.layout.out; }

 private:
  std::byte* own_workspace() const {
    const RankContext& context = arguments_.launch.context;
    return context.workspaces[context.world.local];
  }
  cuda::BLayout b_layout() const {
    return b_layout_ == BLayout::kNK ? cuda::BLayout::kNK : cuda::BLayout::kKN;
  }

  Status check_arguments(std::uint64_t lda, std::uint64_t ldb, const void* c, std::uint64_t ldc,
                         std::uint32_t m) const {
    const std::uint32_t n = plan_.max.n;
    if (m < 1 || m > plan_.max.m) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: m = {} is not in 1 to {}, which the operator was made for", m,
                  plan_.max.m);
    }
    const std::uint64_t b_side = b_layout_ == BLayout::kKN ? n : k_;
    if (lda < k_ || ldb < b_side || (c != nullptr && ldc < n)) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: leading dimensions a {}, b {}, c {} are too small; at least {}, {}, {}",
                  lda, ldb, ldc, k_, b_side, n);
    }
    if (c != nullptr &&
        (reinterpret_cast<std::uintptr_t>(c) % kAlignBytes != 0 || ldc % kStep != 0)) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: c must lie at a multiple of {} bytes, its rows a multiple of {} "
                  "elements apart ({})",
                  kAlignBytes, kStep, ldc);
    }
    return {};
  }

  Status make_maps(const void* a, std::uint64_t lda, const void* b, std::uint64_t ldb,
                   std::uint32_t m) {
    const auto type = plan_.dtype == DType::kBf16 ? cuda::DType::kBf16 : cuda::DType::kF16;
    const std::uint32_t n = plan_.max.n;
    const World& world = arguments_.launch.context.world;
    const GemmArSchedule schedule(plan_, m);
    // Rows of A beyond the tile are not stored into slots; C itself they would overwrite, so there
    // they are computed in full and right.
    const std::uint32_t rows = world.locals == 1 ? std::min(m, kTileRows) : schedule.tile_rows();
    arguments_.a_box_rows = static_cast<int>(round_up_to(rows, 8));
    arguments_.k_blocks = static_cast<int>(div_up(k_, cuda::kBlockK));
    MK_ASSIGN_OR_RETURN(arguments_.a,
                        cuda::make_tensor_map("A", type, a, m, k_, static_cast<std::int64_t>(lda),
                                              arguments_.a_box_rows, cuda::kBlockK));
    const bool nk = b_layout_ == BLayout::kNK;
    MK_ASSIGN_OR_RETURN(arguments_.b,
                        cuda::make_tensor_map("B", type, b, nk ? n : k_, nk ? k_ : n,
                                              static_cast<std::int64_t>(ldb), kernel_->b_box_rows,
                                              kernel_->b_box_columns));
    if (world.locals == 1) {
      MK_ASSIGN_OR_RETURN(arguments_.out,
                          cuda::make_tensor_map("C", type, output(), m, n, n, 64, 64));
      return {};
    }
    for (std::uint32_t owner = 0; owner < world.locals; ++owner) {
      const std::byte* slots =
          arguments_.launch.context.workspaces[owner] + schedule.slot(world.local, 0);
      MK_ASSIGN_OR_RETURN(
          arguments_.slots[owner],
          cuda::make_tile_map("slots", type, slots, std::max(1u, schedule.owned(owner)),
                              schedule.tile_rows(), schedule.tile_cols()));
    }
    return {};
  }

  LaunchStats make_stats(const cuda::GemmArDeviceState& state) const {
    LaunchStats stats;
    stats.epoch = state.epoch;
    stats.m = arguments_.launch.m;
    stats.mode = arguments_.launch.mode;
    const std::uint32_t count = blocks().compute + blocks().reduce;
    std::uint64_t begin_ns = ~std::uint64_t{0};
    for (std::uint32_t i = 0; i < count; ++i)
      begin_ns = std::min(begin_ns, state.reports[i].begin_ns);
    const auto account = [&](Role role, const WaitTotals& waits, std::uint64_t end_ns) {
      RoleStats& of_role = stats.roles[static_cast<std::uint32_t>(role)];
      ++of_role.blocks;
      of_role.end_ns = std::max(of_role.end_ns, end_ns - begin_ns);
      of_role.wait_ns += waits.ns;
      of_role.waits += waits.count;
      stats.total_ns = std::max(stats.total_ns, end_ns - begin_ns);
    };
    for (std::uint32_t i = 0; i < count; ++i) {
      const cuda::GemmArBlockReport& report = state.reports[i];
      if (i < blocks().compute) {
        account(Role::kCompute, {}, report.tiles_end_ns);
        account(Role::kCollect, report.collect_waits, report.end_ns);
      }
      if (blocks().reduce > 0) account(Role::kReduce, report.reduce_waits, report.sums_end_ns);
    }
    stats.gemm_ns = stats.role(Role::kCompute).end_ns;
    return stats;
  }

  const GemmArPlan plan_;
  const std::uint32_t k_;
  const BLayout b_layout_;
  int device_ = 0;
  const cuda::GemmArKernel* kernel_ = nullptr;
  cuda::GemmArArguments arguments_;
};

GemmArCuda::GemmArCuda(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmArCuda::~GemmArCuda() = default;

Result<std::unique_ptr<GemmArCuda>> GemmArCuda::create(const GemmArPlan& plan, std::uint32_t k,
                                                       const RankContext& context,
                                                       const GemmArCudaOptions& options) {
  MK_RETURN_IF_ERROR(check_plan(plan, k, context));
  auto impl = std::make_unique<Impl>(plan, k, context, options);
  MK_RETURN_IF_ERROR(impl->start(options));
  return std::unique_ptr<GemmArCuda>(new GemmArCuda(std::move(impl)));
}

Status GemmArCuda::launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                          std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m,
                          Mode mode) {
  return impl_->launch(stream, a, lda, b, ldb, c, ldc, m, mode);
}
Status GemmArCuda::status() const { return impl_->status(); }
Result<LaunchStats> GemmArCuda::finish(cudaStream_t stream) { return impl_->finish(stream); }
const void* GemmArCuda::output() const { return impl_->output(); }
const GemmArPlan& GemmArCuda::plan() const { return impl_->plan(); }
std::uint32_t GemmArCuda::compute_blocks() const { return impl_->blocks().compute; }
std::uint32_t GemmArCuda::reduce_blocks() const { return impl_->blocks().reduce; }

}  // namespace mk::kernels
