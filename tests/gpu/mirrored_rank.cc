#include "tests/gpu/mirrored_rank.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/comm/launch_record.h"
#include "kernels/gather/geometry.h"
#include "kernels/ops/ag_gemm/schedule.h"
#include "kernels/ops/ag_gemm/sm90.h"
#include "kernels/ops/gemm_ar/schedule.h"
#include "tests/gpu/devices.h"

namespace mk::test {
namespace {

using kernels::TileRect;

constexpr int kHere = 0;
constexpr int kThere = 1;
/// Of the others' products: long enough for random sums, short enough to be made in no time.
constexpr std::uint32_t kPeerK = 16;
constexpr auto kType = kernels::cuda::DType::kBf16;

void use(int device) { require(cudaSetDevice(device), "cudaSetDevice"); }

}  // namespace

MirroredRank::MirroredRank(const JobSetup& setup, DaemonNodes* daemons, std::uint64_t seed)
    : setup_(setup), plan_(make_plan(setup, kMultiprocessors)), seed_(seed) {
  demand(setup.locals > 1, "several ranks in a node");
  demand(setup.nodes == (daemons == nullptr ? 1 : 2), "one node, or daemons of two");
  demand(setup.m % setup.world() == 0, "as many rows for each rank");
  demand(setup.gap == 0 && setup.dtype == kernels::DType::kBf16, "bf16 without gaps");
  demand(device_count() > kThere, "two devices");
  allow_access(kHere, kThere);
  allow_access(kThere, kHere);
  const std::uint32_t world = setup.world();
  places_.workspaces.resize(locals());
  places_.rows.resize(world);
  places_.partials.resize(world);
  places_.their_tiles.resize(world);
  peer_a_.resize(world);
  peer_b_.resize(world);
  use(kThere);
  require(cudaStreamCreateWithFlags(&there_, cudaStreamNonBlocking), "stream");
  use(kHere);
  require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  const kernels::RankContext context = daemons == nullptr ? make_context() : make_context(*daemons);
  const std::uint64_t m = setup.m, n = setup.n, k = setup.k[0];
  const std::uint64_t rows = setup.op == Op::kAgGemm ? shard_rows() : m;
  a_ = std::make_unique<DeviceMemory>(rows * k * kernels::kElementBytes);
  b_ = std::make_unique<DeviceMemory>(n * k * kernels::kElementBytes);
  c_ = std::make_unique<DeviceMemory>(m * n * kernels::kElementBytes);
  fill_normal(a_->data(), kType, static_cast<std::int64_t>(rows * k), seed_++, stream_);
  fill_normal(b_->data(), kType, static_cast<std::int64_t>(n * k), seed_++, stream_);
  kernels::CudaOptions options = setup.options;
  options.ranks_per_device = 1;
  op_ = make_operator(setup, plan_, 0, context, options);
  if (setup.nodes > 1 && op_->input() != nullptr)
    require(cudaMemcpyAsync(op_->input(), a_->data(), rows * k * kernels::kElementBytes,
                            cudaMemcpyDeviceToDevice, stream_),
            "rows in place");
  require(cudaDeviceSynchronize(), "inputs");
  use(kThere);
  // One for each chunk that has a flag of its own, or tile.
  if (setup.op == Op::kGemmAr)
    demand(own_tiles(setup_, plan_).places.size() <= shm::kFlagsMax, "fewer tiles");
  constexpr std::uint64_t kToldBytes = shm::kFlagsMax * sizeof(std::uint32_t);
  places_.told = reinterpret_cast<std::uint32_t*>(allocate_there(kToldBytes));
  require(cudaMemset(places_.told, 0, kToldBytes), "counters");
  if (setup.op == Op::kAgGemm) {
    fill_rows();
  } else {
    fill_partials();
  }
  require(cudaDeviceSynchronize(), "the others' inputs");
  use(kHere);
  if (const auto* op = op_->ag_gemm(); op != nullptr && op->shares_by_dma()) {
    const kernels::AgGemmSchedule schedule(plan_.ag, mirrored_world(setup_), setup_.m);
    dma_ = std::make_unique<MirroredDma>(kHere, kThere, schedule.gather(),
                                         static_cast<std::uint32_t>(shard_rows()), op->dma_bytes(),
                                         rows_order().onward);
  }
  const auto list = [&](std::uint32_t epoch) {
    return reflections(setup_, plan_, places_, rows_order(), epoch);
  };
  mirror_ = std::make_unique<Mirror>(kThere, list(0), list(1), under_way());
}

MirroredRank::~MirroredRank() {
  cudaStreamSynchronize(stream_);
  dma_.reset();
  mirror_.reset();
  cudaStreamDestroy(there_);
  cudaStreamDestroy(stream_);
}

RowsOrder MirroredRank::rows_order() const {
  RowsOrder order;
  const kernels::AgGemmCuda* const op = op_->ag_gemm();
  if (op == nullptr) return order;
  order.arrival = op->arrival();
  order.by_dma = op->shares_by_dma();
  const kernels::AgGemmSchedule schedule(plan_.ag, mirrored_world(setup_), setup_.m);
  const auto rows = static_cast<std::uint32_t>(shard_rows());
  if (order.arrival == kernels::Arrival::kSideBySide)
    order.shared_parts =
        ag_gemm_sharing(schedule.gather(), op_->blocks(), rows, order.by_dma).parts;
  order.onward =
      ag_gemm_passing_on(schedule.gather(), op_->blocks(), setup_.m, op->passes_on_by_dma());
  return order;
}

/// A group has a chunk, or a part of one, for each other rank under way; where rows go in turn,
/// for one.
UnderWay MirroredRank::under_way() const {
  const kernels::RoleBlocks& blocks = op_->blocks();
  const std::uint32_t peers = locals() - 1;
  UnderWay made;
  switch (setup_.op) {
    case Op::kAgGemm:
      made.first =
          blocks.share * (op_->ag_gemm()->arrival() == kernels::Arrival::kSideBySide ? peers : 1);
      made.later = blocks.receive * peers;
      break;
    case Op::kGemmRs:
      break;
    case Op::kGemmAr:
      made.later = (setup_.nodes > 1 ? blocks.receive : blocks.reduce) * peers;
      break;
  }
  return made;
}

std::byte* MirroredRank::allocate_there(std::uint64_t bytes) {
  memory_there_.push_back(std::make_unique<DeviceMemory>(bytes, kThere));
  return static_cast<std::byte*>(memory_there_.back()->data());
}

std::byte* MirroredRank::filled_there(std::uint64_t elements) {
  std::byte* const memory = allocate_there(elements * kernels::kElementBytes);
  fill_normal(memory, kType, static_cast<std::int64_t>(elements), seed_++, there_);
  return memory;
}

/// Of one node.
kernels::RankContext MirroredRank::make_context() {
  kernels::RankContext context;
  context.world = mirrored_world(setup_);
  workspace_ = std::make_unique<DeviceMemory>(plan_.workspace_bytes);
  context.workspaces[0] = static_cast<std::byte*>(workspace_->data());
  for (std::uint32_t local = 1; local < locals(); ++local)
    context.workspaces[local] = allocate_there(plan_.workspace_bytes);
  for (std::uint32_t local = 0; local < locals(); ++local) {
    use(local == 0 ? kHere : kThere);
    require(cudaMemset(context.workspaces[local], 0, plan_.workspace_bytes), "workspace");
    require(cudaDeviceSynchronize(), "workspace");
    places_.workspaces[local] = context.workspaces[local];
  }
  use(kHere);
  return context;
}

/// Of two.
kernels::RankContext MirroredRank::make_context(DaemonNodes& daemons) {
  daemons.attach();
  const auto contexts = daemons.memory(plan_.workspace_bytes, plan_.flags);
  for (std::uint32_t local = 0; local < locals(); ++local)
    places_.workspaces[local] = contexts[local].workspaces[local];
  places_.arrivals = contexts[0].arrival_flags;
  places_.arrivals_there = contexts[locals()].arrival_flags;
  return contexts[0];
}

void MirroredRank::fill_rows() {
  kernels::GatherHeader header;
  header.m = setup_.m;
  header.rows = static_cast<std::uint32_t>(shard_rows());
  std::byte* const memory = allocate_there(sizeof header);
  require(cudaMemcpy(memory, &header, sizeof header, cudaMemcpyHostToDevice), "header");
  places_.header = memory;
  for (std::uint32_t rank = 1; rank < setup_.world(); ++rank)
    places_.rows[rank] = filled_there(shard_rows() * setup_.k[0]);
}

void MirroredRank::make_partial(std::uint32_t p, const OwnTiles& tiles, std::byte* packed) {
  const std::uint64_t rows = setup_.op == Op::kGemmRs ? shard_rows() : setup_.m;
  peer_a_[p] = filled_there(rows * kPeerK);
  peer_b_[p] = filled_there(std::uint64_t{setup_.n} * kPeerK);
  pack_partial({peer_a_[p], peer_b_[p], kPeerK}, tiles.places, tiles.tile_bytes, tiles.tile_columns,
               packed, there_);
}

void MirroredRank::fill_partials() {
  const OwnTiles own = own_tiles(setup_, plan_);
  const std::uint64_t bytes = own.places.size() * own.tile_bytes;
  // GEMM+RS: also for the rail peer's shard, as many; what those are, only the peer would know.
  const std::uint64_t shards = setup_.op == Op::kGemmRs ? setup_.nodes : 1;
  for (std::uint32_t p = 1; p < locals(); ++p) {
    places_.partials[p] = filled_there(shards * bytes / kernels::kElementBytes);
    make_partial(p, own, places_.partials[p]);
    if (setup_.op == Op::kGemmAr)
      places_.their_tiles[p] = filled_there(bytes / kernels::kElementBytes);
  }
  const std::uint64_t counters = own.places.size() * locals() * sizeof(std::uint32_t);
  places_.counters = reinterpret_cast<std::uint32_t*>(allocate_there(counters));
  require(cudaMemset(places_.counters, 0, counters), "counters");
  if (setup_.nodes == 1) return;
  kernels::BankHeader header;
  header.m = setup_.m;
  std::byte* const bank = allocate_there(sizeof header + bytes);
  require(cudaMemcpy(bank, &header, sizeof header, cudaMemcpyHostToDevice), "header");
  make_partial(locals(), own, bank + sizeof header);
  places_.sums = bank;
}

void MirroredRank::launch(bool in_place) {
  use(kHere);
  if (dma_) dma_->mark(stream_);
  const bool in_workspace = setup_.op == Op::kGemmAr;
  if (auto launched = op_->launch(stream_, in_place ? op_->input() : a_->data(), b_->data(),
                                  in_workspace ? nullptr : c_->data(), nullptr, nullptr, setup_.m,
                                  kernels::Mode::kFused);
      !launched) {
    fmt::print(stderr, "{}\n", launched.error().message);
    std::exit(1);
  }
  mirror_->launch(++epoch_);
  if (dma_) dma_->launch(places_, epoch_);
}

void MirroredRank::poison() {
  use(kHere);
  void* const c = setup_.op == Op::kGemmAr ? const_cast<void*>(op_->output()) : c_->data();
  const std::uint64_t rows = setup_.op == Op::kGemmRs ? shard_rows() : setup_.m;
  test::poison(c, static_cast<std::int64_t>(rows * setup_.n), stream_);
  require(cudaStreamSynchronize(stream_), "poison");
}

Verdict MirroredRank::judge() {
  use(kHere);
  require(cudaStreamSynchronize(stream_), "launch");
  SummedProduct product;
  product.n = static_cast<int>(setup_.n);
  if (setup_.op == Op::kAgGemm) {
    Verdict all;
    product.m = static_cast<int>(shard_rows());
    product.k[0] = static_cast<int>(setup_.k[0]);
    product.b[0] = b_->data();
    for (std::uint32_t rank = 0; rank < setup_.world(); ++rank) {
      product.a[0] = rank == 0 ? a_->data() : places_.rows[rank];
      const auto* c = static_cast<const std::byte*>(c_->data()) +
                      rank * shard_rows() * setup_.n * kernels::kElementBytes;
      all.include(judge_sum(product, c, product.n, stream_));
    }
    return all;
  }
  product.nodes = static_cast<int>(setup_.nodes);
  product.locals = static_cast<int>(locals());
  // Of the other node only the rail peer has a product: the node's sum.
  for (std::uint32_t rank = 0; rank <= (setup_.nodes > 1 ? locals() : locals() - 1); ++rank) {
    product.k[rank] = static_cast<int>(rank == 0 ? setup_.k[0] : kPeerK);
    product.a[rank] = rank == 0 ? a_->data() : peer_a_[rank];
    product.b[rank] = rank == 0 ? b_->data() : peer_b_[rank];
  }
  if (setup_.op == Op::kGemmAr) return judge_owned_tiles(product);
  product.m = static_cast<int>(shard_rows());
  return judge_sum(product, c_->data(), product.n, stream_);
}

/// GEMM+AR: own tiles against the product, the others' against what they were.
Verdict MirroredRank::judge_owned_tiles(const SummedProduct& product) {
  const kernels::GemmArSchedule schedule(plan_.ar, setup_.m);
  const auto* const c = static_cast<const std::byte*>(op_->output());
  Verdict all;
  for (std::uint32_t tile = 0; tile < schedule.tiles(); ++tile) {
    const TileRect rect = schedule.rect(tile);
    const std::byte* const place =
        c + (std::uint64_t{rect.row} * setup_.n + rect.column) * kernels::kElementBytes;
    const std::uint32_t owner = schedule.owner(tile);
    if (owner != 0) {
      const std::byte* const brought =
          places_.their_tiles[owner] + schedule.owned_index(tile) * schedule.slot_bytes();
      all.bad += count_different_rows(place, setup_.n, brought, schedule.tile_cols(), rect.rows,
                                      rect.columns, stream_);
      continue;
    }
    SummedProduct part = product;
    part.m = static_cast<int>(rect.rows);
    part.n = static_cast<int>(rect.columns);
    for (std::uint32_t rank = 0; rank < setup_.world(); ++rank) {
      if (product.k[rank] == 0) continue;
      const std::uint64_t row_bytes = std::uint64_t(product.k[rank]) * kernels::kElementBytes;
      part.a[rank] = static_cast<const std::byte*>(product.a[rank]) + rect.row * row_bytes;
      part.b[rank] = static_cast<const std::byte*>(product.b[rank]) + rect.column * row_bytes;
    }
    all.include(judge_sum(part, place, static_cast<int>(setup_.n), stream_));
  }
  return all;
}

}  // namespace mk::test
