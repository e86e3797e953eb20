#include "kernels/plan/collective.h"

#include <algorithm>

#include "kernels/plan/model.h"

namespace mk::kernels::plan {
namespace {

/// As many as a role can have.
constexpr std::uint32_t kWarpgroups = 128;

// Fitted on two H200s to 1024 and 16384 rows of 8192, ReduceScatter to 1024 and 4096
// (collectives_h200_1x2.json).
struct Form {
  double fused_us;      ///< begin, end and flags
  double unfused_us;    ///< and of the barrier between the phases
  double beside_share;  ///< of the shorter of memory and links, that the longer feels
};
constexpr Form kGather{32.1, 36, 0.244};
constexpr Form kScatter{17, 22, 0.48};

double us(double bytes, double gb_s) { return gb_s > 0 ? bytes / (gb_s * 1e3) : 0; }

}  // namespace

Collective collective_of(const Problem& problem) {
  const bool sums = problem.op != Op::kAgGemm;
  const double row =
      double{1} * (sums ? problem.shape.n : problem.shape.k) * bytes_of(problem.dtype);
  return {sums, problem.nodes, problem.locals, row * problem.shape.m, kWarpgroups};
}

CollectiveBytes bytes_moved(const Collective& collective) {
  const double whole = collective.bytes;
  const double others = collective.locals - 1.0;
  const double shard = whole / collective.nodes / collective.locals;
  CollectiveBytes bytes;
  bytes.network = shard * (collective.nodes - 1.0);
  if (!collective.sums) {
    // Every node's rows of this rail. Rows come, are read, and written to the caller's.
    bytes.link = shard * collective.nodes * others;
    const double come = whole - shard;
    bytes.memory = shard + come + 2 * whole;
    return bytes;
  }
  // Rows go to slots, its own too. Those that lie there are read, and their sums written.
  bytes.link = whole * others / collective.locals;
  bytes.memory = 3 * whole + whole / collective.locals;
  // Nodes' sums come, are read, and added up once more.
  if (collective.nodes > 1) bytes.memory += 2 * bytes.network + 2 * shard;
  return bytes;
}

Timeline predict(const Collective& collective, const Machine& machine, Mode form) {
  const Form& of = collective.sums ? kScatter : kGather;
  const double overlap = collective.sums ? machine.overlap_rs : machine.overlap_accounted;
  const CollectiveBytes bytes = bytes_moved(collective);
  Timeline time;
  const double link_gb_s = collective.sums ? machine.link_gb_s
                                           : copy_rate_gb_s(machine, collective.warpgroups,
                                                            std::max(1u, collective.locals) - 1);
  time.local = us(bytes.link, link_gb_s);
  time.sums = us(bytes.memory, machine.hbm_gb_s);
  time.network = us(bytes.network, machine.network_gb_s);
  const bool fused = form == Mode::kFused;
  time.launch = (fused ? of.fused_us : of.unfused_us) +
                (collective.nodes > 1 ? machine.network_latency_us : 0);
  if (!fused) {
    time.total = time.launch + time.local + time.sums + time.network;
    return time;
  }
  const double here = overlapped_us(overlap, time.local, time.sums) +
                      of.beside_share * std::min(time.local, time.sums);
  time.total = time.launch + overlapped_us(overlap, here, time.network);
  return time;
}

Bound bound_of(const Collective& collective, const Machine& machine, const Measured& measured) {
  const CollectiveBytes bytes = bytes_moved(collective);
  const double link_gb_s = measured.local_gb_s > 0
                               ? measured.local_gb_s
                               : std::max(machine.link_gb_s, machine.rows_link_gb_s);
  const double network_gb_s =
      measured.network_gb_s > 0 ? measured.network_gb_s : machine.network_gb_s;
  Bound bound;
  bound.network_us = us(bytes.network, network_gb_s);
  bound.local_us = std::max(us(bytes.link, link_gb_s),
                            us(bytes.memory, std::max(machine.hbm_gb_s, machine.weights_gb_s)));
  return bound;
}

}  // namespace mk::kernels::plan
