/// \file
/// The executors of GEMM+Combine's interleaving test: products that are small numbers, and sums
/// of them; as a CPU's threads do it, and as a GPU's groups do.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels/ops/combine/protocol.h"
#include "tests/kernels/combine/handles.h"
#include "tests/kernels/support/reference.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {

/// What a rank's handle lacks in a launch.
enum class Fault { kNone, kIncomplete, kRowMissing, kOffset, kRow, kId };

/// An element of the product row of that token and slot, times its weight: exact in bf16, and so is
/// the sum of a few.
inline int product(std::uint32_t epoch, const MoeRow& row, std::uint32_t column) {
  std::uint32_t hash = row.rank * 0x9e3779b1u ^ epoch * 0x85ebca6bu ^ row.token * 0xc2b2ae35u ^
                       row.slot * 0x27d4eb2fu ^ column * 0x165667b1u;
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  return static_cast<int>(hash >> 27);
}

/// Exact for the few bits of these.
inline std::uint16_t bf16_of(int value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
}

struct CombineRank {
  CombineLaunch launch;
  RankRouting routing;
  Handle handle;
  Fault fault = Fault::kNone;
  std::vector<std::uint16_t> out;
  std::uint32_t sums_before_products = 0;  ///< made while compute blocks were at work
};

class Executor : public SimExecutor {
 public:
  Executor(const SimExecutor& frame, CombineRank& rank) : SimExecutor(frame), rank_(rank) {}

  template <class PlaceOf>
  bool multiply(const CombineTile& tile, std::uint32_t padded_rows, const TileRect& columns,
                PlaceOf&& place_of) {
    if (padded_rows < tile.rows || padded_rows % rank_.launch.plan.row_pad != 0) return false;
    for (std::uint32_t i = 0; i < tile.rows; ++i) {
      const MoeRow& row = rank_.handle.rows[tile.row + i];
      std::byte* const place = place_of(i);
      for (std::uint32_t c = 0; place != nullptr && c < columns.columns; ++c)
        store(place, c, product(rank_.launch.epoch, row, columns.column + c));
      maybe_yield();
    }
    return true;
  }

  template <class Before, class Rows, class After>
  void sum(const CombineSum& job, Before&& before, Rows&& rows, After&& after) {
    const std::uint32_t hidden = rank_.launch.plan.shape.hidden;
    rank_.sums_before_products += computing() ? 1 : 0;
    std::vector<int> sums(hidden, 0);
    const auto add = [&](const std::byte* row) {
      for (std::uint32_t c = 0; c < hidden; ++c) sums[c] += load(row, c);
      maybe_yield();
    };
    before(add);
    rows(add);
    after(add);
    for (std::uint32_t c = 0; c < hidden; ++c) {
      if (job.target != nullptr) {
        store(job.target, c, sums[c]);
      } else {
        rank_.out[std::size_t{job.token} * hidden + c] = bf16_of(sums[c]);
      }
    }
    maybe_yield();
  }

 private:
  bool f32() const { return rank_.launch.plan.shape.partials == CombinePartials::kF32; }
  bool computing() const {
    const std::uint32_t* done = rank_.launch.local->done_by(Role::kCompute);
    return std::any_of(done, done + rank_.launch.blocks.compute,
                       [&](std::uint32_t epoch) { return epoch != rank_.launch.epoch; });
  }
  void store(std::byte* row, std::uint32_t column, int value) const {
    if (f32()) {
      reinterpret_cast<float*>(row)[column] = static_cast<float>(value);
    } else {
      reinterpret_cast<std::uint16_t*>(row)[column] = bf16_of(value);
    }
  }
  int load(const std::byte* row, std::uint32_t column) const {
    if (f32()) return static_cast<int>(reinterpret_cast<const float*>(row)[column]);
    return static_cast<int>(
        to_double(DType::kBf16, reinterpret_cast<const std::uint16_t*>(row)[column]));
  }

  CombineRank& rank_;
};

/// One of several lanes, which are threads here.
struct ThreadLanes {
  std::uint32_t index;
  std::uint32_t count;
  std::barrier<>* all;
  std::uint32_t* scratch;

  void sync() const { all->arrive_and_wait(); }
  static void least(std::uint32_t* word, std::uint32_t value) {
    std::atomic_ref<std::uint32_t> its(*word);
    for (std::uint32_t seen = its; seen > value && !its.compare_exchange_weak(seen, value);) {
    }
  }
  static void most(std::uint32_t* word, std::uint32_t value) {
    std::atomic_ref<std::uint32_t> its(*word);
    for (std::uint32_t seen = its; seen < value && !its.compare_exchange_weak(seen, value);) {
    }
  }
  template <class Word>
  static void add(Word* word, Word value) {
    std::atomic_ref<Word>(*word) += value;
  }
};

/// As a GPU's groups do it: the index by several lanes, looks at several flags at a time, runs of
/// tokens summed as such, from entries and places.
class GroupExecutor : public Executor {
 public:
  using Executor::Executor;
  using Block = CombineBlock<GroupExecutor>;

  void do_piece(const Block& block, gemm_combine::CombinePiece piece) {
    constexpr std::uint32_t kLanes = 3;
    std::barrier<> all(kLanes);
    std::uint32_t scratch[kLanes];
    std::vector<std::thread> others;
    for (std::uint32_t lane = 1; lane < kLanes; ++lane) {
      others.emplace_back([&, lane] {
        gemm_combine::do_piece(block, piece, ThreadLanes{lane, kLanes, &all, scratch});
      });
    }
    gemm_combine::do_piece(block, piece, ThreadLanes{0, kLanes, &all, scratch});
    for (std::thread& other : others) other.join();
    maybe_yield();
  }
  std::uint32_t first_missing(const Block& block, const CombineRun& run, std::uint32_t begin,
                              std::uint64_t* seen) {
    constexpr std::uint32_t kAtOnce = 5;
    const std::uint32_t end = std::min(block.awaited(run), begin + kAtOnce);
    for (std::uint32_t i = begin; i < end; ++i) {
      const std::uint32_t* const flag = block.awaited_flag(run, i);
      if (flag == nullptr) continue;
      *seen = shm::load_acquire(flag);
      if (!shm::epoch_reached(static_cast<std::uint32_t>(*seen), block.epoch)) return i;
    }
    return end;
  }
  void sum_run(const Block& block, const CombineRun& run) {
    const World& world = block.world;
    for (std::uint32_t i = run.begin; i < run.end; ++i) {
      const CombineSum job = block.sum_of(run, i);
      const auto sums = [&](std::uint32_t begin, std::uint32_t end) {
        return [&, begin, end](auto&& add) {
          for (std::uint32_t node = begin; block.is_own(run) && node < end; ++node) {
            const std::uint32_t place = block.places(node)[job.token];
            if (place != 0) add(block.received(node) + block.schedule.sum_in_bank(place - 1));
          }
        };
      };
      const auto rows = [&](auto&& add) {
        const CombineEntry* const entries = block.entry(world.local, run.node, job.token, 0);
        const std::byte* const slots = block.at(block.schedule.slot(run.node, job.token, 0));
        for (std::uint32_t slot = 0; slot < block.launch.plan.shape.top_k; ++slot)
          if (entries[slot].epoch == block.epoch) add(slots + slot * block.schedule.row_bytes());
      };
      sum(job, sums(0, world.node), rows, sums(world.node + 1, world.nodes));
    }
  }
};

}  // namespace mk::kernels::testing
