/// \file
/// The attention core's policies for Ring Attention: own keys where the caller has them, others'
/// where the gather puts them.
///
/// A loading thread has registers for its own work alone. So it does not look at the gather's
/// flags: groups outside the compute blocks do (the watch role of kernels/ops/ring/roles.h),
/// and show it one word for each rank.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/comm/banks.h"
#include "kernels/cuda/core/attention_items.h"
#include "kernels/cuda/skeleton/executor.cuh"
#include "kernels/ops/ring/items.h"
#include "kernels/ops/ring/key_source.h"
#include "kernels/ops/ring/packed_items.h"
#include "kernels/ops/ring/sm90_arguments.h"

namespace mk::kernels::cuda {

/// `Ranges`: RingRanges or PackedRanges.
template <class Ranges>
class RingKeys {
 public:
  struct Params {
    typename Ranges::Params ranges;
    CUtensorMap k;
    CUtensorMap v;
    CUtensorMap gathered;
    const std::uint32_t* epoch = nullptr;  ///< of the last launch
    std::uint32_t banks = 1;
  };
  // Nobody writes the epoch before all blocks have ended.
  __device__ explicit RingKeys(const Params& params)
      : params_(params),
        ranges_(params.ranges),
        bank_(params.banks > 1 ? static_cast<int>(bank_of(*params.epoch + 1, params.banks)) : 0) {}
  __device__ int ranges(const AttentionItem& item) const { return ranges_.ranges(item); }
  __device__ KeyRange range(const AttentionItem& item, int number) const {
    return ranges_.range(item, number, bank_);
  }
  __device__ const Ranges& all() const { return ranges_; }
  __device__ int first_value(const KeyRange& range) const { return ranges_.first_value(range); }
  __device__ const CUtensorMap& k(const KeyRange& range) const {
    return ranges_.own(range) ? params_.k : params_.gathered;
  }
  __device__ const CUtensorMap& v(const KeyRange& range) const {
    return ranges_.own(range) ? params_.v : params_.gathered;
  }

 private:
  const Params& params_;
  Ranges ranges_;
  int bank_;
};

/// The word of a rank: how many of its rows are here, in which launch.
struct ShownRows {
  static __device__ void show(std::uint64_t* word, std::uint32_t epoch, std::uint32_t rows) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word),
                 "l"(std::uint64_t{epoch} << 32 | rows)
                 : "memory");
  }
  /// 0: nothing in this launch.
  static __device__ std::uint32_t seen(const std::uint64_t* word, std::uint32_t epoch) {
    std::uint32_t rows, its_epoch;
    asm volatile(
        "{\n"
        ".reg .b64 both;\n"
        "ld.acquire.gpu.global.b64 both, [%2];\n"
        "mov.b64 {%0, %1}, both;\n"
        "}"
        : "=r"(rows), "=r"(its_epoch)
        : "l"(word)
        : "memory");
    return its_epoch == epoch ? rows : 0;
  }
};

static_assert(kPackedBoxBytes == BulkCopierShared::kBufferBytes);

/// A leader that copies rows of one head, and shows to the compute blocks what has arrived.
class RingLeader : public CopyLeader {
 public:
  __device__ RingLeader(LeaderWarp& warp, DeviceState& state, Shared& shared, void* c,
                        std::uint64_t ldc)
      : CopyLeader(warp, state, shared, c, ldc) {}
  __device__ void copy(const CopyJob& job) {
    if (BulkCopier::collects(job)) {
      copier().collect(job);
    } else {
      CopyLeader::copy(job);
    }
  }
  /// Packed rows [begin, end) of the source, which lie apart in the caller's memory, to the job's
  /// targets. A tensor map's load brings as many as a buffer holds, and not one load for each.
  __device__ void copy_rows(const PackedRowMaps& maps, const KeySource& source, std::uint32_t begin,
                            std::uint32_t end, CopyJob& job) {
    constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    while (begin < end) {
      const std::uint32_t number = begin / source.sequence;  // a pair's keys, or its values
      const std::uint32_t from = begin - number * source.sequence;
      const std::uint32_t left = source.sequence - from;
      const std::uint32_t rows = left < end - begin ? left : end - begin;
      const CUtensorMap& map = number % 2 == 0 ? maps.k : maps.v;
      const auto head = static_cast<int>(number / 2 % source.heads);
      const auto batch = static_cast<int>(number / 2 / source.heads);
      copier().copy_full_buffers(job, rows, source.head_bytes,
                                 [&](unsigned char* to, std::uint64_t* loaded, std::uint32_t row) {
                                   cute::SM90_TMA_LOAD_4D::copy(&map, loaded, kHint, to, 0,
                                                                static_cast<int>(from + row), head,
                                                                batch);
                                 });
      job.move_targets(static_cast<std::int64_t>(rows) * source.head_bytes);
      begin += rows;
    }
  }
  /// Before the first show_rows, by watcher `index`.
  __device__ void begin(std::uint64_t* shown, std::uint32_t epoch, const RingTraceBuffer& trace,
                        std::uint32_t place) {
    shown_ = shown;
    epoch_ = epoch;
    trace_ = &trace;
    place_ = place;
  }
  __device__ void show_rows(std::uint32_t origin, std::uint32_t rows) {
    ShownRows::show(shown_ + origin, epoch_, rows);
    if (trace_->spans == nullptr) return;
    if (noted_ < trace_->capacity) {
      const std::uint64_t now = ptx::now_ns();
      trace_->spans[place_ * trace_->capacity + noted_] = {
          now, now, {rows, 0}, origin, SpanKind::kArrival};
    }
    trace_->counts[place_] = ++noted_;
  }

 private:
  std::uint64_t* shown_ = nullptr;
  std::uint32_t epoch_ = 0;
  const RingTraceBuffer* trace_ = nullptr;
  std::uint32_t place_ = 0;
  std::uint32_t noted_ = 0;
};

/// KeySource for leaders.
template <bool kSeveral>
struct MappedKeys {
  const KeySource& source;
  const PackedRowMaps& maps;
  RingLeader& leader;

  template <class Copy>
  __device__ void copy_packed(std::uint64_t begin, std::uint64_t end, CopyJob& job,
                              Copy&& copy) const {
    if (!maps.there || (begin | end) % source.head_bytes != 0)
      return source.copy_packed<kSeveral>(begin, end, job, copy);
    leader.copy_rows(maps, source, static_cast<std::uint32_t>(begin / source.head_bytes),
                     static_cast<std::uint32_t>(end / source.head_bytes), job);
  }
};

/// Waits for the keys of a range, as far as the item sees them. Who watches has a deadline, and
/// stops the launch when that passes.
class RingGate {
 public:
  struct Params {
    const std::uint64_t* shown = nullptr;  ///< by rank
    LocalWords* local = nullptr;           ///< its `stop`, and what people are told of waits
    int tile_queries = 0;
    int pairs = 0;           ///< batch * key heads
    bool all_first = false;  ///< an unfused launch
    RingTraceBuffer trace;
  };
  struct Shared {
    BlockTotals totals;
    std::uint32_t epoch;
    std::uint32_t in_vain;               ///< the launch has failed
    std::uint32_t seen[RingRuns::kMax];  ///< by run: rows of its rank
    std::uint32_t noted;                 ///< spans of a traced launch
    const RingAttentionLaunch* from;

    /// One thread.
    __device__ void begin(const RingAttentionLaunch& launch, std::uint32_t epoch_in) {
      totals = BlockTotals{};
      epoch = epoch_in;
      in_vain = 0;
      noted = 0;
      from = &launch;
    }
    __device__ const RingAttentionLaunch& launch() const { return *from; }
  };

  __device__ RingGate(const Params& params, Shared& shared) : params_(params), shared_(shared) {}

  template <class Ranges>
  __device__ void wait(const AttentionItem& item, const KeyRange& range,
                       const RingKeys<Ranges>& keys) {
    const Ranges& ranges = keys.all();
    if (params_.all_first && !began_) {
      for (int run = 0; run < ranges.count(); ++run)
        await(ranges, run, ranges.rows(run, params_.pairs));
    }
    began_ = true;
    if (!ranges.own(range)) {
      const int end = item.first_row + params_.tile_queries;
      const int last_row = (end < item.rows_end ? end : item.rows_end) - 1;
      await(ranges, range.source,
            ranges.gathered_before(ranges.first_value(range) + range.visible_to(last_row)));
    }
    note(SpanKind::kTile, static_cast<std::uint32_t>(item.first_row), ranges.origin(range.source));
  }
  /// One thread, when all that the block computes is done.
  static __device__ void end_trace(const RingTraceBuffer& trace, Shared& shared) {
    if (trace.spans == nullptr) return;
    if (shared.noted != 0) end_span(trace, shared);
    trace.counts[blockIdx.x] = shared.noted;
  }

 private:
  static __device__ void end_span(const RingTraceBuffer& trace, Shared& shared) {
    if (shared.noted <= trace.capacity)
      trace.spans[blockIdx.x * trace.capacity + shared.noted - 1].end_ns = ptx::now_ns();
  }
  /// Of a launch that is traced: what was noted last ends, and this begins.
  __device__ void note(SpanKind kind, std::uint32_t index, std::uint32_t rank) {
    const RingTraceBuffer& trace = params_.trace;
    if (trace.spans == nullptr) return;
    if (shared_.noted != 0) end_span(trace, shared_);
    if (shared_.noted++ >= trace.capacity) return;
    trace.spans[blockIdx.x * trace.capacity + shared_.noted - 1] = {
        ptx::now_ns(), 0, {index, 0}, rank, kind};
  }
  /// Tells people of a wait that lasts (tell_wait). Between this block and the rank stands a
  /// watcher.
  __device__ void tell(std::uint32_t origin) const {
    constexpr WaitSite kWait{.role = Role::kCompute, .kind = FlagKind::kRowsReady, .hops = 1};
    constexpr std::uint32_t kWord = AwaitedWord::encode(kWait);
    shm::store_relaxed(&params_.local->failure.awaited[static_cast<std::uint32_t>(Role::kCompute)],
                       kWord | origin);
  }
  /// Until so many rows of the run's rank are here.
  template <class Ranges>
  __device__ void await(const Ranges& ranges, int run, int rows) {
    if (shared_.seen[run] >= static_cast<std::uint32_t>(rows) || shared_.in_vain != 0) return;
    const std::uint64_t* word = params_.shown + ranges.origin(run);
    constexpr std::uint32_t kLooksPerStop = 64;
    for (std::uint32_t look = 0;; ++look) {
      const std::uint32_t seen = ShownRows::seen(word, shared_.epoch);
      if (seen >= static_cast<std::uint32_t>(rows)) {
        shared_.seen[run] = seen;
        if (look != 0) shared_.totals.waits.ns += ptx::now_ns();
        break;
      }
      if (look == 0) {
        note(SpanKind::kWait, static_cast<std::uint32_t>(rows), ranges.origin(run));
        ++shared_.totals.waits.count;
        shared_.totals.waits.ns -= ptx::now_ns();
      }
      if (look % kLooksPerStop != kLooksPerStop - 1) continue;
      tell(ranges.origin(run));
      if (shm::load_relaxed(&params_.local->stop) != 0) {
        shared_.in_vain = 1;
        return;
      }
    }
    ptx::fence_acquired_to_async();
  }

  const Params& params_;
  Shared& shared_;
  bool began_ = false;
};

}  // namespace mk::kernels::cuda
