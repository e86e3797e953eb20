#include "kernels/ops/ring/sm90.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels/comm/banks.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/cuda/core/attention.h"
#include "kernels/cuda/host/on_device.h"
#include "kernels/cuda/host/operator_inputs.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/cuda/transport/dma_rows.h"
#include "kernels/gather/chunks_sent.h"
#include "kernels/gather/engine_steps.h"
#include "kernels/gather/plan.h"
#include "kernels/ops/ring/windows.h"
#include "shm/atomic.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "ring_attention";
constexpr float kLog2E = 1.44269504088896340736f;

cuda::AttentionProblem problem_of(const RingAttentionPlan& plan,
                                  const RingAttentionDeviceTensors& tensors, std::uint32_t rows) {
  cuda::AttentionProblem problem;
  problem.dtype = cuda::cuda_type(plan.dtype);
  problem.head_dim = static_cast<int>(plan.head_dim);
  problem.batch = static_cast<int>(plan.batch);
  problem.query_heads = static_cast<int>(plan.query_heads);
  problem.key_heads = static_cast<int>(plan.key_heads);
  problem.queries = problem.keys = static_cast<int>(rows);
  problem.scale = tensors.scale;
  problem.q = tensors.q;
  problem.k = tensors.k;
  problem.v = tensors.v;
  problem.o = tensors.o;
  return problem;
}

HeadTensor source_of(const cuda::AttentionTensor& tensor) {
  const auto bytes = [](std::int64_t elements) {
    return static_cast<std::uint64_t>(elements) * kElementBytes;
  };
  return {static_cast<const std::byte*>(tensor.data), bytes(tensor.batch_stride),
          bytes(tensor.row_stride), bytes(tensor.head_stride)};
}

RingAttentionDeviceTensors of_window(const RingAttentionGeometry& its,
                                     RingAttentionDeviceTensors tensors, const HeadWindow& heads) {
  const auto shift = [&](cuda::AttentionTensor& tensor, std::uint32_t group) {
    tensor.data = static_cast<std::uint16_t*>(tensor.data) +
                  first_of_window(heads, group, tensor.batch_stride, tensor.head_stride);
  };
  shift(tensors.q, its.group());
  shift(tensors.k, 1);
  shift(tensors.v, 1);
  shift(tensors.o, its.group());
  if (tensors.lse != nullptr) {
    tensors.lse +=
        first_of_window(heads, its.group(), tensors.lse_batch_stride, tensors.lse_head_stride);
  }
  return tensors;
}

const cuda::RingAttentionKernel* kernel_of(const RingAttentionPlan& plan) {
  if (plan.sequences_max != 0) {
    return plan.dtype == DType::kBf16 ? cuda::ring_attention_packed_kernel_bf16(plan.head_dim)
                                      : cuda::ring_attention_packed_kernel_f16(plan.head_dim);
  }
  return plan.dtype == DType::kBf16 ? cuda::ring_attention_kernel_bf16(plan.head_dim)
                                    : cuda::ring_attention_kernel_f16(plan.head_dim);
}

}  // namespace

RingAttentionCuda::RingAttentionCuda(const RingAttentionPlan& plan)
    : plan_(plan), frame_(kOp), engines_(kOp) {
  arguments_.launch.plan = plan;
}

RingAttentionCuda::~RingAttentionCuda() {
  const cuda::OnDevice on_device(frame_.device());
  cudaFree(words_);
  cudaFree(tables_);
  cudaFree(accounts_);
  cudaFreeHost(report_);
}

Result<std::unique_ptr<RingAttentionCuda>> RingAttentionCuda::create(const RingAttentionPlan& plan,
                                                                     const RankContext& context,
                                                                     const CudaOptions& options) {
  std::unique_ptr<RingAttentionCuda> made(new RingAttentionCuda(plan));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status RingAttentionCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  if (plan_.packing != KeyPacking::kHeads) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: the plan packs keys by rows; on a GPU they come by heads "
                "(ring_attention_cuda_tiling)",
                kOp);
  }
  constexpr std::uint32_t kRunsMax = cuda::RingRuns::kMax;
  if (of.size() > kRunsMax) {
    return fail(ErrorCode::kUnsupported, "{}: {} ranks are more than the kernel takes ({})", kOp,
                of.size(), kRunsMax);
  }
  MK_RETURN_IF_ERROR(check_context(kOp, plan_.nodes, plan_.locals, plan_.flag_count(),
                                   std::max(1u, options.send_groups.count()), context));
  MK_ASSIGN_OR_RETURN(const auto job, cuda::job_plan_of(options));
  plan::Problem problem;
  problem.op = plan::Op::kRing;
  problem.nodes = of.nodes;
  problem.locals = of.locals;
  problem.shape = {plan_.seq_max, plan_.query_heads, plan_.head_dim};
  problem.heads = {plan_.key_heads, plan_.batch, plan_.causal};
  problem.dtype = plan_.dtype;
  problem.ranks_per_device = options.ranks_per_device;
  MK_RETURN_IF_ERROR(create_engines(options));
  problem.named.engines = engines_.used();
  const auto groups =
      plan::chosen_groups(problem, job->machine, plan_.work(of, plan_.seq_max), options.rates);
  const std::uint32_t watchers = plan::watchers_of(problem);
  const FlagMap flags{of.nodes, plan_.gather.banks, plan_.gather.chunks_max};
  MK_RETURN_IF_ERROR(frame_.start(context, options, cuda::accounted_needs(problem, groups), flags,
                                  arguments_.launch, arguments_.frame));
  arguments_.frame.heeds_peers = of.locals > 1 && plan_.gather.local_banks == 1;
  arguments_.frame.by_dma = arguments_.launch.by_dma = engines_.used();
  if (of.size() > 1 && cuda::groups_that_only_share(arguments_.frame, blocks()) <= watchers) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} groups share keys, and the first {} of them look for the others' alone; "
                "give it one more at least",
                kOp, cuda::groups_that_only_share(arguments_.frame, blocks()), watchers);
  }
  arguments_.watchers = watchers;
  plan::Candidate candidate;
  candidate.compute_blocks = blocks().compute;
  candidate.stream_warpgroups = blocks().share - blocks().receive;
  candidate.receive_warpgroups = blocks().receive;
  candidate.engines = engines_.used();
  candidate.heads_together = plan_.heads_together;
  account_ = plan::account_of(problem, job->machine, candidate, options.rates);

  void* words = nullptr;
  const std::size_t bytes = (1 + of.size()) * sizeof(std::uint64_t);
  MK_RETURN_IF_ERROR(frame_.check(cudaMalloc(&words, bytes), "memory"));
  words_ = words;
  MK_RETURN_IF_ERROR(frame_.check(cudaMemset(words, 0, bytes), "memory"));
  MK_RETURN_IF_ERROR(frame_.check(cudaStreamSynchronize(nullptr), "memory"));
  arguments_.dealer_words = static_cast<std::uint32_t*>(words);
  arguments_.shown = static_cast<std::uint64_t*>(words) + 1;
  // Tiles are of queries here: each sees its keys in one go.
  cuda::LaunchTold& told = arguments_.frame.host.told;
  told.taken = arguments_.dealer_words;
  if (plan_.sequences_max != 0) MK_RETURN_IF_ERROR(make_room_for_tables());
  if (plan_.windows() > 1) {
    void* accounts = nullptr;
    MK_RETURN_IF_ERROR(frame_.check(
        cudaMalloc(&accounts, plan_.windows() * sizeof(cuda::LaunchAccounts)), "memory"));
    accounts_ = static_cast<cuda::LaunchAccounts*>(accounts);
  }
  kernel_ = kernel_of(plan_);
  if (kernel_ == nullptr) {
    return fail(ErrorCode::kUnsupported,
                "{}: {} with heads of {} is compiled in release builds only "
                "(CMAKE_BUILD_TYPE=Release); use one, or bf16",
                kOp, name_of(plan_.dtype), plan_.head_dim);
  }
  return frame_.check(kernel_->prepare(), "the device refuses the kernel");
}

/// The plan, on which all ranks agree, says whether copy engines may share, and the options whether
/// this rank's do.
Status RingAttentionCuda::create_engines(const CudaOptions& options) {
  if (!plan_.engines) {
    if (options.dma != true || world().locals == 1) return {};
    return fail(ErrorCode::kInvalidArgument,
                "{}: copy engines are to bring keys, and the plan was not made for them; set "
                "RingAttentionTiling::engines on all ranks",
                kOp);
  }
  if (options.dma == false) return {};
  return engines_.create(options.dma);
}

/// K and V of heads together at a time, the first heads first.
Status RingAttentionCuda::bring_keys(cuda::DmaQueue& queue) const {
  const RingAttentionLaunch& launch = arguments_.launch;
  const GatherSchedule gather(plan_.gather, world());
  const std::uint32_t rows = launch.keys_values.rows;
  return gather::bring_rows(
      gather, rows, gather.data_bytes(rows) / launch.plan.head_units(),
      gather::PieceOrder::kPieceByPiece,
      cuda::DmaSharing{queue, gather, *arguments_.frame.state, launch.context, launch.keys_values});
}

RingAttentionSchedule RingAttentionCuda::schedule_of(std::uint64_t seq) const {
  return {plan_, world(), static_cast<std::uint32_t>(seq), Mode::kFused};
}

std::uint32_t RingAttentionCuda::rows(std::uint64_t seq) const {
  return schedule_of(seq).rows(world().rank());
}

Status RingAttentionCuda::make_room_for_tables() {
  const std::uint64_t sequences = plan_.sequences_max;
  const std::uint64_t ranks = world().size();
  const std::uint64_t tile_bytes = plan_.query_tiles_max() * sizeof(cuda::PackedTile);
  const std::uint64_t words = sequences + ranks * sequences + ranks;
  void* tables = nullptr;
  MK_RETURN_IF_ERROR(frame_.check(
      cudaMalloc(&tables, sizeof(cuda::PackedTotals) + tile_bytes + words * 4), "memory"));
  tables_ = tables;
  void* report = nullptr;
  MK_RETURN_IF_ERROR(frame_.check(cudaHostAlloc(&report, sizeof(cuda::LengthsReport),
                                                cudaHostAllocMapped | cudaHostAllocPortable),
                                  "pinned memory"));
  report_ = new (report) cuda::LengthsReport;
  cuda::PackedLaunchTables& packed = arguments_.packed;
  cuda::PackedTableArguments& make = packed.make;
  make.totals = static_cast<cuda::PackedTotals*>(tables);
  make.tiles = reinterpret_cast<cuda::PackedTile*>(make.totals + 1);
  make.rows =
      reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(make.tiles) + tile_bytes);
  make.first_rows = make.rows + sequences;
  make.rank_rows = make.first_rows + ranks * sequences;
  make.rank = world().rank();
  make.ranks = world().size();
  make.causal = plan_.causal;
  make.parts = Divisor(plan_.parts());
  make.stop = arguments_.launch.control.stop;
  make.report = report_;
  packed.items.totals = make.totals;
  packed.items.tiles = make.tiles;
  packed.ranges = cuda::packed_ranges(plan_, world());
  packed.ranges.tiles = make.tiles;
  return {};
}

Result<std::uint32_t> RingAttentionCuda::rows_of_packed(const std::uint32_t* starts,
                                                        std::uint32_t sequences, std::uint64_t room,
                                                        std::uint64_t seq) const {
  if (starts == nullptr || sequences < 1 || sequences > plan_.sequences_max) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: {} sequences{}; the operator was made for 1 to {} of them, with as many starts "
        "and one more",
        kOp, sequences, starts == nullptr ? ", and their starts are null" : "",
        plan_.sequences_max);
  }
  if (seq < 1 || seq > plan_.seq_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} rows in all; the operator was made for 1 to {}", kOp, seq, plan_.seq_max);
  }
  // More than any lengths need is as good as enough.
  const std::uint64_t most = plan_.packed_rows_max(static_cast<std::uint32_t>(seq), sequences);
  return static_cast<std::uint32_t>(room == 0 ? most : std::min(room, most));
}

Result<std::uint32_t> RingAttentionCuda::rows_of_tensors(const RingAttentionTensors& tensors,
                                                         std::uint64_t seq) const {
  if (plan_.sequences_max != 0)
    return rows_of_packed(tensors.starts, tensors.sequences, tensors.room, seq);
  MK_RETURN_IF_ERROR(plan_.check_seq(seq));
  return rows(seq);
}

void RingAttentionCuda::set_trace(bool on) {
  const cuda::OnDevice on_device(frame_.device());
  trace_.set(on, frame_.blocks_max(cuda::all_blocks(arguments_.frame, blocks())),
             arguments_.watchers);
  arguments_.trace = trace_.buffer();
}

std::vector<TraceEvent> RingAttentionCuda::trace() const {
  const cuda::OnDevice on_device(frame_.device());
  return trace_.read();
}

Status RingAttentionCuda::status() const {
  const cuda::LengthsReport none;
  const cuda::LengthsReport& lengths = report_ != nullptr ? *report_ : none;
  const auto refused = [&](std::string why) -> Status {
    return fail(ErrorCode::kInvalidArgument, "{} on rank {}: {}", kOp, world().rank(), why);
  };
  switch (shm::load_acquire(&lengths.failed)) {
    case cuda::LengthsReport::kNone:
      return frame_.status();
    case cuda::LengthsReport::kNotAscending:
      return refused(fmt::format(
          "sequence {} starts at row {} and ends at row {}; the first one must start at row 0, and "
          "none may end before it starts",
          lengths.sequence, lengths.begin, lengths.end));
    case cuda::LengthsReport::kTooLong:
      return refused(
          fmt::format("sequence {} ends at row {}, and the launch was for {} rows in all",
                      lengths.sequence, lengths.end, lengths.most));
    default:
      return refused(
          fmt::format("the sequences' lengths give it {} rows, and its tensors have "
                      "room for {}; make them larger",
                      lengths.end, lengths.most));
  }
}

/// Of packed sequences, whose lengths nobody has read yet: as if they were alike.
LaunchWork RingAttentionCuda::work(const RingAttentionDeviceTensors& tensors,
                                   std::uint32_t seq) const {
  LaunchWork work = plan_.work(world(), seq);
  if (plan_.sequences_max != 0) {
    const RingAttentionSchedule one = schedule_of(div_up(seq, tensors.sequences));
    work.flops = 4.0 * plan_.head_dim * plan_.query_heads * static_cast<double>(one.pairs()) *
                 tensors.sequences;
  }
  return work;
}

/// The next launch of the kernel is that of these heads, the launch's `index`-th.
Status RingAttentionCuda::set_window(const RingAttentionDeviceTensors& all, std::uint32_t index,
                                     std::uint32_t seq, std::uint32_t rows) {
  const HeadWindow heads = plan_.window(index);
  const RingAttentionGeometry its = plan_.of_window(heads);
  const RingAttentionDeviceTensors tensors = of_window(its, all, heads);
  MK_RETURN_IF_ERROR(make_maps(its, tensors, rows));
  arguments_.launch.plan = its;
  arguments_.launch.keys_values =
      KeySource::of(its, source_of(tensors.k), source_of(tensors.v), rows);
  arguments_.o = tensors.o;
  arguments_.lse = tensors.lse;
  arguments_.lse_batch_stride = tensors.lse_batch_stride;
  arguments_.lse_row_stride = tensors.lse_row_stride;
  arguments_.lse_head_stride = tensors.lse_head_stride;
  cuda::LaunchTold& told = arguments_.frame.host.told;
  told.m = seq;
  std::ranges::copy(std::array{its.query_heads, its.key_heads, its.head_dim, its.batch},
                    told.sizes);
  const int section = cuda::ring_section(its, world(), seq);
  if (plan_.sequences_max == 0) {
    const ThreadBlocks computing =
        thread_blocks_of(blocks().compute) + cuda::late_blocks(arguments_);
    const int last =
        plan_.causal ? cuda::HeadSections::kLastOfBlock * static_cast<int>(computing.count()) : 0;
    arguments_.items =
        cuda::ring_items(its, world(), schedule_of(seq), kernel_->tile_queries, section, last);
    told.tiles = static_cast<std::uint32_t>(cuda::RingItems(arguments_.items.items).count());
    const RingAttentionSchedule schedule(its, world(), seq, Mode::kFused);
    told.chunks = gather_chunks_sent(
        schedule.gather(), [&](std::uint32_t rank) { return schedule.gathered_rows(rank); });
    return {};
  }
  cuda::PackedLaunchTables& packed = arguments_.packed;
  cuda::PackedTableArguments& make = packed.make;
  make.starts = tensors.starts;
  make.count = tensors.sequences;
  make.rows_max = seq;
  make.room = rows;
  packed.there = index != 0;
  packed.items.heads = static_cast<int>(its.query_heads);
  packed.items.section = section;
  told.tiles_of = &packed.items.totals->tiles;
  told.tiles_each = its.query_heads;
  arguments_.launch.packed = {tensors.sequences, make.rows, nullptr, make.first_rows,
                              make.rank_rows};
  packed.ranges.sequences = arguments_.launch.packed;
  return {};
}

Status RingAttentionCuda::launch(cudaStream_t stream, const RingAttentionDeviceTensors& tensors,
                                 std::uint64_t seq, Mode mode) {
  const bool packed = plan_.sequences_max != 0;
  std::uint32_t own = 0;  // rows
  if (packed) {
    MK_ASSIGN_OR_RETURN(own, rows_of_packed(tensors.starts, tensors.sequences, tensors.room, seq));
  } else {
    MK_RETURN_IF_ERROR(plan_.check_seq(seq));
    own = rows(seq);
  }
  const auto m = static_cast<std::uint32_t>(seq);
  MK_RETURN_IF_ERROR(cuda::check_attention(problem_of(plan_, tensors, own)));
  MK_RETURN_IF_ERROR(status());
  const cuda::OnDevice on_device(frame_.device());

  const Estimate expected = account_.expected(work(tensors, m));
  RingAttentionLaunch& launch = arguments_.launch;
  launch.m = m;
  launch.mode = mode == Mode::kAuto ? expected.cheaper() : mode;
  frame_.choose_blocks(stream, m, launch.mode, launch.blocks, arguments_.frame);
  arguments_.frame.host.told.taken_ahead = blocks().compute;
  const float scale =
      tensors.scale != 0 ? tensors.scale : 1.0f / std::sqrt(static_cast<float>(plan_.head_dim));
  arguments_.scale_log2 = scale * kLog2E;
  for (std::uint32_t i = 0; i < plan_.windows(); ++i) {
    MK_RETURN_IF_ERROR(set_window(tensors, i, m, own));
    MK_RETURN_IF_ERROR(frame_.check(
        trace_.begin_launch(stream, cuda::all_blocks(arguments_.frame, blocks())), "the trace"));
    MK_RETURN_IF_ERROR(engines_.launch(
        stream, *arguments_.frame.state,
        [&] { return frame_.put_on(stream, *kernel_, arguments_); },
        [this](cuda::DmaQueue& queue) { return bring_keys(queue); }));
    if (plan_.windows() == 1) break;
    MK_RETURN_IF_ERROR(
        frame_.check(cudaMemcpyAsync(accounts_ + i, &arguments_.frame.state->accounts,
                                     sizeof *accounts_, cudaMemcpyDeviceToDevice, stream),
                     "statistics"));
  }
  queued_ = {m, launch.mode, expected};
  return {};
}

Result<LaunchStats> RingAttentionCuda::finish(cudaStream_t stream) {
  auto finished = frame_.finish(stream);
  MK_RETURN_IF_ERROR(status());
  MK_ASSIGN_OR_RETURN(LaunchStats stats, std::move(finished));
  const std::uint32_t windows = plan_.windows();
  if (windows > 1) {
    std::vector<cuda::LaunchAccounts> accounts(windows);
    const cuda::OnDevice on_device(frame_.device());
    MK_RETURN_IF_ERROR(frame_.check(
        cudaMemcpy(accounts.data(), accounts_, windows * sizeof accounts[0], cudaMemcpyDefault),
        "statistics"));
    const std::uint32_t last = stats.epoch;
    LaunchStats all;
    for (std::uint32_t i = 0; i < windows; ++i) {
      const std::uint32_t epoch = last - (windows - 1 - i);
      all = with_window(all, cuda::stats_of(accounts[i].of[epoch % 2], epoch));
    }
    all.partition = stats.partition;
    stats = all;
  }
  stats.m = queued_.m;
  stats.mode = queued_.mode;
  stats.estimate = queued_.estimate;
  return stats;
}

}  // namespace mk::kernels
