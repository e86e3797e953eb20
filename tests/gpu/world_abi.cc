#include "tests/gpu/world_abi.h"

#include <fmt/format.h>

#include <string>
#include <vector>

#include "tests/gpu/bench_world.h"
#include "tests/gpu/exchange.h"
#include "tests/gpu/host_proxy.h"

namespace mk::test {

namespace {
std::string error_text;
}  // namespace

bool failed(const Status& status) {
  if (!status) error_text = status.error().message;
  return !status;
}

void current(std::uint32_t rank) { require(cudaSetDevice(static_cast<int>(rank)), "device"); }

BenchWorld::BenchWorld(const MkWorldSetup& setup) : nodes(setup.nodes), locals(setup.locals) {
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
  stopwatch = std::make_unique<Stopwatch>(std::move(timed), [this] {
    for (const auto& [operators, progress] : watched) fmt::print(stderr, "{}", progress());
  });
  if (size() > 1) nccl = Nccl::load(devices);
  current(0);
}

BenchWorld::~BenchWorld() {
  for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

void BenchWorld::join() {
  if (daemons != nullptr && members_++ == 0) daemons->attach();
}
void BenchWorld::leave() {
  if (daemons != nullptr && --members_ == 0) daemons->detach();
}

BenchMemory::BenchMemory(BenchWorld& world, std::uint64_t bytes, std::uint32_t flags)
    : world_(world) {
  world.join();
  if (world.daemons != nullptr) {
    contexts = world.daemons->memory(bytes, flags);
    return;
  }
  std::vector<std::byte*> places;
  for (std::uint32_t r = 0; r < world.size(); ++r) {
    workspaces_.emplace_back(bytes, static_cast<int>(r));
    places.push_back(static_cast<std::byte*>(workspaces_[r].data()));
    current(r);
    require(cudaMemset(places[r], 0, bytes), "workspace");
    require(cudaDeviceSynchronize(), "workspace");
  }
  for (std::uint32_t r = 0; r < world.size(); ++r)
    contexts.push_back(rank_context(1, world.locals, r, places, nullptr, nullptr));
  current(0);
}

BenchMemory::~BenchMemory() { world_.leave(); }

namespace {

constexpr std::uint32_t kChunkBytes = 4 << 20;  ///< of a parcel, at least
constexpr std::uint64_t kFirstByte = 1 << 16;   ///< of rail memory; before it lies its head
constexpr std::uint32_t kRailFlags = 4096;
constexpr std::uint64_t kElementBytes = 2;

class Rails {
 public:
  Rails(BenchWorld& world_in, std::uint64_t bytes)
      : world(world_in), memory_(world, kFirstByte + bytes, kRailFlags) {
    for (std::uint32_t r = 0; r < world.size(); ++r) {
      missed.emplace_back(sizeof(std::uint32_t), static_cast<int>(r));
      current(r);
      require(cudaMemset(missed[r].data(), 0, sizeof(std::uint32_t)), "missed");
      // CUDA loads a kernel at its first launch, and may wait for an idle GPU to do so. Beside a
      // kernel that waits for a daemon of this process, that would be for each other.
      post(context(r), 1 - r / world.locals, {}, 0, world.streams[r]);
      await_flags(context(r), 0, 0, 0, missed_of(r), world.streams[r]);
      require(cudaStreamSynchronize(world.streams[r]), "rails");
    }
    current(0);
  }
  std::byte* place(std::uint32_t r) const {
    return context(r).workspaces[r % world.locals] + kFirstByte;
  }
  const kernels::RankContext& context(std::uint32_t r) const { return memory_.contexts[r]; }
  std::uint32_t* missed_of(std::uint32_t r) const {
    return static_cast<std::uint32_t*>(missed[r].data());
  }

  BenchWorld& world;
  std::vector<DeviceMemory> missed;
  std::uint32_t epoch = 0;

 private:
  BenchMemory memory_;
};

Rails& rails_of(void* rails) { return *static_cast<Rails*>(rails); }

std::uint32_t chunk_bytes_of(const MkRailsParcel* parcels, std::uint32_t count) {
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < count; ++i) bytes += parcels[i].bytes;
  return parcel_chunk_bytes(bytes, count, kChunkBytes);
}

}  // namespace
}  // namespace mk::test

using namespace mk::test;  // NOLINT(google-build-using-namespace): a file of forwarders

extern "C" {

void* mk_world_create(const MkWorldSetup* setup) { return new BenchWorld(*setup); }
void mk_world_destroy(void* world) { delete static_cast<BenchWorld*>(world); }
void* mk_world_stream(void* world, std::uint32_t rank) { return world_of(world).streams[rank]; }
const char* mk_world_error() { return error_text.c_str(); }

void mk_world_time(void* world, void (*queue)(), int held, double* us) {
  Timing timing;
  world_of(world).stopwatch->run(queue, timing, held != 0);
  for (std::size_t r = 0; r < timing.by_rank.size(); ++r) us[r] = timing.by_rank[r][0];
  current(0);
}

void mk_world_exchange(void* world, const MkWorldMove* moves, std::uint32_t count,
                       void* const* streams) {
  Nccl* const nccl = world_of(world).nccl.get();
  if (nccl != nullptr) nccl->begin();
  for (std::uint32_t i = 0; i < count; ++i) {
    const MkWorldMove& move = moves[i];
    if (move.from == move.to || move.bytes == 0) continue;
    const std::size_t elements = move.bytes / kElementBytes;
    nccl->send(move.from, move.to, move.source, elements, stream_of(streams[move.from]));
    nccl->receive(move.to, move.from, move.target, elements, stream_of(streams[move.to]));
  }
  if (nccl != nullptr) nccl->end();
  for (std::uint32_t i = 0; i < count; ++i) {
    const MkWorldMove& move = moves[i];
    if (move.from != move.to || move.bytes == 0) continue;
    current(move.to);
    require(cudaMemcpyAsync(move.target, move.source, move.bytes, cudaMemcpyDeviceToDevice,
                            stream_of(streams[move.to])),
            "own rows");
  }
  current(0);
}

void mk_world_all_gather(void* world, const void* const* sources, void* const* targets,
                         std::uint32_t count, std::uint64_t bytes, void* const* streams) {
  BenchWorld& it = world_of(world);
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

void* mk_rails_create(void* world, std::uint64_t bytes, void** by_rank) {
  auto* const rails = new Rails(world_of(world), bytes);
  for (std::uint32_t r = 0; r < rails->world.size(); ++r) by_rank[r] = rails->place(r);
  return rails;
}
void mk_rails_destroy(void* rails) { delete static_cast<Rails*>(rails); }
void mk_rails_begin(void* rails) { ++rails_of(rails).epoch; }

void mk_rails_send(void* rails, std::uint32_t rank, const MkRailsParcel* parcels,
                   std::uint32_t count, void* stream) {
  Rails& it = rails_of(rails);
  current(rank);
  const std::uint32_t chunk_bytes = chunk_bytes_of(parcels, count);
  std::uint32_t flag = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    Parcel parcel;
    parcel.source = kFirstByte + parcels[i].source;
    parcel.target = kFirstByte + parcels[i].target;
    parcel.bytes = parcels[i].bytes;
    parcel.first_flag = flag;
    parcel.chunk_bytes = chunk_bytes;
    post(it.context(rank), 1 - rank / it.world.locals, parcel, it.epoch, stream_of(stream));
    flag += chunks_of(parcels[i].bytes, chunk_bytes);
  }
  current(0);
}

void mk_rails_await(void* rails, std::uint32_t rank, const MkRailsParcel* parcels,
                    std::uint32_t count, void* stream) {
  Rails& it = rails_of(rails);
  current(rank);
  const std::uint32_t chunk_bytes = chunk_bytes_of(parcels, count);
  std::uint32_t flags = 0;
  for (std::uint32_t i = 0; i < count; ++i) flags += chunks_of(parcels[i].bytes, chunk_bytes);
  await_flags(it.context(rank), 0, flags, it.epoch, it.missed_of(rank), stream_of(stream));
  current(0);
}

int mk_rails_right(void* rails) {
  std::uint32_t any = 0;
  for (const DeviceMemory& missed : rails_of(rails).missed) {
    std::uint32_t one = 0;
    require(cudaMemcpy(&one, missed.data(), sizeof one, cudaMemcpyDefault), "missed");
    require(cudaMemset(missed.data(), 0, sizeof one), "missed");
    any |= one;
  }
  return any == 0 ? 1 : 0;
}

}  // extern "C"
