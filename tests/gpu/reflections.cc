#include "tests/gpu/reflections.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "kernels/comm/banks.h"
#include "kernels/comm/workspace_head.h"
#include "kernels/ops/ag_gemm/schedule.h"
#include "kernels/ops/gemm_ar/schedule.h"
#include "kernels/ops/gemm_rs/schedule.h"

namespace mk::test {
namespace {

using kernels::AgGemmSchedule;
using kernels::ByteRange;
using kernels::GatherSchedule;
using kernels::GemmArSchedule;
using kernels::GemmRsSchedule;
using kernels::PackedTiles;
using kernels::TileRect;

/// One launch's list as it is made.
class Maker {
 public:
  Maker(const JobSetup& setup, const Plan& plan, const MirroredPlaces& places, std::uint32_t epoch)
      : setup_(setup), plan_(plan), places_(places), epoch_(epoch) {}

  Reflections all;

  void add_rows(const RowsOrder& order) {
    const AgGemmSchedule schedule(plan_.ag, mirrored_world(setup_), setup_.m);
    const GatherSchedule& gather = schedule.gather();
    const std::uint32_t rows = setup_.m / setup_.world();
    const std::uint32_t chunks = gather.chunks(rows);
    const std::uint32_t bank = kernels::bank_of(epoch_, plan_.ag.gather.banks);
    const auto brought = [&](std::uint32_t origin, std::uint32_t chunk) {
      const ByteRange range = gather.chunk_range(rows, chunk);
      demand(range.bytes % 16 == 0, "rows of whole vectors");
      const std::byte* const source =
          chunk == 0 ? places_.header
                     : places_.rows[origin] + (range.begin - kernels::kGatherHeaderBytes);
      return run(source, at(0, gather.slot(bank, origin) + range.begin), range.bytes);
    };
    // Rank p's own rows, and those that it passes on.
    const auto add = [&](std::vector<Reflection>& to, std::uint32_t p, std::uint32_t node,
                         std::uint32_t chunk) {
      const std::uint32_t first = node * locals();
      Reflection one = brought(first + p, chunk);
      if (chunk != 0) one.pieces = node == 0 ? order.shared_parts : order.onward.parts;
      one.seen = word(turned(p), gather.ready(first, chunk));
      one.flag = word(0, gather.ready(first + p, chunk));
      to.push_back(one);
    };
    // Shared in turn: all for the rank before it, then all for the one before that, ...; what rank
    // 0 then brings to rank L - turn, rank `turn` brings to rank 0. Else each chunk to all.
    if (order.arrival == kernels::Arrival::kSoonInTurn) {
      for_peers([&](std::uint32_t p) {
        for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) add(all.first, p, 0, chunk);
      });
    } else if (!order.by_dma) {
      for (std::uint32_t chunk = 0; chunk < chunks; ++chunk)
        for_peers([&](std::uint32_t p) { add(all.first, p, 0, chunk); });
    }
    if (setup_.nodes == 1) return;
    for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
      Reflection one = brought(locals(), chunk);
      one.seen = places_.arrivals_there + gather.arrival(bank, 1, 0, chunk);
      one.flag = places_.arrivals + gather.arrival(bank, 0, 1, chunk);
      one.told = places_.told + chunk;
      add_arrival(one);
      if (chunk != 0 && order.onward.dma_chunks != 0) continue;  // MirroredDma
      for_peers([&](std::uint32_t p) {
        add(all.later, p, 1, chunk);
        await_told(all.later.back(), chunk, 1);
      });
    }
    if (!gather.flags().has_releases()) return;
    Reflection release;
    release.seen = places_.arrivals_there + gather.release(1);
    release.flag = places_.arrivals + gather.release(0);
    all.network.push_back(release);
  }

  void add_shard_tiles() {
    const GemmRsSchedule schedule(plan_.rs, setup_.m);
    const std::uint64_t bytes = plan_.rs.tile_bytes(schedule.grid(0));
    const std::uint64_t of_node = bytes * schedule.grid(0).tiles();
    for (std::uint32_t step = 0; step < schedule.tiles(); ++step) {
      const GemmRsSchedule::Tile tile = schedule.tile_at(0, 0, step);
      if (tile.local == 0) continue;
      const std::uint32_t p = turned(tile.local);
      Reflection one = run(places_.partials[p] + tile.node * of_node + tile.tile * bytes,
                           at(0, schedule.slots(p, tile.node) + tile.tile * bytes), bytes);
      one.seen = word(tile.local, schedule.tile_ready(0, tile.node, tile.tile));
      one.flag = word(0, schedule.tile_ready(p, tile.node, tile.tile));
      all.first.push_back(one);
    }
    if (setup_.nodes == 1) return;
    const std::uint32_t bank = kernels::bank_of(epoch_, plan_.rs.banks);
    add_sums(schedule.packed(0), schedule.flags(), schedule.receive_bank(bank, 0, 1), bank);
  }

  void add_owned_tiles() {
    const GemmArSchedule schedule(plan_.ar, setup_.m);
    demand(schedule.tiles() % locals() == 0, "as many tiles for each rank");
    const std::uint64_t bytes = schedule.slot_bytes();
    for (std::uint32_t step = 0; step < schedule.tiles(); ++step) {
      const std::uint32_t tile = schedule.tile_at(0, 0, step);
      const std::uint32_t owner = schedule.owner(tile);
      const std::uint32_t owned = schedule.owned_index(tile);
      if (owner == 0) continue;
      const std::uint32_t p = turned(owner);
      Reflection one =
          run(places_.partials[p] + owned * bytes, at(0, schedule.slot(p, owned)), bytes);
      one.seen = word(owner, schedule.tile_ready(0, owned));
      one.flag = word(0, schedule.tile_ready(p, owned));
      if (setup_.nodes == 1) one.told = places_.told + owned;
      all.first.push_back(one);
    }
    for (std::uint32_t chunk = 0; chunk < schedule.chunks(0); ++chunk) {
      const kernels::TileRange tiles = schedule.chunk_tiles(0, chunk);
      for_peers([&](std::uint32_t p) {
        for (std::uint32_t owned = tiles.begin; owned < tiles.end; ++owned) {
          const TileRect rect = schedule.rect(schedule.tile_of(p, owned));
          demand(rect.columns == schedule.tile_cols(), "whole tiles");
          Reflection one;
          one.seen = word(turned(p), schedule.out_ready(0, chunk));
          one.source = places_.their_tiles[p] + owned * bytes;
          one.target = at(0, schedule.out(rect));
          one.target_stride = std::uint64_t{setup_.n} * kernels::kElementBytes;
          one.rows = rect.rows;
          one.row_bytes = rect.columns * kernels::kElementBytes;
          one.flag = word(0, schedule.out_ready(p, chunk));
          one.sharers = tiles.end - tiles.begin;
          one.counter = places_.counters + chunk * locals() + p;
          // It has sums of a tile when rank 0 has, or, over nodes, of a chunk.
          if (setup_.nodes == 1) {
            await_told(one, owned, locals() - 1);
          } else {
            await_told(one, chunk, 1);
          }
          all.later.push_back(one);
        }
      });
    }
    if (setup_.nodes == 1) return;
    const std::uint32_t bank = kernels::bank_of(epoch_, plan_.ar.banks);
    add_sums(schedule.packed(0), schedule.flags(), schedule.receive_bank(bank, 0, 1), bank);
  }

  /// That the launch begins, where ranks tell each other by records, with which m.
  void add_records() {
    for_peers([&](std::uint32_t p) {
      Reflection one;
      one.seen = &record(turned(p), 0)->epoch;
      static_assert(offsetof(kernels::LaunchRecord, m) == sizeof(std::uint32_t));
      one.has_word = true;
      one.word = setup_.m;
      one.flag = &record(0, p)->epoch;
      all.first.push_back(one);
    });
  }
  void add_ends() {
    const kernels::WorkspaceHead head{locals()};
    for_peers([&](std::uint32_t p) {
      Reflection one;
      one.seen = word(turned(p), head.finished(0));
      one.flag = word(0, head.finished(p));
      all.first.push_back(one);
    });
  }

 private:
  std::uint32_t locals() const { return setup_.locals; }
  /// The rank whose flags of rank 0 say when rank `p` shows rank 0 the like (mirror.h).
  std::uint32_t turned(std::uint32_t p) const { return locals() - p; }
  template <class F>
  void for_peers(F&& add) const {
    for (std::uint32_t p = 1; p < locals(); ++p) add(p);
  }
  std::byte* at(std::uint32_t local, std::uint64_t offset) const {
    return places_.workspaces[local] + offset;
  }
  std::uint32_t* word(std::uint32_t local, std::uint64_t offset) const {
    return reinterpret_cast<std::uint32_t*>(at(local, offset));
  }
  kernels::LaunchRecord* record(std::uint32_t local, std::uint32_t of) const {
    const kernels::WorkspaceHead head{locals()};
    return reinterpret_cast<kernels::LaunchRecord*>(at(local, head.record(epoch_, of)));
  }
  static Reflection run(const std::byte* source, std::byte* target, std::uint64_t bytes) {
    Reflection one;
    one.source = source;
    one.target = target;
    one.rows = 1;
    one.row_bytes = static_cast<std::uint32_t>(bytes);
    return one;
  }
  void await_told(Reflection& one, std::uint32_t index, std::uint32_t count) const {
    one.awaits = places_.told + index;
    one.awaits_count = count;
  }
  /// In pieces, as the bytes of few chunks are on their way at one time.
  void add_arrival(Reflection one) {
    constexpr std::uint32_t kPiece = 64 * 1024;
    one.pieces = one.row_bytes <= kPiece ? 1 : one.row_bytes / kPiece;
    all.network.push_back(one);
  }
  /// What the rail peer sends, into the receive bank at `offset`.
  void add_sums(const PackedTiles& packed, const kernels::FlagMap& flags, std::uint64_t offset,
                std::uint32_t bank) {
    for (std::uint32_t chunk = 0; chunk < packed.chunks(); ++chunk) {
      const ByteRange range = packed.chunk_range(chunk);
      Reflection one = run(places_.sums + range.begin, at(0, offset + range.begin), range.bytes);
      one.seen = places_.arrivals_there + flags.arrival(bank, 1, 0, chunk);
      one.flag = places_.arrivals + flags.arrival(bank, 0, 1, chunk);
      one.told = places_.told + chunk;
      add_arrival(one);
    }
  }

  const JobSetup& setup_;
  const Plan& plan_;
  const MirroredPlaces& places_;
  const std::uint32_t epoch_;
};

}  // namespace

void demand(bool holds, const char* what) {
  if (holds) return;
  fmt::print(stderr, "a mirrored rank needs {}\n", what);
  std::exit(1);
}

Reflections reflections(const JobSetup& setup, const Plan& plan, const MirroredPlaces& places,
                        const RowsOrder& order, std::uint32_t epoch) {
  Maker maker(setup, plan, places, epoch);
  switch (setup.op) {
    case Op::kAgGemm:
      maker.add_rows(order);
      break;
    case Op::kGemmRs:
      maker.add_records();
      maker.add_shard_tiles();
      break;
    case Op::kGemmAr:
      maker.add_records();
      maker.add_owned_tiles();
      break;
  }
  maker.add_ends();
  return maker.all;
}

OwnTiles own_tiles(const JobSetup& setup, const Plan& plan) {
  OwnTiles own;
  if (setup.op == Op::kGemmRs) {
    const kernels::TileGrid grid = GemmRsSchedule(plan.rs, setup.m).grid(0);
    for (std::uint32_t tile = 0; tile < grid.tiles(); ++tile) own.places.push_back(grid.rect(tile));
    own.tile_bytes = plan.rs.tile_bytes(grid);
    own.tile_columns = grid.tile_cols();
  } else {
    const GemmArSchedule schedule(plan.ar, setup.m);
    for (std::uint32_t owned = 0; owned < schedule.owned(0); ++owned)
      own.places.push_back(schedule.rect(schedule.tile_of(0, owned)));
    own.tile_bytes = schedule.slot_bytes();
    own.tile_columns = schedule.tile_cols();
  }
  return own;
}

}  // namespace mk::test
