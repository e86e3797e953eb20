#include "kernels/plan/choose.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/comm/plan_tools.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/plan/accounted.h"
#include "kernels/plan/cluster.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/operator_work.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {
namespace {

/// The candidates' kinds, of which explain() shows the best of each.
struct Kind {
  const char* text;
  bool (*same)(const Candidate& chosen, const Candidate& other);
};
constexpr Kind kKinds[] = {
    {"unfused", [](const Candidate&, const Candidate& o) { return o.form == Mode::kUnfused; }},
    {"other tiles",
     [](const Candidate& c, const Candidate& o) {
       return o.form == c.form &&
              (o.tiling.tile_m != c.tiling.tile_m || o.tiling.tile_n != c.tiling.tile_n);
     }},
    {"other transport",
     [](const Candidate& c, const Candidate& o) {
       return o.form == c.form && o.engines != c.engines;
     }},
    {"other exchange",
     [](const Candidate& c, const Candidate& o) {
       return o.form == c.form && o.tiling.exchange != c.tiling.exchange;
     }},
    {"other sums",
     [](const Candidate& c, const Candidate& o) { return o.form == c.form && o.sums != c.sums; }},
    {"more warpgroups",
     [](const Candidate& c, const Candidate& o) {
       return o.form == c.form && o.engines == c.engines && o.compute_blocks < c.compute_blocks;
     }},
    {"fewer warpgroups",
     [](const Candidate& c, const Candidate& o) {
       return o.form == c.form && o.engines == c.engines && o.compute_blocks > c.compute_blocks;
     }},
    {"other chunks",
     [](const Candidate& c, const Candidate& o) {
       return o.form == c.form && o.engines == c.engines &&
              o.tiling.chunk_bytes != c.tiling.chunk_bytes;
     }},
};

/// Candidates are compared by it. The forms of an exchange differ in what its end takes over many
/// nodes, which predict() leaves out.
Timeline time_of(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  return has_exchanges(problem) ? predict_on_cluster(problem, machine, candidate)
                                : predict(problem, machine, candidate);
}

/// Chunks of a window times hops for which a turn is chosen; of more the plan's own has to do.
constexpr std::uint64_t kChunkHopsMax = 1u << 18;

/// By the order in which keys come, which predict() leaves out.
void choose_turn(const Problem& problem, const Machine& machine, Candidate& candidate) {
  if (!has_turns(problem) || machine.kind != MachineKind::kGpu || candidate.form != Mode::kFused)
    return;
  const Problem one = of_one_window(problem, machine.kind, candidate);
  const auto numbers = order_numbers(one, machine.kind, candidate);
  if (!numbers || std::uint64_t{numbers->chunks} * (problem.nodes - 1) > kChunkHopsMax) return;
  double least = HUGE_VAL;
  Candidate other = candidate;
  // The longest first: it feels latency least.
  for (const std::uint32_t turn : {RingAttentionTiling::kWholeShards, 32u, 16u, 8u, 4u, 2u, 1u}) {
    other.turn_chunks = turn;
    const double total = predict_on_cluster(problem, machine, other).total;
    if (total >= least) continue;
    least = total;
    candidate = other;
  }
}

/// The entry's candidate with what the problem names in its place; none where that is another way
/// of running.
std::optional<Candidate> tuned_candidate(const Problem& problem, const TunedEntry& entry) {
  const Named& named = problem.named;
  Candidate candidate = entry.candidate;
  Tiling& tiling = candidate.tiling;
  if (has_exchanges(problem) && tiling.exchange == Exchange::kAuto)
    tiling.exchange = Exchange::kOneShot;
  if ((named.tiling.tile_m != 0 && named.tiling.tile_m != tiling.tile_m) ||
      (named.tiling.tile_n != 0 && named.tiling.tile_n != tiling.tile_n) ||
      (named.tiling.exchange != Exchange::kAuto && named.tiling.exchange != tiling.exchange) ||
      named.engines.value_or(candidate.engines) != candidate.engines ||
      named.sums_once.value_or(candidate.sums == Sums::kOnce) != (candidate.sums == Sums::kOnce)) {
    return std::nullopt;
  }
  if (named.stream_warpgroups != 0 &&
      ((candidate.engines && !named.engines) || candidate.sums == Sums::kOwn))
    return std::nullopt;
  const auto take = [](std::uint32_t from, std::uint32_t& to) {
    if (from != 0) to = from;
  };
  take(named.tiling.chunk_bytes, tiling.chunk_bytes);
  take(named.tiling.banks, tiling.banks);
  take(named.tiling.local_banks, tiling.local_banks);
  if (problem.ranks() > 1) take(named.stream_warpgroups, candidate.stream_warpgroups);
  if (problem.nodes > 1) {
    take(named.receive_warpgroups, candidate.receive_warpgroups);
    take(named.send_warpgroups, candidate.send_warpgroups);
  }
  candidate.form = named.form.value_or(candidate.form);
  return candidate;
}

Status none_legal(const Problem& problem, const Machine& machine) {
  Candidate first;
  const Named& named = problem.named;
  first.tiling = named.tiling;
  if (named.tiling.tile_m == 0) first.tiling.tile_m = 128;
  if (named.tiling.tile_n == 0) first.tiling.tile_n = 128;
  const bool several = problem.ranks() > 1;
  if (problem.nodes > 1) first.send_warpgroups = std::max(1u, named.send_warpgroups);
  if (several) first.stream_warpgroups = named.stream_warpgroups;
  if (problem.nodes > 1) first.receive_warpgroups = named.receive_warpgroups;
  first.engines = named.engines.value_or(false);
  if (named.sums_once.value_or(false)) first.sums = Sums::kOnce;
  MK_RETURN_IF_ERROR(check_candidate(problem, machine, first));
  return fail(ErrorCode::kLimitExceeded,
              "{}: {} SMs of {} are too few for any way to run it over {} x {} ranks",
              name_of(problem.op), blocks_of_rank(problem, machine), machine.name, problem.nodes,
              problem.locals);
}

std::string terms_text(const Timeline& time) {
  struct Term {
    const char* name;
    double us;
  };
  const Term terms[] = {{"compute", time.compute},  {"NVLink", time.local},
                        {"passed on", time.passed}, {"network", time.network},
                        {"waits", time.wait},       {"sums left", time.sums},
                        {"last tiles", time.last},  {"launch", time.launch}};
  std::string text;
  for (const Term& term : terms) {
    if (term.us > 0) text += fmt::format("  {:<14}{:>10.1f} us\n", term.name, term.us);
  }
  return text;
}

/// The reason if copy engines are none of the kinds in Ring Attention or MoE Dispatch on a GPU.
std::string no_engines_text(const Problem& problem, const Machine& machine) {
  const bool asks = has_engines(problem.op) && !is_product(problem.op);
  if (!asks || machine.kind != MachineKind::kGpu || problem.ranks() == 1) return {};
  const Status possible = check_row_engines(problem);
  std::string why;
  if (!possible) {
    why = possible.error().message;
  } else if (!problem.named.engines.value_or(true)) {
    why = "warpgroups are named";
  } else if (problem.ranks_per_device > 1 && !problem.named.engines) {
    why = "ranks share a GPU";
  } else if (problem.op == Op::kMoe && problem.nodes > 1 && !problem.named.engines) {
    why = "over nodes they were not measured, and warpgroups pass on what the network brings";
  }
  return why.empty() ? why : fmt::format("  no copy engines: {}\n", why);
}

}  // namespace

const Candidate* cheapest(const Problem& problem, const Machine& machine,
                          std::span<const Candidate> candidates) {
  const Candidate* best = nullptr;
  double least = HUGE_VAL;
  for (const Candidate& candidate : candidates) {
    const double total = time_of(problem, machine, candidate).total;
    if (total >= least) continue;
    least = total;
    best = &candidate;
  }
  return best;
}

Result<Choice> choose(const Problem& problem, const Machine& machine, const Tuned* tuned) {
  // Before anything is divided by it.
  MK_RETURN_IF_ERROR(check_world(name_of(problem.op), problem.nodes, problem.locals));
  // They were measured by ranks with a whole GPU each.
  if (tuned != nullptr && blocks_of_rank(problem, machine) >= machine.sms) {
    if (const TunedEntry* entry = tuned->find(problem, machine.name)) {
      // A bucket's shapes differ: what one can run another may not.
      std::optional<Candidate> candidate = tuned_candidate(problem, *entry);
      if (candidate && place_warpgroups(problem, machine, *candidate) &&
          check_candidate(problem, machine, *candidate)) {
        return Choice{*candidate, time_of(problem, machine, *candidate), true};
      }
    }
  }
  const std::vector<Candidate> legal = legal_candidates(problem, machine);
  const Candidate* best = cheapest(problem, machine, legal);
  if (best == nullptr) return propagate(none_legal(problem, machine));
  Choice choice{*best, time_of(problem, machine, *best), false};
  choose_turn(problem, machine, choice.candidate);
  return choice;
}

Result<std::string> explain(const Problem& problem, const Machine& machine, const Tuned* tuned) {
  MK_ASSIGN_OR_RETURN(const Choice choice, choose(problem, machine, tuned));
  const std::vector<Candidate> legal = legal_candidates(problem, machine);
  std::string text =
      fmt::format("{} {} x {} x {} on {} x {} {}: {:.1f} us predicted\n{}{}\n\n",
                  name_of(problem.op), problem.shape.m, problem.shape.n, problem.shape.k,
                  problem.nodes, problem.locals, machine.name, choice.time.total,
                  choice.tuned ? "tuned: " : "", describe(problem, choice.candidate));
  text += terms_text(choice.time);
  if (choice.candidate.form == Mode::kFused && spans_shards(problem, machine, choice.candidate))
    text += "  a tile spans the rows of all ranks\n";
  text += fmt::format("\nof {} candidates, the best of other kinds:\n", legal.size());
  for (const Kind& kind : kKinds) {
    std::vector<Candidate> of_kind;
    std::copy_if(legal.begin(), legal.end(), std::back_inserter(of_kind),
                 [&](const Candidate& other) { return kind.same(choice.candidate, other); });
    const Candidate* best = cheapest(problem, machine, of_kind);
    if (best == nullptr) continue;
    const double total = time_of(problem, machine, *best).total;
    text += fmt::format("  {:<17}{:>10.1f} us  {:+6.1f}%  {}\n", kind.text, total,
                        (total / choice.time.total - 1) * 100, describe(problem, *best));
  }
  return text + no_engines_text(problem, machine);
}

}  // namespace mk::kernels::plan
