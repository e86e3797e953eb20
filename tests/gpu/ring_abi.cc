#include "tests/gpu/ring_abi.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/ops/ring/sm90.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/exchange.h"
#include "tests/gpu/host_proxy.h"
#include "tests/gpu/nccl.h"
#include "tests/gpu/partial_attention.h"
#include "tests/gpu/stopwatch.h"

namespace {

using namespace mk;        // NOLINT(google-build-using-namespace): a file of forwarders
using namespace mk::test;  // NOLINT(google-build-using-namespace)

constexpr std::uint32_t kChunkBytes = 4 << 20;  ///< of a parcel
constexpr std::uint64_t kFirstByte = 1 << 16;   ///< of rail memory; before it lies its head
constexpr std::uint64_t kElementBytes = 2;

std::string error_text;

bool failed(const Status& status) {
  if (!status) error_text = status.error().message;
  return !status;
}

void current(std::uint32_t rank) { require(cudaSetDevice(static_cast<int>(rank)), "device"); }
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

class World {
 public:
  explicit World(const MkRingSetup& setup) : nodes(setup.nodes), locals(setup.locals) {
    std::vector<int> devices;
    for (std::uint32_t r = 0; r < size(); ++r) devices.push_back(static_cast<int>(r));
    if (nodes > 1)
      daemons = std::make_unique<DaemonNodes>(nodes, locals, devices, "", setup.link_bandwidth);
    for (const int from : devices) {
      for (const int to : devices) {
        if (from != to) allow_access(from, to);
      }
    }
    std::vector<TimedStream> timed;
    for (std::uint32_t r = 0; r < size(); ++r) {
      current(r);
      cudaStream_t stream = nullptr;
      require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      streams.push_back(stream);
      timed.push_back({devices[r], stream});
    }
    stopwatch = std::make_unique<Stopwatch>(std::move(timed), [] {});
    if (locals > 1) nccl = Nccl::load(devices);
    current(0);
  }
  ~World() {
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }
  std::uint32_t size() const { return nodes * locals; }
  /// Rings of one time are of one job.
  void join() {
    if (daemons != nullptr && rings_++ == 0) daemons->attach();
  }
  void leave() {
    if (daemons != nullptr && --rings_ == 0) daemons->detach();
  }

  const std::uint32_t nodes, locals;
  std::unique_ptr<DaemonNodes> daemons;
  std::unique_ptr<Nccl> nccl;
  std::vector<cudaStream_t> streams;
  std::unique_ptr<Stopwatch> stopwatch;

 private:
  int rings_ = 0;
};

class Ring {
 public:
  explicit Ring(World& world_in) : world(world_in) { world.join(); }
  ~Ring() {
    for (std::uint32_t r = 0; r < ops.size(); ++r) {
      current(r);
      cudaStreamSynchronize(world.streams[r]);
      ops[r].reset();
    }
    world.leave();
    current(0);
  }

  Status start(const MkRingShape& from) {
    kernels::RingAttentionShape shape;
    shape.seq_max = from.seq;
    shape.query_heads = from.query_heads;
    shape.key_heads = from.key_heads;
    shape.head_dim = from.head_dim;
    shape.causal = from.causal != 0;
    shape.dtype = from.dtype == 0 ? kernels::DType::kBf16 : kernels::DType::kF16;
    shape.batch = from.batch;
    seq_ = from.seq;
    MK_ASSIGN_OR_RETURN(const auto plan, kernels::RingAttentionPlan::make(
                                             world.nodes, world.locals, shape,
                                             kernels::ring_attention_cuda_tiling(shape)));
    kernels::CudaOptions options;
    options.stream_groups = kernels::Warpgroups{from.stream_groups};
    std::vector<kernels::RankContext> contexts;
    if (world.daemons != nullptr) {
      contexts = world.daemons->memory(plan.workspace_bytes, plan.flag_count());
    } else {
      std::vector<std::byte*> places;
      for (std::uint32_t r = 0; r < world.size(); ++r) {
        workspaces_.emplace_back(plan.workspace_bytes, static_cast<int>(r));
        places.push_back(static_cast<std::byte*>(workspaces_[r].data()));
        current(r);
        require(cudaMemset(places[r], 0, plan.workspace_bytes), "workspace");
        require(cudaDeviceSynchronize(), "workspace");
      }
      for (std::uint32_t r = 0; r < world.size(); ++r)
        contexts.push_back(rank_context(1, world.locals, r, places, nullptr, nullptr));
    }
    for (std::uint32_t r = 0; r < world.size(); ++r) {
      current(r);
      MK_ASSIGN_OR_RETURN(auto op, kernels::RingAttentionCuda::create(plan, contexts[r], options));
      ops.push_back(std::move(op));
    }
    current(0);
    return {};
  }

  Status launch(const MkRingTensors* by_rank, bool unfused) {
    for (std::uint32_t r = 0; r < ops.size(); ++r) {
      current(r);
      const MkRingTensors& from = by_rank[r];
      const auto tensor = [&](void* data, int row) {
        return kernels::cuda::AttentionTensor{data, from.strides[row][0], from.strides[row][1],
                                              from.strides[row][2]};
      };
      kernels::RingAttentionDeviceTensors tensors;
      tensors.q = tensor(from.q, 0);
      tensors.k = tensor(from.k, 1);
      tensors.v = tensor(from.v, 2);
      tensors.o = tensor(from.o, 3);
      tensors.lse = from.lse;
      tensors.lse_batch_stride = from.strides[4][0];
      tensors.lse_row_stride = from.strides[4][1];
      tensors.lse_head_stride = from.strides[4][2];
      const auto mode = unfused ? kernels::Mode::kUnfused : kernels::Mode::kFused;
      MK_RETURN_IF_ERROR(ops[r]->launch(world.streams[r], tensors, seq_, mode));
    }
    return {};
  }

  void add_rails(std::uint64_t bytes) {
    constexpr std::uint32_t kFlags = 4096;
    rails = world.daemons->memory(kFirstByte + bytes, kFlags);
    for (std::uint32_t r = 0; r < world.size(); ++r) {
      missed.emplace_back(sizeof(std::uint32_t), static_cast<int>(r));
      current(r);
      require(cudaMemset(missed[r].data(), 0, sizeof(std::uint32_t)), "missed");
    }
    current(0);
  }
  std::byte* rail_memory(std::uint32_t r) const {
    return rails[r].workspaces[r % world.locals] + kFirstByte;
  }

  World& world;
  std::vector<std::unique_ptr<kernels::RingAttentionCuda>> ops;
  std::vector<kernels::RankContext> rails;
  std::vector<DeviceMemory> missed;
  std::uint32_t epoch = 0;

 private:
  std::vector<DeviceMemory> workspaces_;
  std::uint64_t seq_ = 0;
};

World& world_of(void* world) { return *static_cast<World*>(world); }
Ring& ring_of(void* ring) { return *static_cast<Ring*>(ring); }

}  // namespace

extern "C" {

void* mk_ring_world(const MkRingSetup* setup) { return new World(*setup); }
void mk_ring_end(void* world) { delete static_cast<World*>(world); }
void* mk_ring_stream(void* world, std::uint32_t rank) { return world_of(world).streams[rank]; }

void mk_ring_time(void* world, void (*queue)(), int held, double* us) {
  Timing timing;
  world_of(world).stopwatch->run(queue, timing, held != 0);
  for (std::size_t r = 0; r < timing.by_rank.size(); ++r) us[r] = timing.by_rank[r][0];
  current(0);
}

void* mk_ring_create(void* world, const MkRingShape* shape) {
  auto made = std::make_unique<Ring>(world_of(world));
  return failed(made->start(*shape)) ? nullptr : made.release();
}
void mk_ring_destroy(void* ring) { delete static_cast<Ring*>(ring); }
int mk_ring_tile_keys(void* ring) { return ring_of(ring).ops[0]->tile_keys(); }
void mk_ring_blocks(void* ring, std::uint32_t* compute, std::uint32_t* others) {
  constexpr std::uint32_t kMultiprocessors = 132;
  *compute = ring_of(ring).ops[0]->blocks().compute;
  *others = kMultiprocessors - *compute;
}
int mk_ring_launch(void* ring, const MkRingTensors* by_rank, int unfused) {
  const int wrong = failed(ring_of(ring).launch(by_rank, unfused != 0)) ? 1 : 0;
  current(0);
  return wrong;
}
int mk_ring_finish(void* ring, MkRingStats* by_rank) {
  Ring& it = ring_of(ring);
  for (std::uint32_t r = 0; r < it.ops.size(); ++r) {
    current(r);
    const auto stats = it.ops[r]->finish(it.world.streams[r]);
    if (!stats) {
      error_text = stats.error().message;
      return 1;
    }
    const kernels::RoleStats& compute = stats->role(kernels::Role::kCompute);
    by_rank[r] = {stats->total_ns, compute.end_ns, stats->role(kernels::Role::kShare).end_ns,
                  compute.wait_ns, compute.waits};
  }
  current(0);
  return 0;
}
const char* mk_ring_error() { return error_text.c_str(); }
void mk_ring_set_trace(void* ring, int on) {
  for (const auto& op : ring_of(ring).ops) op->set_trace(on != 0);
}
std::uint32_t mk_ring_trace(void* ring, std::uint32_t rank, MkRingSpan* spans, std::uint32_t most) {
  const auto events = ring_of(ring).ops[rank]->trace();
  for (std::size_t i = 0; i < events.size() && i < most; ++i) {
    const kernels::TraceSpan& span = events[i].span;
    spans[i] = {span.begin_ns,
                span.end_ns,
                static_cast<std::uint32_t>(events[i].role),
                events[i].block,
                static_cast<std::uint32_t>(span.kind),
                span.index[0],
                span.rank};
  }
  return static_cast<std::uint32_t>(events.size());
}

void mk_ring_exchange(void* world, const MkRingMove* moves, std::uint32_t count,
                      void* const* streams) {
  Nccl& nccl = *world_of(world).nccl;
  nccl.begin();
  for (std::uint32_t i = 0; i < count; ++i) {
    const MkRingMove& move = moves[i];
    if (move.from == move.to) continue;
    const std::size_t elements = move.bytes / kElementBytes;
    nccl.send(move.from, move.to, move.source, elements, stream_of(streams[move.from]));
    nccl.receive(move.to, move.from, move.target, elements, stream_of(streams[move.to]));
  }
  nccl.end();
  for (std::uint32_t i = 0; i < count; ++i) {
    const MkRingMove& move = moves[i];
    if (move.from != move.to) continue;
    current(move.to);
    require(cudaMemcpyAsync(move.target, move.source, move.bytes, cudaMemcpyDeviceToDevice,
                            stream_of(streams[move.to])),
            "own rows");
  }
  current(0);
}

void mk_ring_all_gather(void* world, const void* const* sources, void* const* targets,
                        std::uint32_t count, std::uint64_t bytes, void* const* streams) {
  World& it = world_of(world);
  it.nccl->begin();
  for (std::uint32_t i = 0; i < count; ++i) {
    std::vector<Nccl::Call> calls;
    for (std::uint32_t r = 0; r < it.size(); ++r) {
      const std::size_t at = std::size_t{i} * it.size() + r;
      calls.push_back({sources[at], targets[at], stream_of(streams[r])});
    }
    it.nccl->all_gather(calls, bytes / kElementBytes);
  }
  it.nccl->end();
  current(0);
}

void mk_ring_rail_memory(void* ring, std::uint64_t bytes, void** by_rank) {
  Ring& it = ring_of(ring);
  it.add_rails(bytes);
  for (std::uint32_t r = 0; r < it.world.size(); ++r) by_rank[r] = it.rail_memory(r);
}
void mk_ring_rail_begin(void* ring) { ++ring_of(ring).epoch; }
void mk_ring_rail_send(void* ring, std::uint32_t rank, const MkRingParcel* parcels,
                       std::uint32_t count, void* stream) {
  Ring& it = ring_of(ring);
  current(rank);
  std::uint32_t flag = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    Parcel parcel;
    parcel.source = parcel.target = kFirstByte + parcels[i].offset;
    parcel.bytes = parcels[i].bytes;
    parcel.first_flag = flag;
    parcel.chunk_bytes = kChunkBytes;
    post(it.rails[rank], 1 - rank / it.world.locals, parcel, it.epoch, stream_of(stream));
    flag += chunks_of(parcels[i].bytes, kChunkBytes);
  }
  current(0);
}
void mk_ring_rail_await(void* ring, std::uint32_t rank, const MkRingParcel* parcels,
                        std::uint32_t count, void* stream) {
  Ring& it = ring_of(ring);
  current(rank);
  std::uint32_t flags = 0;
  for (std::uint32_t i = 0; i < count; ++i) flags += chunks_of(parcels[i].bytes, kChunkBytes);
  await_flags(it.rails[rank], 0, flags, it.epoch,
              static_cast<std::uint32_t*>(it.missed[rank].data()), stream_of(stream));
  current(0);
}
int mk_ring_rail_right(void* ring) {
  std::uint32_t any = 0;
  for (const DeviceMemory& missed : ring_of(ring).missed) {
    std::uint32_t one = 0;
    require(cudaMemcpy(&one, missed.data(), sizeof one, cudaMemcpyDefault), "missed");
    require(cudaMemset(missed.data(), 0, sizeof one), "missed");
    any |= one;
  }
  return any == 0 ? 1 : 0;
}

void mk_ring_merge(void* /*world*/, std::uint32_t rank, void* o, int batch, std::int64_t rows,
                   int heads, int dim, const MkRingPartial* partials, int count, void* stream) {
  current(rank);
  std::vector<PartialAttention> all;
  for (int i = 0; i < count; ++i)
    all.push_back({partials[i].o, partials[i].lse, partials[i].first, partials[i].rows});
  merge({o, batch, rows, heads, dim}, all.data(), count, stream_of(stream));
  current(0);
}

}  // extern "C"
