/// \file
/// How long a launch takes, term by term, as arithmetic over a Machine. Host only; no state.
#pragma once

#include <cstdint>

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/timeline.h"

namespace mk::kernels::plan {

/// What one rank has to do in a launch; bytes, tiles. It depends on the problem and the tile alone.
struct Work {
  double tiles = 0;           ///< of all rows that this rank multiplies
  double steps = 0;           ///< of K, 64 elements each, a tile
  double b_bytes = 0;         ///< of the weights
  double link_bytes = 0;      ///< rows or partial tiles, to the node's others
  double result_bytes = 0;    ///< GEMM + AllReduce: results, to the node's others
  double passed_bytes = 0;    ///< AllGather + GEMM: rows from other nodes, to the node's others
  double sum_bytes = 0;       ///< read and written by sums within the node
  double sent_sum_bytes = 0;  ///< read by the sums that go over the network
  double come_sum_bytes = 0;  ///< read, written or stored by the sums of what has come
  double network_bytes = 0;   ///< sent over this rank's rail
};
Work work_of(const Problem& problem, const Candidate& candidate);

/// `candidate` is legal for the problem (legal.h); its tile and chunk are named. The formulas and
/// what they stem from stand beside each term in model.cc. `machine` has the problem's kind.
Timeline predict(const Problem& problem, const Machine& machine, const Candidate& candidate);

/// Terms of predict(), by themselves.
/// `b_bytes`: of the weights, which tiles of 128 columns read twice as often as those of 256.
double tile_us(const Machine& machine, const Tiling& tiling, double steps, double b_bytes);
/// `tiles` of tile_us() each, of `tile_n` columns, over `blocks` SMs, in waves, at the power limit
/// if that is long.
double product_us(const Machine& machine, double tiles, double tile_us, double blocks,
                  std::uint32_t tile_n = 256);
/// Of a product that reads its weights in so many passes (rows of tiles that go together): its
/// tiles' time and what memory takes hinder each other.
double with_weights_us(const Machine& machine, double product_us, double b_bytes, double passes);
/// Tiles before the first chunk for the network is there: a rank alone on its node sends its own
/// tiles, others wait for sums of the node's.
double fill_tiles(const Problem& problem, const Machine& machine);
/// AllGather+GEMM: whether tiles that span all shards are quicker, where they may (AgGemmSchedule).
bool spans_shards(const Problem& problem, const Machine& machine, const Candidate& candidate);
/// AllGather+GEMM: in how many passes its tiles' order reads B (AgGemmBands, kernels/ops/ag_gemm).
double gather_passes(const Problem& problem, const Candidate& candidate);
/// GB/s at which so many warpgroups fill a link that takes `link` GB/s.
double saturated_gb_s(const Machine& machine, double warpgroups, double each, double link);
/// Of legs that go on at one time: a sharp maximum (the `sharpness`-norm).
double overlapped_us(double sharpness, double one, double other);
/// GB/s of `warpgroups` that copy a rank's rows to `peers` others: saturated, less by crowding.
double copy_rate_gb_s(const Machine& machine, double warpgroups, std::uint32_t peers);

}  // namespace mk::kernels::plan
