#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "kernels/comm/part.h"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/host/on_device.h"
#include "shm/atomic.h"
#include "shm/flag.h"
#include "tests/gpu/mirror.h"

namespace mk::test {
namespace {

namespace ptx = kernels::cuda::ptx;
using kernels::cuda::OnDevice;

constexpr std::uint64_t kPatienceNs = 5'000'000'000;
constexpr unsigned kQueues = MirrorTimes::kLists;
/// A mover's: little, as what is on its way to the rank is before whatever it needs next.
constexpr std::uint32_t kBufferBytes = 16 * 1024;

/// What a mover brings at a time: bytes [begin, begin + bytes) of an item.
struct Move {
  std::uint32_t item = 0;
  std::uint32_t begin = 0;
  std::uint32_t bytes = 0;
};

/// Who works on a list: warps that bring bytes, each with a block of its own, and warps of those
/// blocks that look at what the rank shows. One looks at the host's memory: a dozen threads that do
/// make whatever crosses the bus take many times as long (tests/gpu/README.md).
struct Staff {
  unsigned movers;      ///< with full buffers; of smaller pieces more, up to kMoversMost times
  unsigned lookers;     ///< 0: what is shown lies in the host's memory
  std::uint32_t ahead;  ///< moves, at least: more where a rank has more under way
};
constexpr unsigned kLookersOfBlock = 3;
constexpr unsigned kMoversMost = 3;
constexpr Staff kStaff[kQueues] = {{150, 450, 192}, {150, 450, 192}, {60, 0, 96}};

/// A list on the device. What is counted goes on from launch to launch.
struct DeviceQueue {
  const Reflection* items = nullptr;
  const Move* moves = nullptr;
  std::uint32_t count = 0;  ///< items
  std::uint32_t move_count = 0;
  unsigned movers = 0;
  unsigned lookers = 0;
  std::uint32_t ahead = 0;
  std::uint32_t* brought = nullptr;   ///< by item: moves made
  std::uint32_t* counters = nullptr;  ///< moves and items taken, moves of shown items
  std::uint32_t moves_before = 0;
  std::uint32_t looks_before = 0;
  std::uint32_t shown_before = 0;
};
enum Counter : unsigned { kMoves, kLooks, kShown, kCounters };

struct DeviceQueues {
  DeviceQueue queues[kQueues];
};

__device__ bool is_leader() { return threadIdx.x % 32 == 0; }

/// By one thread: shows the rank a flag, and a word with it. The bytes before it have arrived
/// (bulk_wait<0>, which over NVLink the other GPU answers), so it has nothing to order, as far as
/// hardware goes. PTX would have a release. But a fence waits for all that movers of the same SM
/// have on their way, tens of microseconds where links are full. Every element is judged.
__device__ void show(const Reflection& item, std::uint32_t epoch) {
  if (item.has_word) {
    shm::store_relaxed(reinterpret_cast<std::uint64_t*>(item.flag),
                       std::uint64_t{item.word} << 32 | epoch);
  } else {
    shm::store_relaxed(item.flag, epoch);
  }
}

/// By one thread: whether the flag has reached the epoch in time.
__device__ bool await_alone(const std::uint32_t* flag, std::uint32_t epoch) {
  const std::uint64_t end_ns = ptx::now_ns() + kPatienceNs;
  bool seen = false;
  do {
    seen = shm::flag_reached(flag, epoch);
  } while (!seen && ptx::now_ns() < end_ns);
  return seen;
}
/// By a whole warp.
__device__ bool await(const std::uint32_t* flag, std::uint32_t epoch) {
  return __any_sync(0xffffffffu, is_leader() && await_alone(flag, epoch));
}

/// By a whole warp: the next move or item of the list that no other has.
__device__ std::uint32_t take(const DeviceQueue& queue, Counter counter, std::uint32_t before) {
  std::uint32_t ticket = 0;
  if (is_leader()) ticket = atomicAdd(&queue.counters[counter], 1u) - before;
  return __shfl_sync(0xffffffffu, ticket, 0);
}

struct MoverShared {
  alignas(128) unsigned char buffer[kBufferBytes];
  std::uint64_t loaded;
};

/// A warp, through whose shared memory the copy engine brings the bytes, as the operators' kernels
/// do it: without waiting, as the rank's own bytes are on their way, too, before it shows them.
class Mover {
 public:
  __device__ explicit Mover(MoverShared& shared) : shared_(shared) {
    if (is_leader()) {
      ptx::mbarrier_init(&shared_.loaded, 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
  }

  /// False: the rank has shown too little in time.
  __device__ bool run(const DeviceQueue& queue, std::uint32_t epoch) {
    for (std::uint32_t i; (i = take(queue, kMoves, queue.moves_before)) < queue.move_count;) {
      const Move move = queue.moves[i];
      const Reflection& item = queue.items[move.item];
      const std::uint32_t least = i < queue.ahead ? 0 : i - queue.ahead;
      if (!await(&queue.counters[kShown], queue.shown_before + least)) return false;
      if (item.awaits != nullptr && !await(item.awaits, epoch * item.awaits_count)) return false;
      const std::uint32_t end = move.begin + move.bytes;
      for (std::uint32_t begin = move.begin; begin < end; begin += kBufferBytes) {
        load(item, begin, end);
        store(item, begin, end);
      }
      if (is_leader()) ptx::add_release_gpu(&queue.brought[move.item], 1u);
    }
    return true;
  }

 private:
  __device__ static std::uint32_t piece(std::uint32_t begin, std::uint32_t end) {
    return end - begin < kBufferBytes ? end - begin : kBufferBytes;
  }
  __device__ void load(const Reflection& item, std::uint32_t begin, std::uint32_t end) {
    if (!is_leader()) return;
    ptx::mbarrier_arrive_expect(&shared_.loaded, piece(begin, end));
    ptx::bulk_load(shared_.buffer, item.source + begin, piece(begin, end), &shared_.loaded);
  }
  /// What was loaded, until it is there. Rows apart fill a buffer evenly.
  __device__ void store(const Reflection& item, std::uint32_t begin, std::uint32_t end) {
    ptx::mbarrier_wait(&shared_.loaded, parity_);
    parity_ ^= 1;
    if (item.rows == 1) {
      if (is_leader()) ptx::bulk_store(item.target + begin, shared_.buffer, piece(begin, end));
    } else {
      std::byte* const target = item.target + begin / item.row_bytes * item.target_stride;
      const std::uint32_t rows = piece(begin, end) / item.row_bytes;
      for (std::uint32_t row = threadIdx.x % 32; row < rows; row += 32)
        ptx::bulk_store(target + row * item.target_stride, shared_.buffer + row * item.row_bytes,
                        item.row_bytes);
    }
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
    __syncwarp();
  }

  MoverShared& shared_;
  std::uint32_t parity_ = 0;
};

/// By one thread: shows the rank what follows item `i`, which it has shown just now. False: the
/// bytes did not come in time.
__device__ bool answer(const DeviceQueue& queue, std::uint32_t i, std::uint32_t epoch,
                       MirrorTimes::List& times) {
  const std::uint64_t seen_ns = ptx::now_ns();
  const Reflection& item = queue.items[i];
  const std::uint32_t moves = item.rows == 0 ? 0 : item.pieces;
  if (!await_alone(&queue.brought[i], epoch * moves)) return false;
  if (item.sharers == 1 || (atomicAdd(item.counter, 1u) + 1) % item.sharers == 0) show(item, epoch);
  if (item.told != nullptr) ptx::add_relaxed_gpu(item.told, 1u);
  if (moves == 0) return true;
  atomicAdd(&queue.counters[kShown], moves);
  ptx::max_relaxed_gpu(&times.first_seen_inverted, ~seen_ns);
  ptx::max_relaxed_gpu(&times.last_seen, seen_ns);
  ptx::add_relaxed_gpu(&times.sum_of_lags, ptx::now_ns() - seen_ns);
  ptx::add_relaxed_gpu(&times.count, std::uint64_t{1});
  return true;
}

/// A warp, one of several, that answers items as they are shown. False: one was not in time.
__device__ bool look(const DeviceQueue& queue, std::uint32_t epoch, MirrorTimes::List& times) {
  for (std::uint32_t i; (i = take(queue, kLooks, queue.looks_before)) < queue.count;) {
    if (!await(queue.items[i].seen, epoch)) return false;
    if (__any_sync(0xffffffffu, is_leader() && !answer(queue, i, epoch, times))) return false;
  }
  return true;
}

/// The only warp that does, at the host's memory: the lanes' looks are on their way together.
__device__ bool look_at_host(const DeviceQueue& queue, std::uint32_t epoch,
                             MirrorTimes::List& times) {
  const std::uint64_t end_ns = ptx::now_ns() + kPatienceNs;
  bool came = true;
  for (std::uint32_t i = threadIdx.x % 32;
       __any_sync(0xffffffffu, i < queue.count) && __all_sync(0xffffffffu, came);) {
    if (i < queue.count && shm::flag_reached(queue.items[i].seen, epoch)) {
      came = answer(queue, i, epoch, times);
      i += 32;
    }
    came = came && ptx::now_ns() < end_ns;
  }
  return __all_sync(0xffffffffu, came);
}

__global__ void __launch_bounds__(32 * (1 + kLookersOfBlock))
    mirror_kernel(const __grid_constant__ DeviceQueues all, std::uint32_t epoch,
                  std::uint32_t* missed, MirrorTimes* times) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  if (threadIdx.x == 0) ptx::max_relaxed_gpu(&times->begin_inverted, ~ptx::now_ns());
  unsigned place = blockIdx.x;
  unsigned of = 0;
  for (; place >= all.queues[of].movers; ++of) place -= all.queues[of].movers;
  const DeviceQueue& queue = all.queues[of];
  const unsigned warp = threadIdx.x / 32;
  bool came = true;
  if (warp == 0) {
    Mover mover(*reinterpret_cast<MoverShared*>(dynamic_shared));
    came = mover.run(queue, epoch);
  } else if (place * kLookersOfBlock + warp - 1 < queue.lookers) {
    came = look(queue, epoch, times->lists[of]);
  } else if (queue.lookers == 0 && place == 0 && warp == 1) {
    came = look_at_host(queue, epoch, times->lists[of]);
  }
  if (!came && is_leader()) *missed = 1;
}

__global__ void pack_kernel(PackedPartial partial, const kernels::TileRect* tiles,
                            std::uint64_t tile_bytes, std::uint32_t tile_columns,
                            std::byte* packed) {
  const kernels::TileRect tile = tiles[blockIdx.x];
  const auto* a = static_cast<const __nv_bfloat16*>(partial.a);
  const auto* b = static_cast<const __nv_bfloat16*>(partial.b);
  auto* const out = reinterpret_cast<__nv_bfloat16*>(packed + blockIdx.x * tile_bytes);
  for (std::uint32_t i = threadIdx.x; i < tile.rows * tile.columns; i += blockDim.x) {
    const std::uint32_t row = i / tile.columns;
    const std::uint32_t column = i - row * tile.columns;
    const std::uint64_t from_a = std::uint64_t{tile.row + row} * partial.k;
    const std::uint64_t from_b = std::uint64_t{tile.column + column} * partial.k;
    float sum = 0;
    for (int j = 0; j < partial.k; ++j)
      sum += __bfloat162float(a[from_a + j]) * __bfloat162float(b[from_b + j]);
    out[std::uint64_t{row} * tile_columns + column] = __float2bfloat16_rn(sum);
  }
}

__global__ void fill_kernel(std::uint32_t* words, std::uint32_t count, std::uint32_t value) {
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) words[i] = value;
}

template <class T>
std::unique_ptr<DeviceMemory> copy_of(const std::vector<T>& values) {
  if (values.empty()) return nullptr;
  auto memory = std::make_unique<DeviceMemory>(values.size() * sizeof(T));
  require(
      cudaMemcpy(memory->data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
      "copy");
  return memory;
}

}  // namespace

Mirror::Mirror(int device, const Reflections& even, const Reflections& odd, UnderWay under_way)
    : device_(device) {
  const OnDevice on_device(device_);
  queues_[0] = make_queue(0, even.first, odd.first, under_way.first);
  queues_[1] = make_queue(1, even.later, odd.later, under_way.later);
  queues_[2] = make_queue(2, even.network, odd.network, 0);
  missed_ = copy_of(std::vector<std::uint32_t>{0});
  times_ = copy_of(std::vector<MirrorTimes>(1));
  require(cudaFuncSetAttribute(mirror_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(sizeof(MoverShared))),
          "mirror");
  require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
}

Mirror::~Mirror() {
  const OnDevice on_device(device_);
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

Mirror::Queue Mirror::make_queue(unsigned of, const std::vector<Reflection>& even,
                                 const std::vector<Reflection>& odd,
                                 std::uint32_t under_way) const {
  for (const Reflection& item : even) {
    if (item.rows > 1 && kBufferBytes % item.row_bytes != 0) {
      std::fprintf(stderr, "a mirror brings rows of %u bytes only where %u are a multiple\n",
                   item.row_bytes, kBufferBytes);
      std::exit(1);
    }
  }
  std::vector<Move> moves;
  std::uint64_t buffered = 0;  // bytes of the moves' first buffers
  for (std::uint32_t i = 0; i < even.size(); ++i) {
    const Reflection& item = even[i];
    for (std::uint32_t piece = 0; item.rows != 0 && piece < item.pieces; ++piece) {
      const kernels::ByteRange whole{0, item.rows * item.row_bytes};
      const kernels::ByteRange part = part_of(whole, kernels::Part{piece, item.pieces});
      moves.push_back({i, static_cast<std::uint32_t>(part.begin), part.bytes});
      buffered += std::min(part.bytes, kBufferBytes);
    }
  }
  Queue queue;
  queue.count = static_cast<std::uint32_t>(even.size());
  queue.move_count = static_cast<std::uint32_t>(moves.size());
  const Staff& staff = kStaff[of];
  queue.movers = staff.movers;
  queue.ahead = std::max(staff.ahead, under_way);
  // As many bytes under way, whatever the pieces.
  if (buffered != 0)
    queue.movers = static_cast<unsigned>(
        std::min<std::uint64_t>(staff.movers * moves.size() * kBufferBytes / buffered,
                                std::uint64_t{kMoversMost} * staff.movers));
  queue.moves = copy_of(moves);
  queue.items[0] = copy_of(even);
  queue.items[1] = copy_of(odd);
  queue.brought = copy_of(std::vector<std::uint32_t>(even.size()));
  queue.counters = copy_of(std::vector<std::uint32_t>(kCounters));
  return queue;
}

void fill_words(std::uint32_t* words, std::uint32_t count, std::uint32_t value,
                cudaStream_t stream) {
  fill_kernel<<<1, 128, 0, stream>>>(words, count, value);
  require(cudaGetLastError(), "words");
}

void Mirror::launch(std::uint32_t epoch) {
  const OnDevice on_device(device_);
  DeviceQueues all;
  unsigned blocks = 0;
  for (unsigned i = 0; i < kQueues; ++i) {
    const Queue& queue = queues_[i];
    DeviceQueue& now = all.queues[i];
    now.count = queue.count;
    now.move_count = queue.move_count;
    if (queue.count == 0) continue;
    now.movers = queue.movers;
    now.lookers = kStaff[i].lookers;
    now.ahead = queue.ahead;
    now.items = static_cast<const Reflection*>(queue.items[epoch % 2]->data());
    if (queue.moves) now.moves = static_cast<const Move*>(queue.moves->data());
    now.brought = static_cast<std::uint32_t*>(queue.brought->data());
    now.counters = static_cast<std::uint32_t*>(queue.counters->data());
    // Each warp ends with a ticket that names nothing.
    now.moves_before = (epoch - 1) * (queue.move_count + queue.movers);
    now.looks_before = (epoch - 1) * (queue.count + now.lookers);
    now.shown_before = (epoch - 1) * queue.move_count;
    blocks += queue.movers;
  }
  require(cudaMemsetAsync(times_->data(), 0, sizeof(MirrorTimes), stream_), "times");
  mirror_kernel<<<blocks, 32 * (1 + kLookersOfBlock), sizeof(MoverShared), stream_>>>(
      all, epoch, static_cast<std::uint32_t*>(missed_->data()),
      static_cast<MirrorTimes*>(times_->data()));
  require(cudaGetLastError(), "mirror");
}

bool Mirror::saw_all() {
  const OnDevice on_device(device_);
  require(cudaStreamSynchronize(stream_), "mirror");
  std::uint32_t missed = 0;
  require(cudaMemcpy(&missed, missed_->data(), sizeof missed, cudaMemcpyDeviceToHost), "missed");
  return missed == 0;
}

double MirrorTimes::lag_us() const {
  std::uint64_t sum = 0;
  std::uint64_t all = 0;
  for (const List& list : lists) {
    sum += list.sum_of_lags;
    all += list.count;
  }
  return all == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(all) / 1e3;
}

MirrorTimes Mirror::times() {
  const OnDevice on_device(device_);
  require(cudaStreamSynchronize(stream_), "mirror");
  MirrorTimes times;
  require(cudaMemcpy(&times, times_->data(), sizeof times, cudaMemcpyDeviceToHost), "times");
  return times;
}

void pack_partial(const PackedPartial& partial, const std::vector<kernels::TileRect>& tiles,
                  std::uint64_t tile_bytes, std::uint32_t tile_columns, void* packed,
                  cudaStream_t stream) {
  if (tiles.empty()) return;
  const auto places = copy_of(tiles);
  pack_kernel<<<static_cast<unsigned>(tiles.size()), 256, 0, stream>>>(
      partial, static_cast<const kernels::TileRect*>(places->data()), tile_bytes, tile_columns,
      static_cast<std::byte*>(packed));
  require(cudaGetLastError(), "pack_partial");
  require(cudaStreamSynchronize(stream), "pack_partial");
}

}  // namespace mk::test
