#include "kernels/plan/experts.h"

#include <algorithm>
#include <cmath>

#include "kernels/ops/combine/spec.h"
#include "kernels/ops/moe/spec.h"
#include "kernels/plan/model.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels::plan {
namespace {

/// Before the first tile of Dispatch+GEMM: what a routing plan of no rows takes, and one
/// warpgroup's time for each row of all ranks. Of GEMM+Combine: the same of its index, of this
/// rank's rows. From the waits of compute blocks at 1024 and 65536 rows on one H200
/// (moe_h200_1x1.json).
constexpr double kRouteUs = 60;
constexpr double kRouteRowUs = 0.075;
constexpr double kIndexUs = 30;
constexpr double kIndexRowUs = 0.035;
/// A warpgroup that packs rows looks at each before it copies it (kernels/ops/moe/SM90.md).
constexpr double kPackRowUs = 1;
/// A launch with copy engines begins and ends so much later, as their queue waits for it and the
/// stream for the queue (moe_h200_1x2_transports.json, 128 tokens a rank).
constexpr double kEnginesUs = 15;
/// GB/s, read and written, of a warpgroup that sums beside the product: 12 KiB are on their way for
/// 1.2 µs.
constexpr double kSumRowsGbS = 10;
/// A part of the sums on one node is left when the product is done: 0.57 to 0.64 in the same runs.
constexpr double kSumsLeft = 0.6;

double us(double bytes, double gb_s) { return gb_s > 0 ? bytes / (gb_s * 1e3) : 0; }

/// This rank's tokens to the node's others: by copy engines (kernels/gather/engine_steps.h), whose
/// pieces are two copies each, of bytes and of flags; or by so many warpgroups. `bytes`: to all of
/// them.
double share_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                std::uint32_t warpgroups, double bytes) {
  if (!candidate.engines)
    return us(bytes,
              saturated_gb_s(machine, warpgroups, machine.copy_gb_s, machine.rows_link_gb_s));
  const double peers = problem.locals - 1.0;
  const double piece =
      static_cast<double>(moe_dispatch_dma_bytes(static_cast<std::uint64_t>(bytes / peers)));
  const double copies = 2 * peers * std::ceil(bytes / peers / piece);
  return copies * machine.engine_each_us + us(bytes, machine.engine_gb_s);
}

ExpertTerms moe_terms(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  const std::uint32_t streams = std::max(1u, candidate.stream_warpgroups);
  const std::uint32_t plan =
      moe_dispatch_plan_groups(streams, problem.nodes, problem.locals, candidate.engines);
  ExpertTerms terms;
  terms.before = kRouteUs + kRouteRowUs * problem.shape.m * problem.experts.top_k / plan;
  if (candidate.engines) terms.before += kEnginesUs;
  // The others, or engines, share this rank's tokens meanwhile; then all pack.
  const std::uint32_t sharers = streams > plan ? streams - plan : streams;
  const double link = expert_link_bytes(problem);
  const double own = link / problem.nodes;
  if (own > 0) terms.share = share_us(problem, machine, candidate, sharers, own);
  const double packed =
      double{1} * tokens_of_rank(problem) * problem.experts.top_k * problem.shape.k * kElementBytes;
  const double row_bytes = double{1} * problem.shape.k * kElementBytes;
  const double group_gb_s = row_bytes / (1e3 * (kPackRowUs + us(row_bytes, machine.copy_gb_s)));
  const double pack_gb_s = std::min(streams * group_gb_s, machine.hbm_gb_s / 2);
  terms.packed = us(packed, pack_gb_s);
  terms.local = terms.packed + std::max(0.0, terms.share - terms.before);
  if (candidate.receive_warpgroups > 0)
    terms.passed = us(link - own, saturated_gb_s(machine, candidate.receive_warpgroups,
                                                 machine.pass_on_gb_s, machine.rows_link_gb_s));
  return terms;
}

ExpertTerms combine_terms(const Problem& problem, const Machine& machine,
                          const Candidate& candidate) {
  const double tokens = tokens_of_rank(problem);
  const double row_bytes = double{1} * problem.shape.n * bytes_of(problem.result.partials);
  // Rows are read, and written once summed; sums for other nodes are read there again.
  const double other_nodes = problem.nodes - 1.0;
  const double any = 1 - std::pow(1 - 1.0 / problem.nodes, problem.experts.top_k);
  const double of_token = problem.experts.top_k;
  const double summed = (tokens * (of_token + 1) + 3 * tokens * any * other_nodes) * row_bytes;
  const double streams = std::max(1u, candidate.stream_warpgroups);
  ExpertTerms terms;
  terms.before = kIndexUs + kIndexRowUs * tokens * of_token / streams;
  terms.sum_gb_s = std::min(streams * kSumRowsGbS, machine.hbm_gb_s);
  terms.local = us(expert_link_bytes(problem), machine.link_gb_s);
  if (problem.nodes > 1) {
    // Tokens of a step are summed when all of its rows are there: the last one's after the product.
    terms.sums = us(summed, terms.sum_gb_s);
    terms.last_sums = 1.0 / combine_cuda_steps(problem.nodes);
  } else {
    terms.sums = us(summed, machine.hbm_gb_s);
    terms.last_sums = kSumsLeft;
  }
  return terms;
}

}  // namespace

ExpertTerms expert_terms(const Problem& problem, const Machine& machine,
                         const Candidate& candidate) {
  return problem.op == Op::kMoe ? moe_terms(problem, machine, candidate)
                                : combine_terms(problem, machine, candidate);
}

double expert_link_bytes(const Problem& problem) {
  const double others = problem.locals - 1.0;
  const double tokens = tokens_of_rank(problem);
  if (problem.op == Op::kMoe)
    return tokens * problem.nodes * others * problem.shape.k * kElementBytes;
  return tokens * problem.experts.top_k * problem.shape.n * bytes_of(problem.result.partials) *
         others / problem.locals;
}

}  // namespace mk::kernels::plan
